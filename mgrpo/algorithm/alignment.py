"""Any number of invocations -> rows with weights: how much each trajectory counts.

M-GRPO (arXiv 2511.13288, section on trajectory alignment) brings the d_k invocations of rollout k to a fixed number d
by random duplication or dropping. Its expected multiplicity is d / d_k, which the default uses as a weight: the same
expected mean and mean square, no extra forward pass, nothing thrown away.

    d = 2     rollout 0: one call     rollout 1: two calls     rollout 2: three calls
    weight    2                       1 1                      2/3 2/3 2/3
    resample  2                       1 1                      1 0 1    (one of three, by seed)
    none      1                       1 1                      1 1 1

Torch-free. Every weight here is an aligned trajectory's; rows of one trajectory share its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from struct import unpack
from typing import Literal

from mgrpo.errors import SamplingEvidenceError
from mgrpo.types import Row, Sample

Mode = Literal["weight", "resample", "none"]


# ---------------------------------------------------------------- how often each invocation counts


def multiplicities(count: int, d: int, mode: Mode, key: tuple[int | str, ...]) -> list[float]:
    """How often each of the ``count`` invocations of one rollout counts; 0 for those that are dropped.

    "weight" and "resample" sum to d unless count is 0; "resample" gives whole numbers drawn from a generator keyed by
    ``key``, so that rollouts do not disturb each other. Raises ValueError if d < 1.
    """
    if d < 1:
        raise ValueError(f"the alignment target d is {d}; trajectories_per_rollout must be at least 1")
    if mode == "none" or count == 0:
        return [1.0] * count
    if mode == "weight":
        return [d / count] * count
    return _resampled(count, d, key)


def _resampled(count: int, d: int, key: tuple[int | str, ...]) -> list[float]:
    """d - count extra draws with replacement, or d of count without: the paper's alignment, as multiplicities."""
    words = _random_words(max(count, d), key)
    if count >= d:
        kept = set(sorted(range(count), key=words.__getitem__)[:d])
        return [float(i in kept) for i in range(count)]
    shares = [1.0] * count
    for word in words[: d - count]:
        shares[word % count] += 1.0
    return shares


def _random_words(size: int, key: tuple[int | str, ...]) -> list[int]:
    """At least ``size`` random 64-bit numbers: BLAKE2b in counter mode, the same on every machine and version."""
    name = "\x1f".join(map(str, key))
    blocks = (blake2b(f"{name}\x1f{block}".encode()).digest() for block in range(math.ceil(size / 8)))
    return [word for block in blocks for word in unpack("<8Q", block)]


def recommended_d(counts: Iterable[int], quantile: float = 0.99) -> int:
    """The smallest d >= 1 with P(d_k <= d) >= ``quantile`` over the observed ``counts``, one d_k per rollout."""
    ordered = sorted(counts)
    if not ordered or not 0.0 < quantile <= 1.0:
        raise ValueError(f"need at least one rollout and 0 < quantile <= 1, got {len(ordered)} and {quantile}")
    # 0.07 * 100 is a little more than 7 in floating point.
    return max(1, ordered[math.ceil(quantile * len(ordered) - 1e-9) - 1])


# ---------------------------------------------------------------- samples to rows


def align(samples: Sequence[Sample], mode: Mode, d: int | None, *, seed: int, step: int) -> list[Row]:
    """Weighted rows of ONE agent's samples (any number of groups), in order of id whatever order they arrived in.

    Samples with an unknown reward or nothing sampled leave first, so d_k counts the known ones. ``d`` is None for an
    agent that is not aligned (the planner); a tree's root always has weight 1. Draws are keyed by
    (seed, step, group, agent, rollout). Raises ValueError for several agents or two samples of one id.
    """
    rows: list[Row] = []
    for (group, agent, rollout), members in _by_rollout(samples).items():
        calls = sum([sample.trajectory.parent is not None for sample in members])
        shares = iter(() if d is None else multiplicities(calls, d, mode, (seed, step, group, agent, rollout)))
        for sample in members:
            weight = 1.0 if d is None or sample.trajectory.parent is None else next(shares)
            if weight:
                rows += rows_of(sample, weight)
    return rows


def _by_rollout(samples: Sequence[Sample]) -> dict[tuple[int, str, int], list[Sample]]:
    """The known samples by (group, agent, rollout), all in order. Raises ValueError as `align` says."""
    known = [sample for sample in samples if sample.reward.value is not None and _is_sampled(sample)]
    keys = [(id.group, id.rollout, id.agent, id.invocation) for sample in known for id in (sample.trajectory.id,)]
    order = sorted(range(len(keys)), key=keys.__getitem__)  # tuples compare faster than the ids themselves
    if len(agents := {key[2] for key in keys}) > 1:
        raise ValueError(f"samples of several agents {sorted(agents)}; align one agent at a time")
    if repeated := [known[i].trajectory.id for i, next_ in pairwise(order) if keys[i] == keys[next_]]:
        raise ValueError(f"two samples share an id: {', '.join(map(str, repeated[:3]))}; take each trajectory once")
    found: dict[tuple[int, str, int], list[Sample]] = {}
    for i in order:
        group, rollout, agent, _ = keys[i]
        found.setdefault((group, agent, rollout), []).append(known[i])
    return found


def _is_sampled(sample: Sample) -> bool:
    for turn in sample.trajectory.turns:  # noqa: SIM110 (a generator for any() costs five times as much)
        if turn.token_ids:
            return True
    return False


def rows_of(sample: Sample, weight: float = 1.0) -> list[Row]:
    """The token rows of one trajectory: one, or one per rewritten history (`Turn.new_row`) that has sampled tokens.

    ``weight`` is shared over them in proportion to their sampled tokens, so that the trajectory stays the unit.
    Raises ValueError if the reward is unknown, SamplingEvidenceError if log-probabilities are missing.
    """
    trajectory, reward = sample.trajectory, sample.reward.value
    if reward is None:
        raise ValueError(f"{trajectory.id}: its reward is unknown ({sample.reward.cause}); leave it out before rows")
    starts, total = [0], 0
    for index, turn in enumerate(trajectory.turns):
        total += (n := len(turn.token_ids))
        if len(turn.logprobs) != n:
            lengths = f"{n} sampled tokens but {len(turn.logprobs)} log-probabilities"
            raise SamplingEvidenceError(f"{trajectory.id} turn {index}: {lengths}; exclude the trajectory")
        if turn.new_row and index:
            starts.append(index)
    if len(starts) == 1:
        return [Row(trajectory.id, 0, trajectory.turns, reward, weight)] if total else []
    parts = [trajectory.turns[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return [
        Row(trajectory.id, segment, turns, reward, weight * (n / total), first)
        for segment, (first, turns) in enumerate(zip(starts, parts, strict=True))
        if (n := sum([len(turn.token_ids) for turn in turns]))
    ]
