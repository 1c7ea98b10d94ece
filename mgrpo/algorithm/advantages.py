"""Aligned rows -> advantages (equations 10 and 13 of M-GRPO, arXiv 2511.13288), by a few options.

    A_i = (R_i - mu) / sigma,     mu = sum(w R) / sum(w),     sigma^2 = sum(w (R - mu)^2) / sum(w)     (population)

over one comparison group (comparison.py), with the alignment weights w. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mgrpo.algorithm.coefficients import row_weights
from mgrpo.algorithm.comparison import (
    CompareWith,
    Members,
    Roots,
    members,
    numbered,
    root_members,
    trajectories,
)
from mgrpo.algorithm.moments import Floats, Integers, low_of, moments, or_one, span_of
from mgrpo.types import Row

ScaleRewards = Literal["group", "batch", "none"]
Values = list[tuple[float, ...]]  # one advantage per turn of each row


@dataclass(frozen=True, slots=True)
class Comparison:
    """How rewards become advantages.

    ``compare_with``: see comparison.py. ``scale_rewards``: divide by the group's sigma, by that of all rewards of the
    agent in the step ("batch"), or by nothing (Dr. GRPO). ``std_unbiased``: sigma^2 = sum(w (R - mu)^2) / (V1 - V2/V1)
    with V1 = sum(w), V2 = sum(w^2), which is n - 1 where every w is 1. ``leave_one_out``: mu is that of the other
    members (RLOO). ``whiten_advantages``: at the end, mean 0 and sample std 1 over all sampled tokens of the agent in
    the step; with "none" this is the REINFORCE++ baseline.
    """

    compare_with: CompareWith = "agent"
    scale_rewards: ScaleRewards = "group"
    std_unbiased: bool = False
    leave_one_out: bool = False
    whiten_advantages: bool = False


@dataclass(frozen=True, slots=True)
class AdvantageStats:
    """Counts of comparison groups; weighted means and population stds over rows (None without rows)."""

    groups: int = 0
    zero_variance_groups: int = 0  # two or more members, all of one reward
    singleton_groups: int = 0  # one member: nothing to compare with
    reward_mean: float | None = None
    reward_std: float | None = None
    advantage_mean: float | None = None
    advantage_std: float | None = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """``values[i][t]`` belongs to every sampled token of turn t of row i; equal in all turns but for "agent_turn"."""

    values: tuple[tuple[float, ...], ...] = ()
    stats: AdvantageStats = AdvantageStats()


def advantages(rows: Sequence[Row], comparison: Comparison = Comparison(), roots: Roots | None = None) -> Advantages:
    """Compare the aligned ``rows`` of one optimiser step, of one agent or of several that share weights.

    Members of a group without spread (decided by max == min, never by a computed sigma) get 0 and are counted, and so
    does a group of one; nothing is divided by an epsilon. "parent" needs ``roots``: the reward of every rollout's
    root by (group, rollout), None where unknown. Raises ValueError as `trajectories` and `root_members` do.
    """
    if not rows:
        return Advantages()
    own = trajectories(rows)
    if comparison.compare_with == "parent":
        compared, place = root_members(rows, roots or {})
    else:
        compared, place = members(rows, own, comparison.compare_with)
    span = span_of(compared.rewards, compared.group)
    found = _compare(compared, span, comparison)
    if comparison.compare_with == "agent_turn":
        values = _by_turn(rows, found[place])
    else:
        values = [(value,) * len(row.turns) for row, value in zip(rows, found[place].tolist(), strict=True)]
    if comparison.whiten_advantages:
        values = _whitened(rows, values, own.weights[own.of_row])
    return Advantages(tuple(values), _stats(rows, values, compared.group, span))


def compare(
    rows: Mapping[str, Sequence[Row]], how: Mapping[str, Comparison], roots: Roots | None = None
) -> dict[str, Advantages]:
    """`advantages` of every agent that uses one set of weights, each by its own ``how``; those that compare by "query"
    in the same way are compared together."""
    pools: dict[Comparison | str, list[str]] = {}
    for agent in rows:
        pools.setdefault(how[agent] if how[agent].compare_with == "query" else agent, []).append(agent)
    found: dict[str, Advantages] = {}
    for agents in pools.values():
        whole = advantages([row for agent in agents for row in rows[agent]], how[agents[0]], roots)
        values = iter(whole.values)
        for agent in agents:
            own = [next(values) for _ in rows[agent]]
            found[agent] = Advantages(tuple(own), replace(whole.stats, **_moments_of(rows[agent], own)))
    return found


def _compare(compared: Members, span: Floats, comparison: Comparison) -> Floats:
    """One advantage per member. Rewards are first mapped to [0, 1]: exact near ties, and no underflow."""
    group, weights = compared.group, compared.weights
    position = (compared.rewards - low_of(compared.rewards, compared.group)[group]) / np.where(span > 0.0, span, 1.0)[
        group
    ]
    mean, std = moments(position, weights, group, comparison.std_unbiased)
    off = position - mean[group]
    if comparison.leave_one_out:
        total = np.bincount(group, weights)[group]
        off = off * total / np.where(total > weights, total - weights, 1.0)
    if comparison.scale_rewards == "group":
        off = off / or_one(std)[group]
    elif comparison.scale_rewards == "none":
        off = off * span[group]
    else:
        off = off * _in_batch(compared, span, comparison.std_unbiased)
    return np.where(span[group] > 0.0, off, 0.0)


def _in_batch(compared: Members, span: Floats, unbiased: bool) -> Floats:
    """The span of each member's group over sigma of all rewards of its batch."""
    rewards, batch = compared.rewards, compared.batch
    wide = or_one(span_of(rewards, batch))
    position = (rewards - low_of(rewards, batch)[batch]) / wide[batch]
    sigma = moments(position, compared.weights, batch, unbiased)[1]
    return span[compared.group] / wide[batch] / or_one(sigma)[batch]


