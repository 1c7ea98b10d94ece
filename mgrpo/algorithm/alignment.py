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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import numpy as np

from mgrpo.errors import SamplingEvidenceError
from mgrpo.types import Row, Sample, TrajectoryId, Turn

Mode = Literal["weight", "resample", "none"]


# ---------------------------------------------------------------- how often each invocation counts


def multiplicities(
    counts: Mapping[int, int], d: int, mode: Mode, key: tuple[int | str, ...]
) -> dict[tuple[int, int], float]:
    """How often invocation i of rollout k counts, by (k, i), for 0 <= i < counts[k]; dropped ones are absent.

    "weight" and "resample" sum to d over every rollout that made a call; "resample" gives whole numbers drawn from a
    generator keyed by (*key, k), so that rollouts do not disturb each other. Raises ValueError if d < 1.
    """
    if d < 1:
        raise ValueError(f"the alignment target d is {d}; trajectories_per_rollout must be at least 1")
    result: dict[tuple[int, int], float] = {}
    for rollout, count in counts.items():
        shares = _shares(count, d, mode, (*key, rollout))
        result.update({(rollout, i): share for i, share in enumerate(shares) if share})
    return result


def _shares(count: int, d: int, mode: Mode, key: tuple[int | str, ...]) -> list[float]:
    if mode == "none" or count == 0:
        return [1.0] * count
    if mode == "weight":
        return [d / count] * count
    return _resampled(count, d, key)


def _resampled(count: int, d: int, key: tuple[int | str, ...]) -> list[float]:
    """d - count extra draws with replacement, or d of count without: the paper's alignment, as multiplicities."""
    raw = _random_bits(max(count, d), key)
    if count >= d:
        kept = set(np.argsort(raw, kind="stable")[:d].tolist())
        return [float(i in kept) for i in range(count)]
    extra = np.bincount((raw[: d - count] % count).astype(np.int64), minlength=count)
    return [1.0 + float(n) for n in extra]


def _random_bits(size: int, key: tuple[int | str, ...]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Raw Philox output, which numpy keeps stable across versions (its Generator methods are not)."""
    digest = blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(size)


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
    known = sorted((s for s in samples if _is_known(s)), key=lambda sample: sample.trajectory.id)
    _check_identity(known)
    weights = {s.trajectory.id: 1.0 for s in known}
    if d is not None and mode != "none":
        weights |= _weights([s.trajectory.id for s in known if s.trajectory.parent is not None], mode, d, seed, step)
    return [row for s in known if weights[s.trajectory.id] for row in rows_of(s, weights[s.trajectory.id])]


def rows_of(sample: Sample, weight: float = 1.0) -> list[Row]:
    """The token rows of one trajectory: one, or one per rewritten history (`Turn.new_row`) that has sampled tokens.

    ``weight`` is shared over them in proportion to their sampled tokens, so that the trajectory stays the unit.
    Raises ValueError if the reward is unknown, SamplingEvidenceError if log-probabilities are missing.
    """
    trajectory, reward = sample.trajectory, sample.reward.value
    if reward is None:
        raise ValueError(f"{trajectory.id}: its reward is unknown ({sample.reward.cause}); leave it out before rows")
    segments: list[list[Turn]] = []
    for index, turn in enumerate(trajectory.turns):
        if len(turn.logprobs) != len(turn.token_ids):
            lengths = f"{len(turn.token_ids)} sampled tokens but {len(turn.logprobs)} log-probabilities"
            raise SamplingEvidenceError(f"{trajectory.id} turn {index}: {lengths}; exclude the trajectory")
        if turn.new_row or not segments:
            segments.append([])
        segments[-1].append(turn)
    sampled = [sum(len(turn.token_ids) for turn in turns) for turns in segments]
    total = sum(sampled)
    return [
        _row(trajectory.id, segment, turns, reward, weight * (sampled[segment] / total))
        for segment, turns in enumerate(segments)
        if sampled[segment]
    ]


def _row(id: TrajectoryId, segment: int, turns: Sequence[Turn], reward: float, weight: float) -> Row:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        given, sampled = len(turn.context_ids), len(turn.token_ids)
        token_ids += turn.context_ids + turn.token_ids
        loss_mask += [False] * given + [True] * sampled
        logprobs += [0.0] * given + [*turn.logprobs]
        versions += [-1] * given + [turn.version] * sampled
    return Row(id, segment, tuple(token_ids), tuple(loss_mask), tuple(logprobs), tuple(versions), reward, weight)


def _weights(ids: Sequence[TrajectoryId], mode: Mode, d: int, seed: int, step: int) -> dict[TrajectoryId, float]:
    """The weight of each of ``ids``, which are in order, so that an invocation's index is its rank; 0 if dropped."""
    groups: dict[tuple[int, str], dict[int, list[TrajectoryId]]] = {}
    for id in ids:
        groups.setdefault((id.group, id.agent), {}).setdefault(id.rollout, []).append(id)
    weights = dict.fromkeys(ids, 0.0)
    for (group, agent), rollouts in groups.items():
        counts = {rollout: len(members) for rollout, members in rollouts.items()}
        for (rollout, i), weight in multiplicities(counts, d, mode, (seed, step, group, agent)).items():
            weights[rollouts[rollout][i]] = weight
    return weights


def _is_known(sample: Sample) -> bool:
    return sample.reward.value is not None and any(turn.token_ids for turn in sample.trajectory.turns)


def _check_identity(samples: Sequence[Sample]) -> None:
    agents = sorted({s.trajectory.id.agent for s in samples})
    if len(agents) > 1:
        raise ValueError(f"samples of several agents {agents}; align one agent at a time")
    repeated = [str(id) for id, n in Counter(s.trajectory.id for s in samples).items() if n > 1]
    if repeated:
        raise ValueError(f"two samples share an id: {', '.join(repeated[:3])}; take each trajectory once")
