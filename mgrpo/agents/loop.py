"""Think -> call -> observe until an answer or a limit; the same loop for a planner and for a sub-agent.

::

    opening   system?, user: the task                       -> prompt
    turn      engine samples ids -> Reply: calls | answer | error
    calls     run at once, results in call order            -> tool messages
    error     the model's own mistake, recorded             -> a tool message says so
    answer    the trajectory ends
    limit     one forced turn: "answer now"; its calls are not run, its answer counts if it parses

Infrastructure failures stop at two places: a tool's in `_Run.call`, an engine's in `run`. Anything else is a bug and
passes through with its traceback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from mgrpo.agents.chat import Chat, Side
from mgrpo.agents.scheduler import Scheduler
from mgrpo.engines.base import Completion, Engine, Request, Sampling
from mgrpo.errors import EngineError, InfrastructureError, SamplingEvidenceError, ToolError, ToolTimeout
from mgrpo.tools.base import CallContext, Tool
from mgrpo.types import (
    Corpus,
    Ending,
    Failure,
    Findings,
    Message,
    Parent,
    Reply,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one trajectory may use. Lengths are in tokens.

    ``max_turns`` and ``max_parallel_tool_calls`` of 0 mean none. A forced final turn comes on top of ``max_turns``;
    it starts early enough to fit into ``max_context``. ``truncate_side`` is the side of a tool response that is cut.
    """

    max_turns: int = 8
    max_tokens_per_turn: int = 64
    max_context: int = 1024
    max_parallel_tool_calls: int = 8
    max_tool_response_tokens: int = 256
    truncate_side: Side = "right"
    tool_timeout_s: float = 120.0
    final_prompt: str = "answer now"


@dataclass(frozen=True)
class Agent:
    """A name, a way to talk, an engine that writes, tools to call and limits. ``tools`` is keyed by tool name."""

    name: str
    chat: Chat
    engine: Engine
    tools: Mapping[str, Tool] = field(default_factory=dict)
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    system: str = ""

    @cached_property
    def turn_sampling(self) -> Sampling:
        return replace(self.sampling, max_tokens=self.limits.max_tokens_per_turn)

    @cached_property
    def sub_agents(self) -> Mapping[str, str]:
        """Tool name -> agent name, for the tools that are sub-agents."""
        agents = {name: getattr(tool, "agent", None) for name, tool in self.tools.items()}
        return {name: agent.name for name, agent in agents.items() if isinstance(agent, Agent)}


@dataclass(eq=False)
class Episode:
    """One rollout while it runs: what its trajectories share. Ids are handed out in call order."""

    task: Task
    group: int
    index: int
    scheduler: Scheduler
    corpus: Corpus | None = None
    seed: int = 0
    max_depth: int = 4
    max_calls: int = 64
    clock: Callable[[], float] = time.perf_counter
    trajectories: list[Trajectory] = field(default_factory=list)
    _invocations: dict[str, int] = field(default_factory=dict)
    _depths: dict[TrajectoryId, int] = field(default_factory=dict)
    _calls: int = 0

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def member(self) -> tuple[int, int]:
        return self.group, self.index

    def seconds(self) -> float:
        return self.clock() - self._started

    def root(self, agent: str) -> TrajectoryId:
        return self._next(agent, 0)

    def child(self, agent: str, parent: TrajectoryId) -> TrajectoryId | str:
        """The id of the next invocation of ``agent``, or why there cannot be one."""
        depth = self._depths[parent] + 1
        if depth > self.max_depth:
            return f"{agent} would be {depth} levels below the root; max_depth is {self.max_depth}"
        if self._calls >= self.max_calls:
            return f"the rollout has used its {self.max_calls} sub-agent calls (max_calls)"
        self._calls += 1
        return self._next(agent, depth)

    def _next(self, agent: str, depth: int) -> TrajectoryId:
        invocation = self._invocations.get(agent, 0)
        self._invocations[agent] = invocation + 1
        id = TrajectoryId(self.group, self.index, agent, invocation)
        self._depths[id] = depth
        return id


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation(CallContext):
    """A call inside a running episode: what a tool that is an agent needs. ``child`` is the id kept for it."""

    episode: Episode
    caller: Agent
    child: TrajectoryId | None = None


