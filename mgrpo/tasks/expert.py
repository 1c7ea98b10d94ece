"""Who grades a sub-agent's work (r_expert of equation 5, arXiv 2511.13288): the source's gold, a rule, or a judge.

The paper's expert is an LLM (tasks/judge.py). A rule needs neither a gold answer nor a model, and is easier to game.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal, Protocol

from pydantic import BaseModel, field_validator

from mgrpo.config.registry import load_object, suggest
from mgrpo.errors import ConfigError
from mgrpo.tasks.base import TaskSource
from mgrpo.types import Grade, Task, Trajectory


class Expert(Protocol):
    """Grades every trajectory below the root. Deriving from it leaves only `grade` to write.

    ``concurrency`` is how many grades are asked for at once.
    """

    concurrency: int = 64

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        """How well ``trajectory`` did its subtask: in [0, 1], or unknown with its cause, as in any outage."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What has accrued since the last call, by metric name, such as calls and money."""
        return {}

    async def close(self) -> None:
        """The run is over: let go of what is held."""
        return None


# ---------------------------------------------------------------- the source's own grade


class Gold(BaseModel, extra="forbid", frozen=True):
    """The task source grades its subtasks itself, by gold sub-answers; the default."""

    type: Literal["gold"] = "gold"

    def build(self, source: TaskSource, **_: Any) -> Expert:
        return _BySource(source)


class _BySource(Expert):
    def __init__(self, source: TaskSource) -> None:
        self._source = source

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        return await self._source.grade(task, trajectory)


# ---------------------------------------------------------------- a rule

# Returns a Grade, a number in [0, 1] or None, or an awaitable of one; what a user's function returns is checked.
RuleFunction = Callable[[Task, Trajectory], Any]


class Rule(BaseModel, extra="forbid", frozen=True):
    """``rule`` is "grounded", "cited", or "module:function" of a function (task, trajectory) -> Grade | float | None.

    A function may be async. Its number lies in [0, 1]; None is unknown.
    """

    type: Literal["rule"] = "rule"
    rule: str = "grounded"

    @field_validator("rule")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in RULES and ":" not in value:
            raise ValueError(f"rule: unknown rule {value!r}{suggest(value, RULES)}; or name a function module:function")
        return value

    def build(self, **_: Any) -> Expert:
        """Raises ConfigError where the function cannot be imported or called."""
        function = RULES[self.rule] if self.rule in RULES else load_object(self.rule, "expert.rule")
        if not callable(function):
            raise ConfigError(f"expert.rule: {self.rule} is not callable; name a function (task, trajectory)")
        return _ByRule(self.rule, function)


class _ByRule(Expert):
    def __init__(self, name: str, function: RuleFunction) -> None:
        self._name = name
        self._function = function

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        """Unknown without asking the rule where the trajectory failed by infrastructure.

        Raises ConfigError for a value that is no grade.
        """
        grader = f"rule:{self._name}"
        if trajectory.failure is not None:
            return Grade(None, str(trajectory.failure), grader)
        worth = self._function(task, trajectory)
        if inspect.isawaitable(worth):
            worth = await worth
        if isinstance(worth, Grade):
            return worth
        if worth is None:
            return Grade(None, f"rule {self._name} returned None", grader)
        if not isinstance(worth, Real) or not 0.0 <= float(worth) <= 1.0:
            raise ConfigError(
                f"expert.rule: {self._name} returned {worth!r} for {trajectory.id}; return 0 to 1, None or a Grade"
            )
        return Grade(float(worth), grader=grader)


def grounded(task: Task, trajectory: Trajectory) -> float:
    """1 where the answer occurs in what the trajectory's tools returned, word by word; else 0, as without an answer.

    Case and punctuation do not count; "1,234" is 1234. Of an answer with "," or ";" every element must occur. It says
    nothing about whether the answer is right. What a tool only repeats of its arguments, or returns with a complaint,
    grounds nothing: else an agent would learn to search for its guess.
    """
    answer = "" if trajectory.answer is None else trajectory.answer.answer
    read = [_without_echo(_words(text), arguments) for arguments, text in _sound_calls(trajectory)]
    elements = [words for element in re.split("[,;]", answer) if (words := _words(element))]
    return float(bool(elements) and (_occurs(_words(answer), read) or all(_occurs(words, read) for words in elements)))


def cited(task: Task, trajectory: Trajectory) -> float:
    """1 where at least one source is named and all are ones that a tool returned or was successfully asked for."""
    seen = [_words(text) for _, text in _sound_calls(trajectory)]
    seen += [_words(text) for arguments, _ in _sound_calls(trajectory) for text in _strings(arguments)]
    named = [_words(source) for source in (trajectory.answer.sources if trajectory.answer is not None else ())]
    return float(bool(named) and all(words and _occurs(words, seen) for words in named))


RULES: Mapping[str, RuleFunction] = {"grounded": grounded, "cited": cited}


def _sound_calls(trajectory: Trajectory) -> Iterator[tuple[Mapping[str, Any], str]]:
    """(arguments, text returned) of every call that neither the model nor the infrastructure spoilt."""
    for turn in trajectory.turns:
        # A turn cut short by a failure has fewer results than calls.
        for call, result in zip(turn.reply.calls, turn.results, strict=False):
            if result.error is None and result.failure is None:
                yield call.arguments, result.text


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


# A number with its sign, thousands and decimals, or a word.
_WORD = re.compile(r"(?<!\w)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)|\w+")


def _words(text: str) -> list[str]:
    return [word.replace(",", "") for word in _WORD.findall(text.casefold())]


def _occurs(phrase: list[str], texts: list[list[str]]) -> bool:
    """Whether the words of ``phrase`` stand one after another in one of ``texts``."""
    return any(_position(phrase, text) is not None for text in texts)


def _position(phrase: list[str], text: list[str]) -> int | None:
    ends = range(len(text) - len(phrase) + 1)
    return next((i for i in ends if text[i : i + len(phrase)] == phrase), None)


def _without_echo(text: list[str], arguments: Mapping[str, Any]) -> list[str]:
    """``text`` less its first repetition of each argument."""
    for argument in map(_words, _strings(arguments)):
        if argument and (start := _position(argument, text)) is not None:
            text = text[:start] + text[start + len(argument) :]
    return text
