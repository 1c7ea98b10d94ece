"""The policy losses, as plain sums over sampled tokens (equations 14 to 17 of M-GRPO, arXiv 2511.13288).

    loss = sum_t c_t ( w_t * L_t + kl_coef * KL_t - entropy_coef * H_t )

    ppo         L = - min(r A, clip(r, 1 - low, 1 + high) A)     where A < 0, at most - clip_ratio_c A (dual clip)
    cispo       L = - sg[clip(r, 1 - low, 1 + high)] A log pi
    reinforce   L = - A log pi
    sft         L = - log pi

r = pi / pi_old per token, or per sequence exp(mean over the row's tokens of log r) (GSPO); sg stops the gradient.
pi_old is the learner before its update where ``rollout_is`` corrects for the behaviour policy by w (correction.py),
else the behaviour policy itself. The coefficients c hold weights and denominators (coefficients.py). Tensors are [N].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mgrpo.algorithm.correction import Level, is_weights, log_ratio, row_means
from mgrpo.algorithm.packing import Batch

PolicyLoss = Literal["ppo", "cispo", "reinforce", "sft"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The options of a loss, under the field's names; the defaults are M-GRPO's."""

    policy_loss: PolicyLoss = "ppo"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    kl_coef: float = 0.0  # of the term in the loss
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    rollout_is: Level = "none"
    rollout_is_threshold: float = 2.0

    @property
    def only_advantages(self) -> bool:
        """Whether a token of advantage 0 has no gradient."""
        return self.policy_loss != "sft" and self.kl_coef == 0.0 and self.entropy_coef == 0.0


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


def objective_loss(logprobs: Tensor, entropy: Tensor, batch: Batch, objective: Objective) -> tuple[Tensor, TokenSums]:
    """The micro-batch's share of the loss (a scalar) and its metrics.

    ``logprobs`` is log pi(token) of the batch's targets, ``entropy`` that of the distribution it was drawn from (nats);
    its gradient is used only with ``entropy_coef``. Metrics are over the batch's targets, so rows that `pack` dropped
    for an advantage of 0 are not in them; metrics_log.py explains them.
    """
    old = _old(logprobs, batch, objective)
    per_token = token_loss(logprobs, old, batch.advantages, batch.row, objective)
    weights = is_weights(old, batch.behaviour_logprobs, batch.row, objective.rollout_is, objective.rollout_is_threshold)
    total = weights * per_token
    sums = {"entropy": entropy.detach().sum()}
    if batch.ref_logprobs is not None:
        kl = kl_estimate(logprobs, batch.ref_logprobs, objective.kl_estimator)
        total = total + objective.kl_coef * kl
        sums["kl"] = kl.detach().sum()
    if objective.entropy_coef:
        total = total - objective.entropy_coef * entropy
    if objective.rollout_is != "none":
        sums["rollout_is_mean"] = weights.sum()
    return (batch.coefficients * total).sum(), _metrics(logprobs.detach(), old, batch, objective, sums)


def token_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, row: Tensor, objective: Objective) -> Tensor:
    """L of each token; ``row`` says which sequence it is in."""
    if objective.policy_loss == "sft":
        return -logprobs
    if objective.policy_loss == "reinforce":
        return -advantages * logprobs
    ratio = policy_ratio(logprobs, old, row, objective.importance_sampling_level)
    clipped = ratio.clamp(1.0 - objective.clip_ratio_low, 1.0 + objective.clip_ratio_high)
    if objective.policy_loss == "cispo":
        return -clipped.detach() * advantages * logprobs
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if objective.clip_ratio_c is not None:
        bounded = torch.maximum(surrogate, objective.clip_ratio_c * advantages)
        surrogate = torch.where(advantages < 0.0, bounded, surrogate)
    return -surrogate


def policy_ratio(logprobs: Tensor, old: Tensor, row: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """r of each token, or of its row: the geometric mean of the row's token ratios (GSPO, arXiv 2507.18071)."""
    log_r = log_ratio(logprobs, old)
    return (log_r if level == "token" else row_means(log_r, row)).exp()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(pi || ref) of each sampled token, by Schulman's estimators: k1 = log pi - log ref, k2 = k1^2 / 2,
    k3 = exp(-k1) - 1 + k1. In expectation over pi all agree to second order; k2 and k3 are never negative."""
    k1 = log_ratio(logprobs, ref_logprobs)
    if estimator == "k1":
        return k1
    return k1.square() / 2.0 if estimator == "k2" else torch.expm1(-k1) + k1


def _old(logprobs: Tensor, batch: Batch, objective: Objective) -> Tensor:
    if objective.rollout_is == "none":
        return batch.behaviour_logprobs
    return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def _metrics(new: Tensor, old: Tensor, batch: Batch, objective: Objective, sums: dict[str, Tensor]) -> TokenSums:
    if new.numel() == 0:
        return TokenSums()
    if objective.policy_loss == "sft":
        sums["nll"] = -new.sum()
        return TokenSums(new.numel(), _floats(sums))
    log_r = log_ratio(new, old)
    before = new if batch.old_logprobs is None else batch.old_logprobs
    mismatch = log_ratio(before, batch.behaviour_logprobs)
    sums["approx_kl"] = (torch.expm1(log_r) - log_r).sum()
    sums["rollout_kl"] = (torch.expm1(mismatch) - mismatch).sum()
    sums["logprob_abs_diff"] = (before - batch.behaviour_logprobs).abs().sum()
    maxima = {"ratio_max": log_r.exp().max()}
    if objective.policy_loss != "reinforce":
        ratio = policy_ratio(new, old, batch.row, objective.importance_sampling_level)
        above = (ratio > 1.0 + objective.clip_ratio_high) & (batch.advantages > 0.0)
        below = (ratio < 1.0 - objective.clip_ratio_low) & (batch.advantages < 0.0)
        sums["clip_fraction"] = (above | below).sum()
    return TokenSums(new.numel(), _floats(sums), _floats(maxima))


def _floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all of them."""
    names = list(values)
    return dict(zip(names, torch.stack([values[name].double() for name in names]).tolist(), strict=True))
