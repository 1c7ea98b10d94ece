"""The run that chaos.py disturbs: its recipe, and the parts of it that stand for models, tools and rewards.

::

    engine    turns are a pure function of the trajectory's id
    rewards   say which process collected a rollout
    notes     a part appends to RUN/notes/NAME.jsonl what it achieves, with its process id: that is how chaos.py knows
              when a killed part is at work again

Everything in such a run is a pure function of ids, so that what has to be there can be said without having seen it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.config import Config, resolve
from mgrpo.engines.base import Completion, Request
from mgrpo.engines.scripted import Scripted
from mgrpo.tools.base import CallContext
from mgrpo.types import Findings, Reply, Reward, Rollout, ToolCall, ToolResult, TrajectoryId

K = 3  # rollouts of a group
PROMPTS = 20
GROUPS_PER_STEP = 2
NOTES = "notes"
TURN_S = 0.002  # of a scripted batch

_AGENT = {
    "model": {"type": "tiny", "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1},
    "engine": {"type": "chaos_recipe:scripted"},
    "format": "compact",
    "max_turns": 3,
    "max_tokens_per_turn": 32,
    "max_context": 1024,
}


def recipe(folder: Path, epochs: int, **options: Any) -> Config:
    """A planner that calls a searcher one to three times, which looks something up; ``PROMPTS`` tasks.

    The task files are written into ``folder``; ``options`` replace whole keys of the recipe.
    """
    tasks, unseen = folder / "tasks.jsonl", folder / "unseen.jsonl"
    for path, size in ((tasks, PROMPTS), (unseen, 2)):
        lines = [json.dumps({"question": f"{path.stem} {i}", "answer": "yes"}) + "\n" for i in range(size)]
        path.write_text("".join(lines))
    steps = epochs * PROMPTS // GROUPS_PER_STEP
    table = {
        "name": "chaos",
        "threads": 1,
        "agents": {
            "planner": {"role": "planner", "tools": ["searcher"], "num_generations": K, **_AGENT},
            "searcher": {"role": "subagent", "tools": ["lookup"], "trajectories_per_rollout": 2, **_AGENT},
        },
        "tools": {"lookup": {"type": "chaos_recipe:Lookup"}},
        "tasks": {"type": "jsonl", "path": str(tasks)},
        "reward": "chaos_recipe:worth",
        "stages": [{"name": "count", "steps": steps, "groups_per_step": GROUPS_PER_STEP}],
        "rollout": {"groups_per_lease": 1},
        "evaluation": {
            "tasks": {"path": str(unseen)},
            "questions": 2,
            "dev_tasks": {"path": str(unseen)},
            "dev_questions": 1,
            "every": 10,
            "closed_book": False,
            "examples": 0,
        },
        "lease_s": 2.0,
        "store_timeout_s": 120.0,
        "outage_timeout_s": 60.0,
        "launch": {"collectors": 2, "engines": 2},
    }
    return resolve(table | options)


def calls(root: TrajectoryId) -> int:
    """How often a root calls the searcher."""
    return 1 + (root.group + root.rollout) % 3


def moves(step: int) -> bool:
    """Whether a step moves the weights; some do not, as where all rewards are equal."""
    return step % 7 != 3


# ---------------------------------------------------------------- what a part achieves


class _Notes:
    """Of this process. Times are of the monotonic clock, which all processes of a machine share."""

    def __init__(self) -> None:
        self._file = -1

    def open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **values: Any) -> None:
        line = {"time": time.monotonic(), "pid": os.getpid(), "what": what, **values}
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError:
            return  # the disk is full on purpose


noted = _Notes()


# ---------------------------------------------------------------- the engine and the tool


def scripted(encode: Callable[[Reply | str], tuple[int, ...]]) -> Scripted:
    return _Engine(script, encode)


class _Engine(Scripted):
    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await asyncio.sleep(TURN_S)
        found = await super().generate(requests)
        noted.write("turns", version=self._version)
        return found


def script(request: Request) -> Reply:
    """The first turn calls, the second answers. A prompt holds one end of turn for each message before."""
    id = request.id
    first = sum(request.prompt_ids.count(end) for end in request.stop_ids) <= 2
    if not first:
        return Reply(answer=Findings("yes" if (id.group + id.rollout) % 2 else "no"))
    if id.agent == "planner":
        return Reply(calls=tuple(ToolCall("searcher", {"task": "yes"}) for _ in range(calls(id))))
    return Reply(calls=(ToolCall("lookup", {"query": "yes"}),))


class Lookup:
    name = "lookup"
    description = "Look something up."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What."}},
        "required": ["query"],
    }

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        noted.write("lookup")
        return ToolResult("yes")


def worth(rollout: Rollout, *_: Any) -> dict[TrajectoryId, Reward]:
    """Every reward says which process collected its rollout."""
    return {t.id: Reward(rollout.index / K, {"process": float(os.getpid())}) for t in rollout.trajectories}
