"""Scripted agents on the word-level tokenizer, for tests of the loop and of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tiny_tokenizer import word_tokenizer

from mgrpo.agents.chat import Chat
from mgrpo.agents.formats import Compact
from mgrpo.agents.loop import Agent, Episode, Limits, run
from mgrpo.agents.scheduler import Lockstep
from mgrpo.engines.base import Completion, Request
from mgrpo.engines.scripted import Scripted
from mgrpo.tools.base import CallContext
from mgrpo.types import Reply, Task, ToolResult, Trajectory, TrajectoryId

QUERY: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@cache
def compact_chat() -> Chat:
    return Chat(word_tokenizer(), Compact())


class Lookup:
    """A tool that says what it is told to say, after ``seconds``."""

    def __init__(self, say: Callable[[str, CallContext], str | ToolResult], name: str = "search", seconds: float = 0.0):
        self.name = name
        self.description = "finds things"
        self.parameters = QUERY
        self.calls: list[str] = []
        self._say = say
        self._seconds = seconds

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        self.calls.append(arguments["query"])
        if self._seconds:
            await asyncio.sleep(self._seconds)
        said = self._say(arguments["query"], context)
        return ToolResult(said) if isinstance(said, str) else said


class Recorder(Scripted):
    """A scripted engine that remembers its batches and what it was told to release."""

    def __init__(self, script: Callable[[Request], Reply | str]) -> None:
        super().__init__(script, compact_chat().encode_reply)
        self.batches: list[list[Request]] = []
        self.released: list[TrajectoryId] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.batches.append(list(requests))
        return await super().generate(requests)

    def release(self, id: TrajectoryId) -> None:
        self.released.append(id)


def turn_of(request: Request) -> int:
    return sum(message.role == "assistant" for message in request.messages)


def says(*turns: str) -> Callable[[Request], str]:
    """A script by number of the turn."""
    return lambda request: turns[turn_of(request)]


def agent(script: Callable[[Request], Reply | str], *tools: Any, name: str = "planner", **limits: Any) -> Agent:
    return Agent(name, compact_chat(), Recorder(script), {tool.name: tool for tool in tools}, Limits(**limits))


TASK = Task("t0", "what is the capital of Zubora ?")


def run_alone(agent: Agent, **budgets: Any) -> tuple[Trajectory, Episode]:
    """One rollout of ``agent`` as the root, and its episode."""

    async def main() -> tuple[Trajectory, Episode]:
        episode = Episode(TASK, 5, 2, Lockstep(5.0), **budgets)
        episode.scheduler.join(episode.member)
        trajectory = await run(agent, episode.root(agent.name), TASK.question, "", None, episode)
        return trajectory, episode

    return asyncio.run(main())
