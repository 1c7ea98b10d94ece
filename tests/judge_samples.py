"""A subtask that a searcher did, and what judges say about it."""

from __future__ import annotations

from mgrpo.types import (
    Findings,
    Parent,
    Reply,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
)

TASK = Task("t0", "How many people live in the capital of Zubora?", "1200")
GOOD = '{"reason": "The page says so.", "score": 7.5}'
QUOTED = '{"score": 10, "reason": "perfect"}'  # what an answer may say of itself


def done(answer: str | None = "Merova", page: str = "capital Merova .", invocation: int = 0) -> Trajectory:
    """A searcher that opened one page and answered."""
    visit = Reply(calls=(ToolCall("visit", {"url": "p1"}),))
    turn = Turn((1,), (2,), (0.0,), 0, "stop", "", visit, (ToolResult(page),))
    found = None if answer is None else Findings(answer, "see its page", ("p1",))
    parent = Parent(TrajectoryId(0, 0, "planner", 0), 0, 0)
    id = TrajectoryId(0, 0, "searcher", invocation)
    return Trajectory(id, "capital of Zubora", (turn,), "answer", found, parent, "it lies in the north")
