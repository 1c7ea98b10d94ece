"""When engine calls are sent, and which of them together.

`Eager` sends what there is as soon as an engine has a place for another call. `Lockstep` counts what could still ask
for a turn::

    active   one per rollout; a turn with n calls holds n of them until its calls are over
    parked   requests that wait
    parked == active  ->  everything parked is sent, grouped by engine, each engine's in order of id

So a batch is a pure function of ids and contents: a slow tool holds the next batch back, and no timing enters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mgrpo.engines.base import Completion, Engine, Request
from mgrpo.errors import EngineError, EngineTimeout

Member = tuple[int, int]  # (group, rollout)


class Scheduler(Protocol):
    """Who asks joins before it asks; see `Lockstep`."""

    whole: bool  # batches repeat, so a group in which a rollout was cut off must run again whole

    async def generate(self, engine: Engine, request: Request) -> Completion: ...

    def join(self, member: Member, count: int = 1) -> None: ...

    def leave(self, member: Member, count: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Parked:
    engine: Engine
    request: Request
    result: asyncio.Future[Completion]


async def _ask(engine: Engine, requests: Sequence[Request], seconds: float) -> list[Completion]:
    """One engine call with its deadline."""
    try:
        async with asyncio.timeout(seconds):
            completions = await engine.generate(requests)
    except TimeoutError as error:
        names = ", ".join(str(request.id) for request in requests[:8])
        more = f" and {len(requests) - 8} more" if len(requests) > 8 else ""
        raise EngineTimeout(f"no completion after {seconds:g} s for {names}{more}") from error
    if len(completions) != len(requests):
        raise EngineError(f"the engine returned {len(completions)} completions for {len(requests)} requests")
    return completions


async def _outcomes(parked: Sequence[_Parked], seconds: float) -> list[Completion | Exception]:
    """The outcomes at one engine, a batch at a time, each with its own deadline.

    An error, ours or the engine's, is raised again where each request of its batch waits.
    """
    outcomes: list[Completion | Exception] = []
    while batch := [p.request for p in parked[len(outcomes) :]]:
        try:
            batch = batch[: parked[0].engine.max_batch]
            outcomes += await _ask(parked[0].engine, batch, seconds)
        except Exception as error:
            outcomes += [error] * len(batch)
    return outcomes


def _hand_back(parked: Sequence[_Parked], outcomes: Sequence[Completion | Exception]) -> None:
    for waiting, outcome in zip(parked, outcomes, strict=True):
        if waiting.result.done():  # its rollout ran out of time meanwhile
            continue
        if isinstance(outcome, Exception):
            waiting.result.set_exception(outcome)
        else:
            waiting.result.set_result(outcome)


class Lockstep:
    """All requests of one round together. Every member must have joined before the first one asks.

    ``join`` and ``leave`` say how many strands of a rollout are active; ``leave`` without a count ends it.
    """

    whole = True

    def __init__(self, request_timeout_s: float = 600.0) -> None:
        self._seconds = request_timeout_s
        self._strands: dict[Member, int] = {}
        self._active = 0
        self._parked: dict[_Parked, None] = {}  # in order of arrival
        self._round: asyncio.Task[None] | None = None

    async def generate(self, engine: Engine, request: Request) -> Completion:
        """Raises EngineError, or EngineTimeout when the engine does not answer in time."""
        parked = _Parked(engine, request, asyncio.get_running_loop().create_future())
        self._parked[parked] = None
        self._send_when_complete()
        try:
            return await parked.result
        finally:
            self._parked.pop(parked, None)  # cancelled before it was sent

    def join(self, member: Member, count: int = 1) -> None:
        self._strands[member] = self._strands.get(member, 0) + count
        self._active += count

    def leave(self, member: Member, count: int | None = None) -> None:
        held = self._strands.pop(member, 0)
        gone = held if count is None else min(count, held)
        if held > gone:
            self._strands[member] = held - gone
        self._active -= gone
        self._send_when_complete()

    def _send_when_complete(self) -> None:
        if self._round is None and self._parked and len(self._parked) >= self._active:
            self._round = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            await self._serve()
        finally:
            self._round = None
        self._send_when_complete()

    async def _serve(self) -> None:
        parked = sorted(self._parked, key=lambda p: (p.request.id.agent, p.request.id))
        self._parked = {}
        batches: dict[int, list[_Parked]] = {}
        for waiting in parked:  # engines in order of their first agent's name
            batches.setdefault(id(waiting.engine), []).append(waiting)
        for batch in batches.values():
            batch.sort(key=lambda p: p.request.id)
        results = await asyncio.gather(*(_outcomes(batch, self._seconds) for batch in batches.values()))
        for batch, outcomes in zip(batches.values(), results, strict=True):  # in order, whichever was ready first
            _hand_back(batch, outcomes)


@dataclass(slots=True, eq=False)
class _Queue:
    waiting: dict[_Parked, None] = field(default_factory=dict)  # in order of arrival
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class Eager:
    """Nobody waits for anybody: what has gathered while an engine was busy is its next batch.

    Which requests meet in a batch depends on timing, so runs repeat only as far as an engine's results do not depend on
    their batch.
    """

    whole = False

    def __init__(self, request_timeout_s: float = 600.0) -> None:
        self._seconds = request_timeout_s
        self._queues: dict[int, _Queue] = {}

    async def generate(self, engine: Engine, request: Request) -> Completion:
        """Raises EngineError, or EngineTimeout when the engine does not answer in time."""
        loop = asyncio.get_running_loop()
        parked = _Parked(engine, request, loop.create_future())
        queue = self._queues.setdefault(id(engine), _Queue())
        queue.waiting[parked] = None
        loop.call_soon(self._send, queue)  # after whoever else asks in this turn of the event loop
        try:
            return await parked.result
        finally:
            queue.waiting.pop(parked, None)  # cancelled before it was sent

    def join(self, member: Member, count: int = 1) -> None:
        """Nothing depends on who is there."""

    def leave(self, member: Member, count: int | None = None) -> None:
        """As of `join`."""

    def _send(self, queue: _Queue) -> None:
        while queue.waiting:
            engine = next(iter(queue.waiting)).engine
            if len(queue.calls) >= engine.max_calls:
                return
            batch = list(queue.waiting)[: engine.max_batch]
            for parked in batch:
                del queue.waiting[parked]
            call = asyncio.get_running_loop().create_task(self._call(batch))
            queue.calls.add(call)
            call.add_done_callback(queue.calls.discard)
            call.add_done_callback(lambda _: self._send(queue))

    async def _call(self, batch: list[_Parked]) -> None:
        _hand_back(batch, await _outcomes(batch, self._seconds))
