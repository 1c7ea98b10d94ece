"""Small hand-made rollouts for tests of reports."""

from __future__ import annotations

from typing import Any

from mgrpo.algorithm.rewards import rewards
from mgrpo.config import Config, resolve
from mgrpo.types import (
    Failure,
    Findings,
    Grade,
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

WEIGHTS = {
    "planner": {"format": 0.1, "correct": 0.9},
    "searcher": {"format": 0.1, "correct_main": 0.4, "expert": 0.5},
}


def turn(reply: Reply, *results: ToolResult, text: str = "", tokens: int = 3, **options: Any) -> Turn:
    return Turn((1, 2), (7,) * tokens, (-0.5,) * tokens, 4, "stop", text, reply, results, **options)


def answers(text: str, **options: Any) -> Turn:
    return turn(Reply(answer=Findings(text, "p12 says so", ("p12",))), **options)


def calls(*subtasks: str, tool: str = "searcher", results: tuple[ToolResult, ...] | None = None) -> Turn:
    made = tuple(ToolCall(tool, {"task": subtask}) for subtask in subtasks)
    return turn(Reply(calls=made), *(results or (ToolResult("Merova"),) * len(made)))


def rollout(
    index: int, n_calls: int, answer: str | None = "Merova", group: int = 0, error: str | None = None
) -> Rollout:
    """A planner that makes ``n_calls`` calls in its first turn, each answered by a searcher in two turns."""
    root = TrajectoryId(group, index, "planner", 0)
    subtasks = [f"capital of country {i}" for i in range(n_calls)]
    turns = [calls(*subtasks)] if subtasks else []
    turns += [turn(Reply(error=error), text="<call> nobody")] if error else []
    turns += [answers(answer)] if answer is not None else []
    found = None if answer is None else Findings(answer)
    planner = Trajectory(root, "What is the capital ?", tuple(turns), "answer" if found else "max_turns", found)
    searchers = [
        Trajectory(
            TrajectoryId(group, index, "searcher", i),
            subtask,
            (calls(f"query {i}", tool="search", results=(ToolResult(f"page {i}"),)), answers("Merova")),
            "answer",
            Findings("Merova"),
            Parent(root, 0, i),
        )
        for i, subtask in enumerate(subtasks)
    ]
    return Rollout(group, index, (planner, *searchers))


def failed(index: int, kind: str = "EngineTimeout", group: int = 0) -> Rollout:
    failure = Failure(kind, "no answer after 2 s")
    root = Trajectory(TrajectoryId(group, index, "planner", 0), "q", (), "failure", failure=failure)
    return Rollout(group, index, (root,), failure)


def group_of(*rollouts: Rollout, id: int = 0) -> Group:
    return Group(id, Task("t0", "What is the capital ?", "Merova"), rollouts)


def rewarded(group: Group, expert: float | None = 1.0) -> dict[TrajectoryId, Reward]:
    """By equations 4 and 5: the gold answer is right; ``expert`` grades every sub-agent trajectory."""
    result: dict[TrajectoryId, Reward] = {}
    for member in group.rollouts:
        grades = {t.id: Grade(expert, "nobody asked") for t in member.trajectories}
        found = member.root.answer
        right = found is not None and found.answer == group.task.answer
        grades[member.root.id] = Grade(float(right))
        result |= rewards(member, grades, WEIGHTS)
    return result


def config_of(**changes: Any) -> Config:
    """A tiny planner with one searcher: two steps of demonstrations, then reinforcement learning."""
    tiny = {"type": "tiny"}
    table: dict[str, Any] = {
        "name": "sample",
        "agents": {
            "planner": {"role": "planner", "model": tiny, "format": "compact", "tools": ["searcher"]},
            "searcher": {"role": "subagent", "model": tiny, "format": "compact", "tools": ["search", "visit"]},
        },
        "tools": {"search": {"type": "search"}, "visit": {"type": "visit"}},
        "tasks": {"type": "world"},
        "evaluation": {"tasks": {"split": "test"}},
        "stages": [
            {"name": "warmup", "steps": 2, "groups_per_step": 4, "collect": "teacher"},
            {"name": "rl", "steps": 60, "groups_per_step": 16},
        ],
    }
    return resolve(table | changes)


def _agent(role: str = "subagent", **options: Any) -> dict[str, Any]:
    return {"role": role, "model": {"type": "tiny"}, "format": "compact", **options}


def team(searcher: dict[str, Any] | None = None, **changes: Any) -> Config:
    """`config_of` with other settings of the searcher."""
    planner = _agent("planner", tools=["searcher"])
    return config_of(
        agents={"planner": planner, "searcher": _agent(tools=["search", "visit"]) | (searcher or {})}, **changes
    )


def meaning(lines: list[tuple[str, str]], term: str) -> str:
    """What stands beside ``term``, with what follows it under no term of its own."""
    terms = [name for name, _ in lines]
    start = terms.index(term)
    end = next((i for i in range(start + 1, len(lines)) if terms[i]), len(lines))
    return " ".join(text for _, text in lines[start:end])
