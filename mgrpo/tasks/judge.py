"""An LLM that grades how well a subtask was done: the paper's expert reward.

::

    trajectory -rubric.messages_for-> messages -cache?-> chat engine -rubric.parse_verdict-> Grade
                                                            ^   invalid: asked again, at most max_asks times
                                                            |
                                      equal messages in flight are asked once, at most `concurrency` others at a time

Whatever breaks on the way (the service, the deadline, the budget, replies that cannot be read) is an unknown grade with
its cause. It is never 0, which would punish the agent, and never the end of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field, model_validator

from mgrpo.config.registry import settings
from mgrpo.errors import ConfigError, GraderError, InfrastructureError
from mgrpo.tasks.expert import Expert
from mgrpo.tasks.rubric import RUBRIC, Verdict, View, messages_for, parse_verdict
from mgrpo.types import Failure, Grade, Message, Task, Trajectory

_ECHOED = 2000  # characters of an invalid reply that the judge is shown again
_REMEMBERED = 100_000  # grades kept in memory where there is no cache file


class Settings(BaseModel, extra="forbid", frozen=True):
    """``engine`` is the table of a chat engine. ``rubric`` is a text file; without one, ``tasks.rubric.RUBRIC``.

    ``highest`` is the rubric's best score, which is rescaled to 1; 0 is its worst. ``deadline_s`` is of one grade, with
    all tries, once it has one of the ``concurrency`` places. ``cache`` is an SQLite file that keeps grades and reasons.
    Prices are money per million tokens; above ``max_cost``, counted from the program's start, grades are unknown.
    """

    type: Literal["judge"] = "judge"
    engine: dict[str, Any]
    rubric: Path | None = None
    highest: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    show_question: bool = False
    show_tool_results: bool = True
    max_chars: int = Field(default=8000, ge=1)
    max_asks: int = Field(default=2, ge=1)
    deadline_s: float = Field(default=90.0, gt=0)
    concurrency: int = Field(default=16, ge=1)
    cache: Path | None = None
    prompt_price: float = Field(default=0.0, ge=0)
    completion_price: float = Field(default=0.0, ge=0)
    max_cost: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.rubric is None and self.highest != 10.0:
            raise ValueError("highest: the built-in rubric goes to 10; name a rubric file of your own, or remove this")
        if self.max_cost is not None and not self.prompt_price and not self.completion_price:
            raise ValueError("max_cost: has no effect without prices; set prompt_price and completion_price")
        settings("chat_engine", self.engine, "expert.engine")
        return self

    def build(self, **_: Any) -> Judge:
        """Raises ConfigError for a rubric or cache that cannot be read, and what the engine raises."""
        engine = settings("chat_engine", self.engine, "expert.engine").build()
        return Judge(self, engine, RUBRIC if self.rubric is None else _read_rubric(self.rubric))


def _read_rubric(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expert.rubric: {path} cannot be read ({error}); give a UTF-8 text file") from error
    if not text.strip():
        raise ConfigError(f"expert.rubric: {path} is empty; write what each score stands for")
    return text


# ---------------------------------------------------------------- the judge


class _Reply(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def complete(self) -> bool: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def completion_tokens(self) -> int | None: ...


class Chat(Protocol):
    """What a judge needs of a chat engine."""

    @property
    def model(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def retries(self) -> int: ...
    async def chat(self, messages: Sequence[Message]) -> _Reply: ...
    async def close(self) -> None: ...


class Judge(Expert):
    """Grades by asking ``engine``."""

    def __init__(self, settings: Settings, engine: Chat, rubric: str = RUBRIC) -> None:
        self.concurrency = settings.concurrency
        self._settings = settings
        self._engine = engine
        self._rubric = rubric
        self._view = View(settings.show_question, settings.show_tool_results, settings.max_chars)
        self._verdicts = _Verdicts(settings.cache)
        self._counts: dict[str, float] = dict.fromkeys(_METRICS, 0.0)
        self._retries = 0
        self._spent = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        """0 without an answer, unknown where the trajectory failed; else the judge's score, or unknown."""
        grader = f"judge:{self._engine.model}"
        if trajectory.failure is not None:
            return Grade(None, str(trajectory.failure), grader)
        if trajectory.answer is None or not trajectory.answer.answer.strip():
            return Grade(0.0, grader=grader)
        messages = messages_for(self._rubric, self._settings.highest, self._view, task, trajectory)
        found = await self._verdict(messages)
        if isinstance(found, Failure):
            self._counts["judge_unknown"] += 1
            return Grade(None, str(found), grader)
        return Grade(found.score, grader=grader)

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call.

        ::

            judge_calls, judge_retries                        requests for a grade, further tries of one over HTTP
            judge_cached                                      grades known already or asked for at that moment
            judge_unparsed                                    replies that held no verdict
            judge_unknown                                     grades that could not be had
            judge_prompt_tokens, judge_completion_tokens      as counted by the service
            judge_unmetered                                   replies without such a count: tokens and cost lack them
            judge_cost                                        by the prices of the settings
            judge_cache_errors                                verdicts that the cache file could not give or keep
        """
        taken, self._counts = self._counts, dict.fromkeys(_METRICS, 0.0)
        taken["judge_retries"], self._retries = self._engine.retries - self._retries, self._engine.retries
        return taken

    async def close(self) -> None:
        self._verdicts.close()
        await self._engine.close()

    async def _verdict(self, messages: Sequence[Message]) -> Verdict | Failure:
        """From the cache, from an equal question in flight, or newly asked."""
        key = _key(self._engine.identity, messages)
        known = self._known(key)
        if known is not None:
            self._counts["judge_cached"] += 1
            return known
        self._enter_loop()
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(self._found(key, messages))
            flight.add_done_callback(lambda _: self._flights.pop(key, None))
        else:
            self._counts["judge_cached"] += 1
        # Who gives up waiting must not take the answer away from the others; the flight has a deadline of its own.
        return await asyncio.shield(flight)

    def _enter_loop(self) -> None:
        """Tasks and semaphores belong to one event loop, and a program may run several in turn."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._places = asyncio.Semaphore(self._settings.concurrency)
            self._flights: dict[str, asyncio.Task[Verdict | Failure]] = {}

    async def _found(self, key: str, messages: Sequence[Message]) -> Verdict | Failure:
        seconds = self._settings.deadline_s
        async with self._places:
            try:
                async with asyncio.timeout(seconds):
                    verdict = await self._ask(messages)
            except InfrastructureError as error:
                return error.as_failure()
            except TimeoutError:
                return GraderError(f"judge {self._engine.model} gave no grade within {seconds:g} s").as_failure()
        self._remember(key, verdict)
        return verdict

    def _known(self, key: str) -> Verdict | None:
        """A cache that breaks costs money, no grade."""
        try:
            return self._verdicts.get(key)
        except sqlite3.Error:
            self._counts["judge_cache_errors"] += 1
            return None

    def _remember(self, key: str, verdict: Verdict) -> None:
        try:
            self._verdicts.put(key, verdict, self._engine.model)
        except sqlite3.Error:
            self._counts["judge_cache_errors"] += 1

    async def _ask(self, messages: Sequence[Message]) -> Verdict:
        """Raises GraderError where every reply was invalid or the money is spent, and what the engine raises."""
        conversation = list(messages)
        for _ in range(self._settings.max_asks):
            self._check_budget()
            self._counts["judge_calls"] += 1
            reply = await self._engine.chat(conversation)
            self._meter(reply)
            try:
                if not reply.complete:
                    raise ValueError("the reply was cut off")
                return parse_verdict(reply.text, self._settings.highest)
            except ValueError as error:
                fault = str(error)
            self._counts["judge_unparsed"] += 1
            conversation = [*messages, Message("assistant", reply.text[:_ECHOED]), Message("user", _again(fault))]
        raise GraderError(
            f"judge reply unparsed after {self._settings.max_asks} asks of {self._engine.model}, last: {fault}"
        )

    def _check_budget(self) -> None:
        limit = self._settings.max_cost
        if limit is not None and self._spent >= limit:
            raise GraderError(f"the judge has spent {self._spent:.4g} of {limit:g}; raise expert.max_cost to go on")

    def _meter(self, reply: _Reply) -> None:
        prompt, completion = reply.prompt_tokens, reply.completion_tokens
        if prompt is None or completion is None:
            self._counts["judge_unmetered"] += 1
        cost = ((prompt or 0) * self._settings.prompt_price + (completion or 0) * self._settings.completion_price) / 1e6
        self._spent += cost
        for name, value in (("prompt_tokens", prompt), ("completion_tokens", completion), ("cost", cost)):
            self._counts[f"judge_{name}"] += value or 0


