"""What a sampled token counts in the loss: alignment weights and the denominators of the optimiser step, in one number.

With the coefficients c a loss is a plain sum over tokens, so the losses of micro-batches and of processes are added,
never averaged. Torch-free.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from mgrpo.types import Row, TrajectoryId

LossAggMode = Literal[
    "seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "rollout-mean"
]


def token_coefficients(
    rows: Sequence[Row],
    loss_agg_mode: LossAggMode = "seq-mean-token-mean",
    scale_factor: float = 1.0,
    kept: Sequence[int] | None = None,
) -> list[float]:
    """What one sampled token of each row counts.

    ``rows`` are all those that share a denominator in the optimiser step: denominators are global, and any split into
    micro-batches adds up to the same gradient. A token of trajectory i with weight w_i and n_i sampled tokens counts

        seq-mean-token-mean       w_i / (n_i sum(w))                        equations (14) and (16)
        token-mean                w_i / sum(w n)
        seq-mean-token-sum        w_i / sum(w)
        seq-mean-token-sum-norm   w_i / (sum(w) scale_factor)               Dr. GRPO: a constant in place of the length
        rollout-mean              w_i / (sum of w n in its rollout x number of rollouts)

    A trajectory of several rows is one sequence. ``kept`` gives each row's number of tokens where some were rejected;
    trajectories and rollouts of which nothing is left are in no denominator.
    """
    kept = [row.sampled for row in rows] if kept is None else kept
    weights, lengths = row_weights(rows), _lengths(rows, kept)
    if loss_agg_mode == "rollout-mean":
        denominators = _rollouts(rows, weights, kept)
    elif loss_agg_mode == "token-mean":
        denominators = [math.fsum(w * n for w, n in zip(weights, kept, strict=True))] * len(rows)
    else:
        total = math.fsum(row.weight for row, length in zip(rows, lengths, strict=True) if length)
        if loss_agg_mode == "seq-mean-token-mean":
            denominators = [total * length for length in lengths]
        else:
            denominators = [total * (scale_factor if loss_agg_mode.endswith("-norm") else 1.0)] * len(rows)
    return [w / d if n else 0.0 for w, d, n in zip(weights, denominators, kept, strict=True)]


def row_weights(rows: Sequence[Row]) -> list[float]:
    """What a token of each row counts of its trajectory's weight. Undoes the sharing of `rows_of`, by sampled tokens;
    a segment that stands there twice, with a part of the weight each, is one segment."""
    if not any(row.segment for row in rows):
        return [row.weight for row in rows]
    sampled = [row.sampled for row in rows]
    whole = _lengths(rows, sampled)
    return [row.weight * length / n if n else 0.0 for row, length, n in zip(rows, whole, sampled, strict=True)]


def _lengths(rows: Sequence[Row], tokens: Sequence[int]) -> Sequence[int]:
    """Tokens of each row's trajectory, of all its segments."""
    if not any(row.segment for row in rows):
        return tokens
    parts: dict[TrajectoryId, dict[int, int]] = defaultdict(dict)
    for row, n in zip(rows, tokens, strict=True):
        parts[row.id][row.segment] = n
    return [sum(parts[row.id].values()) for row in rows]


def _rollouts(rows: Sequence[Row], weights: Sequence[float], kept: Sequence[int]) -> list[float]:
    tokens: dict[tuple[int, int], float] = defaultdict(float)
    for row, w, n in zip(rows, weights, kept, strict=True):
        tokens[row.id.group, row.id.rollout] += w * n
    rollouts = sum(mass > 0.0 for mass in tokens.values())
    return [tokens[row.id.group, row.id.rollout] * rollouts for row in rows]


def gradient_mass(
    rows: Sequence[Row], values: Sequence[Sequence[float]], coefficients: Sequence[float]
) -> dict[tuple[str, int], float]:
    """Sum over tokens of abs(coefficient x advantage) by (agent, invocation): how much each one can pull at the
    weights, before clipping. ``values`` has an advantage per turn of each row, ``coefficients`` a number per row."""
    mass: dict[tuple[str, int], float] = defaultdict(float)
    for row, own, c in zip(rows, values, coefficients, strict=True):
        if own.count(own[0]) == len(own):  # one advantage for all turns
            pull = abs(own[0]) * row.sampled
        else:
            pull = sum([abs(value) * len(turn.token_ids) for value, turn in zip(own, row.turns, strict=True)])
        mass[row.id.agent, row.id.invocation] += c * pull
    return dict(mass)