def _by_turn(rows: Sequence[Row], found: Floats) -> Values:
    """``found`` follows the rows and their turns with sampled tokens; a turn without any gets 0."""
    following = iter(found.tolist())
    return [tuple(next(following) if turn.token_ids else 0.0 for turn in row.turns) for row in rows]


def _whitened(rows: Sequence[Row], values: Values, weights: Floats) -> Values:
    """Every agent's advantages shifted and scaled to mean 0 and sample std 1 over its sampled tokens, each of which
    counts the weight of its trajectory (``weights``, one per row). What has no spread but rounding becomes 0."""
    lengths = np.array([len(row.turns) for row in rows])
    tokens = np.array([len(turn.token_ids) for row in rows for turn in row.turns], np.float64)
    mass = np.repeat(np.array(row_weights(rows)), lengths) * tokens
    agent = np.repeat(numbered([row.id.agent for row in rows]), lengths)
    flat = np.array([value for own in values for value in own], np.float64)
    peak = np.zeros(int(agent.max()) + 1)
    np.maximum.at(peak, agent, np.abs(flat))
    flat = flat / or_one(peak)[agent]
    total = np.bincount(agent, mass)
    off = flat - (np.bincount(agent, mass * flat) / total)[agent]
    freedom = total - np.bincount(agent, mass * np.repeat(weights, lengths)) / total
    deviation = np.sqrt(np.bincount(agent, mass * off**2) / or_one(freedom))
    trained = tokens > 0.0
    spread = span_of(flat[trained], agent[trained]) > 1e-9
    white = iter(np.where(spread[agent], off / or_one(deviation)[agent], 0.0).tolist())
    return [tuple(next(white) for _ in row.turns) for row in rows]


def _stats(rows: Sequence[Row], values: Values, group: Integers, span: Floats) -> AdvantageStats:
    sizes = np.bincount(group)
    tied, single = int(np.sum((sizes > 1) & (span == 0.0))), int(np.sum(sizes == 1))
    return AdvantageStats(len(span), tied, single, **_moments_of(rows, values))


def _moments_of(rows: Sequence[Row], values: Values) -> dict[str, Any]:
    """Mean and std of rewards and advantages, as `AdvantageStats` names them."""
    if not rows:
        return {}
    weights, one = np.array([row.weight for row in rows]), np.zeros(len(rows), np.int64)
    reward = moments(np.array([row.reward for row in rows]), weights, one)
    advantage = moments(np.array([sum(own) / len(own) for own in values]), weights, one)
    names = ("reward_mean", "reward_std", "advantage_mean", "advantage_std")
    return {name: float(found[0]) for name, found in zip(names, (*reward, *advantage), strict=True)}
