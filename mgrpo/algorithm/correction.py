"""Correction for tokens that another policy sampled than the one that learns: an engine that computes differently, or
older weights. It compares the log-probabilities of the learner before its update (old) with those stored when the token
was sampled (behaviour).

    token      w_t = min(exp(old_t - behaviour_t), threshold)
    sequence   w   = min(exp(sum over the row's targets of old_t - behaviour_t), threshold), for every target of the row

Importance weights are truncated above (TIS); rejection (IcePop, masked IS) drops what lies outside [low, high].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["none", "token", "sequence"]

# Keeps exp and its gradient finite in float32; a policy this far from its sampler is outside any range.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """log of the ratio of two probabilities per token, clamped to +-20."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """Sum over the targets of each one's row, [N] -> [N]; ``row`` [N] says which row a target is in."""
    rows = int(row.max()) + 1 if len(row) else 0
    return values.new_zeros(rows).index_add(0, row, values)[row]


def row_means(values: Tensor, row: Tensor) -> Tensor:
    """Mean over the targets of each one's row, [N] -> [N]."""
    return row_sums(values, row) / row_sums(torch.ones_like(values), row)


def behaviour_ratio(old: Tensor, behaviour: Tensor, row: Tensor, level: Level) -> Tensor:
    """pi_old / pi_behaviour of each target [N], or of its whole row; without gradient."""
    difference = (old - behaviour).detach()
    if level == "sequence":
        difference = row_sums(difference, row)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def is_weights(old: Tensor, behaviour: Tensor, row: Tensor, level: Level, threshold: float) -> Tensor:
    """What the loss of each target [N] is multiplied by; 1 where ``level`` is "none"."""
    if level == "none":
        return torch.ones_like(old)
    return behaviour_ratio(old, behaviour, row, level).clamp(max=threshold)


def kept(old: Tensor, behaviour: Tensor, row: Tensor, level: Level, bounds: tuple[float, float]) -> Tensor:
    """Which targets [N] (bool) are not rejected: those whose ratio lies in ``bounds``; all where "none"."""
    if level == "none":
        return torch.ones_like(old, dtype=torch.bool)
    ratio = behaviour_ratio(old, behaviour, row, level)
    return (ratio >= bounds[0]) & (ratio <= bounds[1])
