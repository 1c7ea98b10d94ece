"""Groups <-> table rows: pure functions. What does not fit together is refused here, by name, before any write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mgrpo.store.base import GroupSummary, Publication, TrajectorySummary, WeightVersion
from mgrpo.store.records import GroupHead, Member, decode_head, decode_metrics, decode_sample, encode
from mgrpo.types import Group, Reward, Rollout, Sample, Trajectory, TrajectoryId

Columns = dict[str, Any]


def check(groups: Sequence[Group], rewards: Mapping[TrajectoryId, Reward]) -> None:
    """Raises ValueError unless every id is unique and in its place and every trajectory has exactly one reward."""
    ids: set[TrajectoryId] = set()
    for group in groups:
        _check_unique(f"rollout indices of group {group.id}", [rollout.index for rollout in group.rollouts])
        for rollout in group.rollouts:
            ids.update(_checked_ids(group, rollout))
    _check_unique("group ids of one commit", [group.id for group in groups])
    if missing := ids - rewards.keys():
        raise ValueError(f"no reward for {min(missing)} ({len(missing)} in all); unknown is Reward(None, cause=...)")
    if strangers := rewards.keys() - ids:
        raise ValueError(f"a reward for {min(strangers)}, which is in none of the groups ({len(strangers)} in all)")
    for id, reward in rewards.items():
        if reward.value is not None and not math.isfinite(reward.value):
            raise ValueError(f"the reward of {id} is {reward.value}; an unknown reward is Reward(None, cause=...)")


def _checked_ids(group: Group, rollout: Rollout) -> list[TrajectoryId]:
    if rollout.group != group.id:
        raise ValueError(f"group {group.id} holds rollout {rollout.index} of group {rollout.group}")
    ids = [trajectory.id for trajectory in rollout.trajectories]
    _check_unique(f"trajectory ids of g{group.id}/r{rollout.index}", ids)
    for trajectory in rollout.trajectories:
        if (trajectory.id.group, trajectory.id.rollout) != (group.id, rollout.index):
            raise ValueError(f"g{group.id}/r{rollout.index} holds {trajectory.id}")
        if trajectory.parent is not None and trajectory.parent.id not in ids:
            raise ValueError(f"the parent {trajectory.parent.id} of {trajectory.id} is not in its rollout")
    return ids


def _check_unique(what: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{what} repeat: {', '.join(map(str, values))}")


def group_row(group: Group, created: float) -> Columns:
    members = tuple(Member(rollout.index, len(rollout.trajectories), rollout.failure) for rollout in group.rollouts)
    return {
        "id": group.id,
        "rollouts": len(members),
        "failed_rollouts": sum(member.failure is not None for member in members),
        "trajectories": sum(member.trajectories for member in members),
        "sampled_tokens": sum(_sampled_tokens(t) for rollout in group.rollouts for t in rollout.trajectories),
        "created": created,
        "record": encode(GroupHead(group.task, members)),
    }


def trajectory_rows(group: Group, rewards: Mapping[TrajectoryId, Reward]) -> list[Columns]:
    return [
        _trajectory_row(position, trajectory, rewards[trajectory.id])
        for rollout in group.rollouts
        for position, trajectory in enumerate(rollout.trajectories)
    ]


def _trajectory_row(position: int, trajectory: Trajectory, reward: Reward) -> Columns:
    id, parent, failure = trajectory.id, trajectory.parent, trajectory.failure
    versions = [turn.version for turn in trajectory.turns if turn.token_ids]
    return {
        "group_id": id.group,
        "rollout": id.rollout,
        "agent": id.agent,
        "invocation": id.invocation,
        "position": position,
        "parent_agent": None if parent is None else parent.id.agent,
        "parent_invocation": None if parent is None else parent.id.invocation,
        "ending": trajectory.ending,
        "failure": None if failure is None else failure.kind,
        "reward": reward.value,
        "sampled_tokens": _sampled_tokens(trajectory),
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
        "record": encode(Sample(trajectory, reward)),
    }


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.token_ids) for turn in trajectory.turns)


def group_of(id: int, head: bytes, records: Iterable[bytes]) -> tuple[Group, dict[TrajectoryId, Reward]]:
    """Inverse of `group_row` and `trajectory_rows`; ``records`` in any order of rollouts, by position within each."""
    decoded = decode_head(head)
    nodes: dict[int, list[Trajectory]] = {member.index: [] for member in decoded.members}
    rewards: dict[TrajectoryId, Reward] = {}
    for record in records:
        sample = decode_sample(record)
        nodes[sample.trajectory.id.rollout].append(sample.trajectory)
        rewards[sample.trajectory.id] = sample.reward
    rollouts = tuple(Rollout(id, m.index, tuple(nodes[m.index]), m.failure) for m in decoded.members)
    return Group(id, decoded.task, rollouts), rewards


def summaries(group_rows: Iterable[Any], trajectory_rows: Iterable[Any]) -> list[GroupSummary]:
    """Rows of both tables, the second without records and ordered by group, rollout and position."""
    nodes = {id: tuple(map(_summary, rows)) for id, rows in groupby(trajectory_rows, lambda row: row.group_id)}
    return [
        GroupSummary(row.id, decode_head(row.record).task, row.rollouts, row.failed_rollouts, nodes.get(row.id, ()))
        for row in group_rows
    ]


def _summary(row: Any) -> TrajectorySummary:
    parent = None
    if row.parent_agent is not None:
        parent = TrajectoryId(row.group_id, row.rollout, row.parent_agent, row.parent_invocation)
    return TrajectorySummary(
        id=TrajectoryId(row.group_id, row.rollout, row.agent, row.invocation),
        parent=parent,
        ending=row.ending,
        reward=row.reward,
        sampled_tokens=row.sampled_tokens,
        min_version=row.min_version,
        max_version=row.max_version,
        failure=row.failure,
    )


def publication_row(publication: Publication, number: int) -> Columns:
    weights = publication.weights
    return {
        "agent": weights.agent,
        "number": number,
        "version": weights.version,
        "handle": weights.handle,
        "checksum": weights.checksum,
        "step": weights.step,
        "stage": weights.stage,
        "first_group": publication.consumed.start,
        "end_group": publication.consumed.stop,
        "created": publication.created,
        "record": encode(dict(publication.metrics)),
    }


def publication_of(row: Any) -> Publication:
    """Inverse of `publication_row`."""
    weights = WeightVersion(row.agent, row.version, row.handle, row.checksum, row.step, row.stage)
    return Publication(weights, range(row.first_group, row.end_group), decode_metrics(row.record), row.created)