_METRICS = (
    "judge_calls",
    "judge_retries",
    "judge_cached",
    "judge_unparsed",
    "judge_unknown",
    "judge_prompt_tokens",
    "judge_completion_tokens",
    "judge_unmetered",
    "judge_cost",
    "judge_cache_errors",
)


def _again(fault: str) -> str:
    return f"That is no valid reply ({fault}). Reply with the one JSON object described at first and nothing else."


def _key(identity: str, messages: Sequence[Message]) -> str:
    """Whatever decides a verdict; the rubric and its scale stand in the messages."""
    return hashlib.sha256(json.dumps([identity, *((m.role, m.content) for m in messages)]).encode()).hexdigest()


# ---------------------------------------------------------------- what has been graded already


class _Verdicts:
    """Verdicts by key, in an SQLite file that several processes may share, or in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            # Threads take turns: a notebook's event loop runs in a thread of its own, see `team.complete`.
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS verdicts"
                " (number INTEGER PRIMARY KEY, key TEXT UNIQUE, score REAL, reason TEXT, model TEXT)"
            )
        except sqlite3.Error as error:
            raise ConfigError(
                f"expert.cache: {path} cannot be opened ({error}); name an SQLite file, or one that is not there yet"
            ) from error

    def get(self, key: str) -> Verdict | None:
        row = self._db.execute("SELECT score, reason FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if row is None else Verdict(*row)

    def put(self, key: str, verdict: Verdict, model: str) -> None:
        """Of two processes that asked at once, the first is kept."""
        row = (key, verdict.score, verdict.reason, model)
        self._db.execute("INSERT OR IGNORE INTO verdicts (key, score, reason, model) VALUES (?, ?, ?, ?)", row)
        if self._path is None:
            self._db.execute("DELETE FROM verdicts WHERE number <= last_insert_rowid() - ?", (_REMEMBERED,))

    def close(self) -> None:
        self._db.close()
