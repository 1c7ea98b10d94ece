"""Made-up groups as large as real ones, for benchmarks that need no model.

A group has K = 8 rollouts of a planner and two calls of its searcher. Token ids follow Zipf's law over 50,000 words;
log-probabilities are 32-bit numbers in 64 bits, as engines give them; texts are the words of the ids.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mgrpo.types import (
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

K, CALLS = 8, 2
PER_GROUP = K * (1 + CALLS)  # trajectories
VOCABULARY = 50_000
Rewards = Mapping[TrajectoryId, Reward]


class Writer:
    """Makes groups up: ``turns`` turns of ``context`` + ``sampled`` tokens in every trajectory."""

    def __init__(self, turns: int, context: int, sampled: int) -> None:
        self._turns, self._context, self._sampled = turns, context, sampled
        self._draw = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._draw.choices(letters, k=2 + i % 7)) for i in range(VOCABULARY)]

    def group(self, id: int) -> tuple[Group, Rewards]:
        rollouts = [self._rollout(id, index) for index in range(K)]
        group = Group(id, Task(f"task-{id}", self._say(self._ids(12)), "42", 1), tuple(rollouts))
        ids = [t.id for rollout in rollouts for t in rollout.trajectories]
        return group, {id: Reward(self._draw.random(), {"format": 1.0, "correct": 0.0, "expert": 0.5}) for id in ids}

    def _rollout(self, group: int, index: int) -> Rollout:
        root = TrajectoryId(group, index, "planner", 0)
        nodes = [self._trajectory(root, None)]
        for call in range(CALLS):
            nodes.append(self._trajectory(TrajectoryId(group, index, "searcher", call), Parent(root, 0, call)))
        return Rollout(group, index, tuple(nodes))

    def _trajectory(self, id: TrajectoryId, parent: Parent | None) -> Trajectory:
        turns = tuple(self._turn(self._context, self._sampled) for _ in range(self._turns))
        return Trajectory(id, self._say(self._ids(12)), turns, "answer", Findings(self._say(self._ids(2))), parent)

    def _turn(self, context: int, sampled: int) -> Turn:
        read, ids = self._ids(context), self._ids(sampled)
        return Turn(
            context_ids=read,
            token_ids=ids,
            logprobs=tuple(_float32(-self._draw.expovariate(2.0)) for _ in ids),
            version=3,
            stop_reason="stop",
            text=self._say(ids),
            reply=Reply(calls=(ToolCall("search", {"query": self._say(ids[:8])}),)),
            results=(ToolResult(self._say(read)),),
            started=self._draw.random(),
            seconds=self._draw.random(),
        )

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(int(VOCABULARY ** self._draw.random()) - 1 for _ in range(count))

    def _say(self, ids: Sequence[int]) -> str:
        return " ".join([self._words[id] for id in ids])


def _float32(value: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def numbered(made: tuple[Group, Rewards], id: int) -> tuple[Group, Rewards]:
    """The same group under another id."""
    group, rewards = made

    def own(old: TrajectoryId) -> TrajectoryId:
        return replace(old, group=id)

    def moved(t: Trajectory) -> Trajectory:
        return replace(t, id=own(t.id), parent=t.parent and replace(t.parent, id=own(t.parent.id)))

    rollouts = [replace(r, group=id, trajectories=tuple(map(moved, r.trajectories))) for r in group.rollouts]
    return replace(group, id=id, rollouts=tuple(rollouts)), {own(old): reward for old, reward in rewards.items()}
