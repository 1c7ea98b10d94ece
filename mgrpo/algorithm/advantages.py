"""Who is compared with whom: aligned rows -> one advantage per row (equations 10 and 13 of M-GRPO, arXiv 2511.13288).

A trajectory is compared with the trajectories of the same agent on the same query (all invocations of all K
rollouts), keyed by id:

    A_i = (R_i - mu) / sigma,     mu = sum(w R) / sum(w),     sigma^2 = sum(w (R - mu)^2) / sum(w)     (population)

with the alignment weights w. Agents are never pooled, since their rewards differ in scale. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mgrpo.types import Row, TrajectoryId

ScaleRewards = Literal["group", "none"]


@dataclass(frozen=True, slots=True)
class AdvantageStats:
    """Counts of comparison groups, and the weighted reward mean and population std (None without rows)."""

    groups: int
    zero_variance_groups: int  # two or more trajectories, all of one reward
    singleton_groups: int  # one trajectory: nothing to compare with
    reward_mean: float | None
    reward_std: float | None


@dataclass(frozen=True, slots=True)
class Advantages:
    """``values[i]`` belongs to row i and to every sampled token of it."""

    values: tuple[float, ...]
    stats: AdvantageStats


@dataclass(frozen=True, slots=True)
class _Member:
    """One trajectory in its comparison group; ``weight`` is that of all its rows together."""

    reward: float
    weight: float


def advantages(rows: Sequence[Row], scale_rewards: ScaleRewards = "group") -> Advantages:
    """Compare ``rows`` by (group, agent); rows of one trajectory are one member and get one value.

    ``scale_rewards`` "group" divides by the group's sigma, "none" only subtracts its mean. Groups of one trajectory
    or of equal rewards (decided by max == min, never by a computed sigma) get 0 and are counted.
    Raises ValueError for a reward that is not finite, a weight that is not positive, or rows of one trajectory that
    disagree on its reward.
    """
    members = _members(rows)
    groups: dict[tuple[int, str], list[TrajectoryId]] = {}
    for id in members:
        groups.setdefault((id.group, id.agent), []).append(id)
    values: dict[TrajectoryId, float] = {}
    for ids in groups.values():
        values.update(zip(ids, _compare([members[id] for id in ids], scale_rewards), strict=True))
    stats = _stats(members, [[members[id] for id in ids] for ids in groups.values()])
    return Advantages(tuple(values[row.id] for row in rows), stats)


def _members(rows: Sequence[Row]) -> dict[TrajectoryId, _Member]:
    rewards: dict[TrajectoryId, float] = {}
    weights: dict[TrajectoryId, float] = {}
    for row in rows:
        if not (math.isfinite(row.reward) and 0.0 < row.weight < math.inf):
            raise ValueError(f"{row.id}: reward {row.reward}, weight {row.weight}; leave out what has no finite reward")
        if rewards.setdefault(row.id, row.reward) != row.reward:
            raise ValueError(f"{row.id}: rows with rewards {rewards[row.id]} and {row.reward}; a trajectory has one")
        weights[row.id] = weights.get(row.id, 0.0) + row.weight
    return {id: _Member(reward, weights[id]) for id, reward in rewards.items()}


def _compare(group: Sequence[_Member], scale_rewards: ScaleRewards) -> list[float]:
    """Advantages of one comparison group. Rewards are first mapped to [0, 1]: exact near ties, and no underflow."""
    low, span = _range(group)
    if span == 0.0:
        return [0.0] * len(group)
    positions = [(member.reward - low) / span for member in group]
    mean, std = _moments(positions, [member.weight for member in group])
    scale = span if scale_rewards == "none" else 1.0 / std
    return [(position - mean) * scale for position in positions]


def _range(group: Sequence[_Member]) -> tuple[float, float]:
    low = min(member.reward for member in group)
    return low, max(member.reward for member in group) - low


def _moments(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted mean and population standard deviation; summed exactly, so independent of order."""
    total = math.fsum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    variance = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / total
    return mean, math.sqrt(variance)


def _stats(members: Mapping[TrajectoryId, _Member], groups: Sequence[Sequence[_Member]]) -> AdvantageStats:
    mean, std = None, None
    if members:
        mean, std = _moments([m.reward for m in members.values()], [m.weight for m in members.values()])
    return AdvantageStats(
        groups=len(groups),
        zero_variance_groups=sum(len(group) > 1 and _range(group)[1] == 0.0 for group in groups),
        singleton_groups=sum(len(group) == 1 for group in groups),
        reward_mean=mean,
        reward_std=std,
    )
