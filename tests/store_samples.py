"""Small groups with their rewards, weights and leases, for tests of the store."""

from __future__ import annotations

from sqlalchemy import Connection

from mgrpo.store.base import Lease, Store, WeightVersion
from mgrpo.types import (
    Failure,
    Findings,
    Group,
    Parent,
    Reply,
    Reward,
    Rollout,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
)


def turn(version: int = 0, tokens: int = 3) -> Turn:
    calls = (ToolCall("searcher", {"task": "capital of Zubora", "n": [1, None, 0.1]}),)
    return Turn(
        context_ids=(1, 7, 8),
        token_ids=tuple(range(20, 20 + tokens)),
        logprobs=tuple(-0.1 * (i + 1) for i in range(tokens)),
        version=version,
        stop_reason="stop",
        text="<call>",
        reply=Reply(calls=calls),
        results=(ToolResult("Merova"),),
    )


def trajectory(id: TrajectoryId, *turns: Turn) -> Trajectory:
    root = TrajectoryId(id.group, id.rollout, "planner", 0)
    parent = None if id == root else Parent(root, 0, id.invocation)
    return Trajectory(id, "capital?", turns or (turn(),), "answer", Findings("Merova"), parent)


def rollout(group: int, index: int, searches: int, failure: Failure | None = None) -> Rollout:
    ids = [TrajectoryId(group, index, "planner", 0)]
    ids += [TrajectoryId(group, index, "searcher", i) for i in range(searches)]
    return Rollout(group, index, tuple(map(trajectory, ids)), failure)


def group(id: int, searches: tuple[int, ...] = (1, 2)) -> Group:
    task = Task(f"train/{id}", "capital of Zubora?", "Merova", 1, {"hops": 1})
    return Group(id, task, tuple(rollout(id, k, d) for k, d in enumerate(searches)))


def rewards_of(*groups: Group, value: float | None = 0.1) -> dict[TrajectoryId, Reward]:
    reward = Reward(value, {"format": 1.0, "expert": None}, None if value is not None else "judge timed out")
    return {t.id: reward for g in groups for r in g.rollouts for t in r.trajectories}


def commit(store: Store, *ids: int) -> None:
    groups = [group(id) for id in ids]
    store.commit(groups, rewards_of(*groups))


def weights(version: int, agent: str = "planner", step: int | None = None) -> WeightVersion:
    number = version if step is None else step
    return WeightVersion(agent, version, f"weights/{agent}/{version}", f"sha256:{version}", number, "rl")


class Clock:
    """In the place of `ledger.clock`: seconds since the epoch, as they are set."""

    now = 1e9

    def __call__(self, connection: Connection) -> float:
        return self.now


def granted(store: Store, name: str = "learn/planner", owner: str = "a", seconds: float = 10.0) -> Lease:
    lease = store.lease(name, owner, seconds)
    assert lease is not None and (lease.name, lease.owner) == (name, owner)
    return lease
