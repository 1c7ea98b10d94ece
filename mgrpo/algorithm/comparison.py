"""Who is compared with whom: aligned rows -> members of comparison groups, formed by key, never by position.

    query        all trajectories of one query; agents are pooled, which matters only where they share weights
    agent        the trajectories of one agent on one query (M-GRPO)
    agent_turn   the same turn of the same agent on one query (AT-GRPO): every turn has an advantage of its own
    batch        all trajectories of one agent in the optimiser step (Dr. MAS)
    parent       none of its own: the root of its rollout is compared with the K roots of the query (MATPO)

A trajectory is one member, however many rows it has; for "agent_turn" each of its turns with sampled tokens is one.
Arrays hold one number per member (M), per row (N) or per trajectory. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mgrpo.algorithm.moments import Floats, Integers
from mgrpo.algorithm.shaping import is_masked
from mgrpo.types import Reward, Row, Sample, Share

CompareWith = Literal["query", "agent", "agent_turn", "batch", "parent"]
Roots = Mapping[tuple[int, int], float | None]  # the reward of every rollout's root by (group, rollout)


@dataclass(frozen=True, slots=True)
class Members:
    """M members: reward, weight, number of the comparison group, number of what "batch" looks at: the agent, or all
    that are pooled."""

    rewards: Floats
    weights: Floats
    group: Integers
    batch: Integers


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Of N rows: the number of each one's trajectory; reward, weight and first row of each trajectory."""

    of_row: Integers
    rewards: Floats
    weights: Floats
    first: Integers


def trajectories(rows: Sequence[Row]) -> Trajectories:
    """Rows of one trajectory put together: they share its weight.

    Raises ValueError for a reward that is not finite, a weight that is not positive, or rows of one trajectory that
    disagree on its reward.
    """
    rewards = np.array([row.reward for row in rows], np.float64)
    weights = np.array([row.weight for row in rows], np.float64)
    bad = ~(np.isfinite(rewards) & np.isfinite(weights) & (weights > 0.0))
    if bad.any():
        row = rows[int(bad.argmax())]
        raise ValueError(f"{row.id}: reward {row.reward}, weight {row.weight}; leave out what has no finite reward")
    of_row = numbered([row.id for row in rows])
    first = np.unique(of_row, return_index=True)[1].astype(np.int64)
    differs = rewards != rewards[first][of_row]
    if differs.any():
        i = int(differs.argmax())
        other = float(rewards[first][of_row[i]])
        raise ValueError(f"{rows[i].id}: rows with rewards {other} and {rows[i].reward}; a trajectory has one")
    return Trajectories(of_row, rewards[first], np.bincount(of_row, weights).astype(np.float64), first)


def members(rows: Sequence[Row], own: Trajectories, compare_with: CompareWith) -> tuple[Members, Integers]:
    """What is compared under every option but "parent"; and the number of each row's member, or for "agent_turn" of
    each of its turns that has sampled tokens, row by row."""
    if compare_with == "agent_turn":
        of_row = own.of_row.tolist()
        turns = [(of_row[i], row.first_turn + t) for i, row in enumerate(rows) for t in trained_turns(row)]
        place = numbered(turns)
        distinct = list(dict.fromkeys(turns))
        trajectory = np.array([t for t, _ in distinct], np.int64)
    else:
        place, distinct = own.of_row, []
        trajectory = np.arange(len(own.first))
    ids = [rows[i].id for i in own.first[trajectory].tolist()]
    names = [id.agent for id in ids]
    keys: list[Any] = names
    if compare_with == "query":
        keys, names = [id.group for id in ids], [""] * len(ids)
    elif compare_with == "agent":
        keys = [(id.group, id.agent) for id in ids]
    elif compare_with == "agent_turn":
        keys = [(id.group, id.agent, turn) for id, (_, turn) in zip(ids, distinct, strict=True)]
    return Members(own.rewards[trajectory], own.weights[trajectory], numbered(keys), numbered(names)), place


def trained_turns(row: Row) -> list[int]:
    """Indices of the row's turns that have sampled tokens."""
    return [t for t, turn in enumerate(row.turns) if turn.token_ids]


def roots_of(shares: Sequence[Share]) -> Roots:
    return {(share.group, rollout): reward for share in shares for rollout, reward in share.roots.items()}


def inherited(share: Share) -> list[Sample]:
    """The samples with their roots' rewards in place of their own, for "parent". What failed or is masked inherits
    nothing; whether it was graded does not matter."""
    roots = share.roots
    return [
        s
        if s.trajectory.failure or is_masked(s.reward)
        else Sample(s.trajectory, Reward(roots[s.trajectory.id.rollout]))
        for s in share.samples
    ]


def root_members(rows: Sequence[Row], roots: Roots) -> tuple[Members, Integers]:
    """The roots with a known reward, each of weight 1, in the group of its query; and for each row its root's number.

    Raises ValueError for a row whose root has none.
    """
    known = {key: reward for key, reward in roots.items() if reward is not None}
    number = {key: i for i, key in enumerate(known)}
    if orphans := [row.id for row in rows if (row.id.group, row.id.rollout) not in number]:
        raise ValueError(f"{orphans[0]}: its root's reward is unknown; leave out what has none to inherit from")
    group = numbered([group for group, _ in known])
    rewards = np.array(list(known.values()), np.float64)
    own = np.array([number[row.id.group, row.id.rollout] for row in rows], np.int64)
    return Members(rewards, np.ones(len(known)), group, np.zeros(len(known), np.int64)), own


def numbered(keys: Sequence[Any]) -> Integers:
    """Equal keys get equal numbers, counted from 0 in order of appearance."""
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], np.int64)
