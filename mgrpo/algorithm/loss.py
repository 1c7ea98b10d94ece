"""The clipped surrogate and the supervised loss, as plain sums over sampled tokens (equations 14 to 17, token-level).

    ratio_t = pi_theta(token_t) / pi_old(token_t)
    J_t     = min(ratio_t * A, clip(ratio_t, 1 - low, 1 + high) * A)
    loss    = - sum_t coefficient_t * J_t

Coefficients hold the alignment weights and the optimiser step's denominators, so the losses of micro-batches are added,
never averaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mgrpo.algorithm.packing import Batch
from mgrpo.types import Row, TrajectoryId

LossAggMode = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]

# Keeps exp and its gradient finite in float32; a policy this far from its sampler is outside any clip range.
MAX_LOG_RATIO = 20.0


def token_coefficients(rows: Sequence[Row], loss_agg_mode: LossAggMode = "seq-mean-token-mean") -> list[float]:
    """What one sampled token of each row counts in the loss, so that the loss is a plain sum over tokens.

    ``rows`` are those of the whole optimiser step: the denominators are global, and any split into micro-batches adds
    up to the same gradient. With trajectory i of weight w_i and n_i sampled tokens, one token of it counts
    w_i / (n_i * sum w) for "seq-mean-token-mean" (equations 14 and 16), w_i / sum(w * n) for "token-mean", w_i / sum w
    for "seq-mean-token-sum"; rows of one trajectory share its w. Rows without sampled tokens count 0 everywhere.
    """
    sampled = [row.loss_mask.count(True) for row in rows]
    if loss_agg_mode == "seq-mean-token-mean":
        numerators = [row.weight / n if n else 0.0 for row, n in zip(rows, sampled, strict=True)]
    else:
        numerators = _trajectory_weights(rows, sampled)
    if loss_agg_mode == "token-mean":
        denominator = math.fsum(w * n for w, n in zip(numerators, sampled, strict=True))
    else:
        denominator = math.fsum(row.weight for row, n in zip(rows, sampled, strict=True) if n)
    return [w / denominator if w else 0.0 for w in numerators]


def _trajectory_weights(rows: Sequence[Row], sampled: Sequence[int]) -> list[float]:
    """Undo the sharing of `rows_of`: a row holding n of its trajectory's N tokens carries n / N of the weight."""
    segments = {(row.id, row.segment): n for row, n in zip(rows, sampled, strict=True)}
    totals: Counter[TrajectoryId] = Counter()
    for (id, _), n in segments.items():
        totals[id] += n
    return [row.weight * totals[row.id] / n if n else 0.0 for row, n in zip(rows, sampled, strict=True)]


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Metrics of some tokens, in a form that adds up over micro-batches and processes."""

    tokens: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)  # their mean over tokens is the metric
    maxima: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: TokenSums) -> TokenSums:
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in {*self.sums, *other.sums}}
        maxima = {
            name: max(part.maxima[name] for part in (self, other) if name in part.maxima)
            for name in {*self.maxima, *other.maxima}
        }
        return TokenSums(self.tokens + other.tokens, sums, maxima)

    def metrics(self) -> dict[str, float]:
        """Token means and maxima; empty if there were no tokens (unknown is not zero)."""
        if self.tokens == 0:
            return {}
        return {name: total / self.tokens for name, total in self.sums.items()} | dict(self.maxima)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(pi_theta / pi_old) per token, any shape, clamped to +-20."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> Tensor:
    """The objective J_t of each token (to be maximised), same shape as the inputs."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    clipped = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def policy_loss(
    logprobs: Tensor, batch: Batch, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, TokenSums]:
    """The micro-batch's share of the loss (a scalar) and its metrics.

    ``logprobs`` is [B, T]: position t holds log pi_theta(token t | tokens before t); off targets it is never read, so
    padding and NaN there change nothing. Metrics: clip_fraction (tokens whose gradient the clip removed), approx_kl
    (k3 estimate of KL(old || new), nats per token), logprob_abs_diff (engine against trainer, nats), ratio_max. They
    are over the batch's targets: rows that `pack` dropped for an advantage of 0 are not in them.
    """
    new, old, advantages = logprobs[batch.targets], batch.old_logprobs[batch.targets], batch.advantages[batch.targets]
    objective = clipped_surrogate(new, old, advantages, clip_ratio_low, clip_ratio_high)
    loss = -(batch.coefficients[batch.targets] * objective).sum()
    return loss, _policy_sums(new.detach(), old, advantages, clip_ratio_low, clip_ratio_high)


def sft_loss(logprobs: Tensor, batch: Batch) -> tuple[Tensor, TokenSums]:
    """Supervised: - sum of coefficient * log pi_theta over the batch's targets, ``logprobs`` as for `policy_loss`."""
    new = logprobs[batch.targets]
    loss = -(batch.coefficients[batch.targets] * new).sum()
    return loss, TokenSums(new.numel(), {"nll": float(-new.detach().sum())})


def _policy_sums(new: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> TokenSums:
    if new.numel() == 0:
        return TokenSums()
    log_r = log_ratio(new, old)
    ratio = log_r.exp()
    clipped = ((ratio > 1.0 + high) & (advantages > 0)) | ((ratio < 1.0 - low) & (advantages < 0))
    k3 = ratio - 1.0 - log_r
    values = torch.stack([clipped.sum(), k3.sum(), (new - old).abs().sum(), ratio.max()])
    clip, kl, diff, ratio_max = (float(value) for value in values.tolist())
    sums = {"clip_fraction": clip, "approx_kl": kl, "logprob_abs_diff": diff}
    return TokenSums(new.numel(), sums, {"ratio_max": ratio_max})