async def run(
    agent: Agent, id: TrajectoryId, task: str, context: str, parent: Parent | None, episode: Episode
) -> Trajectory:
    """One trajectory of ``agent`` on ``task``, also added to ``episode.trajectories``. Engine errors end it."""
    state = _Run(agent, id, task, context, parent, episode)
    try:
        trajectory = state.trajectory(await state.converse())
    except EngineError as error:
        trajectory = state.trajectory("failure", error.as_failure())
    except asyncio.CancelledError:
        interrupted = InfrastructureError(f"{id} was still running when its rollout was ended")
        episode.trajectories.append(state.trajectory("failure", interrupted.as_failure()))
        raise
    finally:
        agent.engine.release(id)
    episode.trajectories.append(trajectory)
    return trajectory


@dataclass(slots=True, eq=False)
class _Run:
    """The state of one trajectory: its messages, and what has been sent and sampled so far."""

    agent: Agent
    id: TrajectoryId
    task: str
    context: str
    parent: Parent | None
    episode: Episode
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sent: tuple[int, ...] = ()  # the last prompt and what was sampled after it
    answer: Findings | None = None
    failure: Failure | None = None  # the first failure of a tool

    async def converse(self) -> Ending:
        limits = self.agent.limits
        if self.agent.system:
            self.messages.append(Message("system", self.agent.system))
        self.messages.append(Message("user", f"{self.task}\n\ncontext: {self.context}" if self.context else self.task))
        while True:
            if len(self.turns) >= limits.max_turns:
                return await self.force("max_turns")
            prompt = self.prompt()
            if len(prompt) + 2 * limits.max_tokens_per_turn > limits.max_context:
                return await self.force("max_context")
            reply = await self.turn(prompt, self.agent.turn_sampling)
            if reply.answer is not None:
                self.answer = reply.answer
                return "answer"
            await self.observe(reply)

    async def force(self, ending: Ending) -> Ending:
        """The final turn at a limit, where there is room for one."""
        self.messages.append(Message("user", self.agent.limits.final_prompt))
        prompt = self.prompt()
        room = self.agent.limits.max_context - len(prompt)
        if room > 0:
            tokens = min(room, self.agent.limits.max_tokens_per_turn)
            sampling = replace(self.agent.turn_sampling, max_tokens=tokens)
            self.answer = (await self.turn(prompt, sampling, forced=True)).answer
        return ending

    def prompt(self) -> tuple[int, ...]:
        return self.agent.chat.prompt_ids(self.messages, self.agent.tools)

    # ------------------------------------------------------------ one turn

    async def turn(self, prompt: tuple[int, ...], sampling: Sampling, forced: bool = False) -> Reply:
        chat = self.agent.chat
        started = self.episode.seconds()
        request = Request(self.id, prompt, sampling, chat.stop_ids, tuple(self.messages))
        completion = _checked(await self.episode.scheduler.generate(self.agent.engine, request), self.id)
        text = chat.decode(completion.token_ids)
        reply = chat.format.parse(text, self.agent.tools)
        if reply.error is not None and completion.stop_reason == "length":
            reply = replace(reply, error=f"{reply.error} (cut off after {len(completion.token_ids)} tokens)")
        extends = prompt[: len(self.sent)] == self.sent
        self.turns.append(
            Turn(
                context_ids=prompt[len(self.sent) :] if extends else prompt,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                version=completion.version,
                stop_reason=completion.stop_reason,
                text=text,
                reply=reply,
                new_row=not extends,
                forced=forced,
                started=started,
                seconds=self.episode.seconds() - started,
            )
        )
        self.sent = prompt + completion.token_ids
        self.messages.append(Message("assistant", text, ids=completion.token_ids))
        return reply

    # ------------------------------------------------------------ what the world says back

    async def observe(self, reply: Reply) -> None:
        """Run the calls, or say what was wrong with the turn."""
        if reply.error is not None:
            complaint = self.agent.chat.format.complaint(reply.error, "format")
            self.messages.append(Message("tool", complaint))
            return
        results = await self.act(reply)
        names = [call.name for call in reply.calls]
        texts = self.fit(names, [self.shorten(result.text) for result in results])
        results = [r if r.text is t else replace(r, text=t) for r, t in zip(results, texts, strict=True)]
        self.messages += [Message("tool", t, name=name) for name, t in zip(names, texts, strict=True)]
        turn = self.turns[-1]
        seconds = self.episode.seconds() - turn.started
        self.turns[-1] = replace(turn, results=tuple(results), seconds=seconds)
        if self.failure is None:
            self.failure = next((result.failure for result in results if result.failure is not None), None)

    def shorten(self, text: str) -> str:
        limits = self.agent.limits
        return self.agent.chat.truncate(_encodable(text), limits.max_tool_response_tokens, limits.truncate_side)

    def fit(self, names: list[str], texts: list[str]) -> list[str]:
        """The observations, shortened alike where a forced final turn would not fit behind them."""
        chat, limits = self.agent.chat, self.agent.limits
        observed = [Message("tool", text, name=name) for name, text in zip(names, texts, strict=True)]
        final = chat.prompt_ids([*self.messages, *observed, Message("user", limits.final_prompt)], self.agent.tools)
        excess = len(final) + limits.max_tokens_per_turn - limits.max_context
        if excess <= 0:
            return texts
        lengths = [len(chat.encode(text)) for text in texts]
        share = max(0.0, 1.0 - excess / max(1, sum(lengths)))
        return [
            chat.truncate(text, int(length * share), limits.truncate_side)
            for text, length in zip(texts, lengths, strict=True)
        ]

    async def act(self, reply: Reply) -> list[ToolResult]:
        """All calls of a turn at once. Sub-agents get their ids here, in call order, before anything runs."""
        prepared = [self.prepare(number, call) for number, call in enumerate(reply.calls)]
        results = {i: entry for i, entry in enumerate(prepared) if isinstance(entry, ToolResult)}
        ready = {i: entry for i, entry in enumerate(prepared) if isinstance(entry, Invocation)}
        if len(ready) == 1:
            for i, invocation in ready.items():
                results[i] = await self.call(reply.calls[i], invocation)
        elif ready:
            strands = self.strands([(reply.calls[i], invocation) for i, invocation in ready.items()])
            results.update(zip(ready, await together(strands), strict=True))
        return [results[i] for i in range(len(prepared))]

    def strands(self, calls: list[tuple[ToolCall, Invocation]]) -> list[Coroutine[Any, Any, ToolResult]]:
        """Each call as a strand that the scheduler counts; the last one to end hands its place to this trajectory."""
        scheduler, member = self.episode.scheduler, self.episode.member
        scheduler.join(member, len(calls) - 1)
        running = len(calls)

        async def strand(call: ToolCall, invocation: Invocation) -> ToolResult:
            nonlocal running
            try:
                return await self.call(call, invocation)
            finally:
                running -= 1
                if running:
                    scheduler.leave(member, 1)

        return [strand(call, invocation) for call, invocation in calls]

    def prepare(self, number: int, call: ToolCall) -> Invocation | ToolResult:
        agent, episode = self.agent, self.episode
        limit = agent.limits.max_parallel_tool_calls
        child: TrajectoryId | None = None
        if number >= limit:
            return self.refused(f"a turn runs {limit} calls at most (max_parallel_tool_calls)")
        if call.name in agent.sub_agents:
            granted = episode.child(agent.sub_agents[call.name], self.id)
            if isinstance(granted, str):
                return self.refused(granted)
            child = granted
        return Invocation(
            self.id,
            len(self.turns) - 1,
            number,
            episode.task,
            episode.corpus,
            episode.seed,
            episode=episode,
            caller=agent,
            child=child,
        )

    def refused(self, error: str) -> ToolResult:
        return ToolResult(self.agent.chat.format.complaint(error, "call"), error=error)

    async def call(self, call: ToolCall, invocation: Invocation) -> ToolResult:
        """One call. A broken tool becomes a result that says so; a sub-agent has its rollout's deadline only."""
        tool, seconds = self.agent.tools[call.name], self.agent.limits.tool_timeout_s
        try:
            if invocation.child is not None:
                return await tool(call.arguments, invocation)
            try:
                async with asyncio.timeout(seconds):
                    return await tool(call.arguments, invocation)
            except TimeoutError as error:
                raise ToolTimeout(f"tool {call.name} of {self.id} gave no result after {seconds:g} s") from error
        except ToolError as error:
            return ToolResult("tool failed", failure=error.as_failure())

    def trajectory(self, ending: Ending, failure: Failure | None = None) -> Trajectory:
        return Trajectory(
            id=self.id,
            task=self.task,
            turns=tuple(self.turns),
            ending=ending,
            answer=self.answer,
            parent=self.parent,
            context=self.context,
            failure=failure or self.failure,
        )


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first exception ends the others, and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


_LOWEST_LOGPROB = -1000.0  # servers write -9999 where they have no value


def _checked(completion: Completion, id: TrajectoryId) -> Completion:
    """Raises EngineError on an empty turn and on numbers that are no log-probabilities."""
    if not completion.token_ids:
        raise EngineError(f"the engine returned no token for {id}")
    if not all(_LOWEST_LOGPROB < value <= 1e-3 for value in completion.logprobs):
        raise SamplingEvidenceError(f"the engine returned values for {id} that are no log-probabilities")
    return completion


def _encodable(text: str) -> str:
    """Web pages can hold halves of surrogate pairs, which no tokenizer and no database takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
