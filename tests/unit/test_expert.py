"""Experts that need no model: the source's own grade, and rules."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from mgrpo.errors import ConfigError
from mgrpo.tasks.expert import Expert, Gold, Rule
from mgrpo.types import (
    Failure,
    Findings,
    Grade,
    Parent,
    Reply,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
)

TASK = Task("t0", "Which is larger, Zubora or Tarn?", "Zubora")
ROOT = TrajectoryId(0, 0, "planner", 0)


def searched(answer: str | None, *results: Any, sources: tuple[str, ...] = (), **arguments: Any) -> Trajectory:
    """A sub-agent that made one call per result, with the same arguments, and then answered."""
    read = tuple(r if isinstance(r, ToolResult) else ToolResult(r) for r in results)
    calls = tuple(ToolCall("search", arguments) for _ in read)
    turn = Turn((1,), (2,), (0.0,), 0, "stop", "", Reply(calls=calls), read)
    found = None if answer is None else Findings(answer, "", sources)
    id = TrajectoryId(0, 0, "searcher", 0)
    return Trajectory(id, "capital of Zubora", (turn,), "answer", found, Parent(ROOT, 0, 0))


def grade(expert: Expert, trajectory: Trajectory) -> Grade:
    return asyncio.run(expert.grade(TASK, trajectory))


def by_rule(trajectory: Trajectory, rule: str = "grounded") -> float | None:
    return grade(Rule(rule=rule).build(), trajectory).value


class Source:
    """Grades by what its answer is."""

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        return Grade(0.25, grader=f"{task.id} {trajectory.id}")


def test_gold_is_the_sources_own_grade() -> None:
    expert = Gold().build(source=Source())  # type: ignore[arg-type]
    assert grade(expert, searched("Merova")) == Grade(0.25, grader="t0 g0/r0/searcher/0")
    assert expert.take_metrics() == {}
    asyncio.run(expert.close())


# ---------------------------------------------------------------- grounded


@pytest.mark.parametrize(
    ("answer", "text", "worth"),
    [
        ("Merova", "The capital is Merova.", 1.0),
        ("merova!", "capital MEROVA .", 1.0),
        ("New Merova", "Its capital is New\nMerova, founded 1200", 1.0),
        ("Tarn", "Starnberg is a town", 0.0),  # a word, not a part of one
        ("12", "founded in 2012", 0.0),
        ("12", "12.5 km", 0.0),
        ("1,234", "1234 inhabitants", 1.0),
        ("1234", "1,234 inhabitants", 1.0),
        ("12.5", "a share of 12.5%", 1.0),
        ("$12.5", "costs 12.5", 1.0),
        ("-5", "minimum of -5 degrees", 1.0),
        ("-5", "pages 3-5", 0.0),
        ("5", "minimum of -5 degrees", 0.0),
        ("Merova, Tarn", "Tarn lies north of Merova", 1.0),  # a list: every element, in any order
        ("Merova; Okru", "Tarn lies north of Merova", 0.0),
        ("Merova", "", 0.0),
        ("?", "?", 0.0),
        ("", "Merova", 0.0),
        (None, "Merova", 0.0),
    ],
)
def test_grounded_is_an_answer_that_a_tool_returned(answer: str | None, text: str, worth: float) -> None:
    assert by_rule(searched(answer, "a page about nothing", text)) == worth


def test_nothing_read_grounds_nothing() -> None:
    assert by_rule(searched("Merova")) == 0.0


def test_what_a_tool_repeats_or_complains_about_grounds_nothing() -> None:
    guess = {"query": ["capital Zubora", "Merova"]}
    assert by_rule(searched("Merova", "No results found for 'Merova'. Try other words.", **guess)) == 0.0
    assert by_rule(searched("Merova", "1. [Merova](p7) Merova is a town", **guess)) == 1.0
    complaint = ToolResult("no page Merova", error="no page Merova")
    assert by_rule(searched("Merova", complaint, ToolResult("Merova", failure=Failure("ToolError", "down")))) == 0.0
    assert by_rule(searched("2012", "built in 2012", page="1")) == 1.0  # only whole words are repetitions


def test_a_trajectory_that_infrastructure_spoilt_is_unknown_with_its_cause() -> None:
    failure = Failure("ToolError", "search is down")
    spoilt = replace(searched("Merova", ToolResult("tool failed", failure=failure)), failure=failure)
    assert grade(Rule().build(), spoilt) == Grade(None, "ToolError: search is down", "rule:grounded")


@pytest.mark.parametrize(
    ("sources", "worth"),
    [
        (("https://a.org/p7",), 1.0),  # opened
        (("https://a.org/p9", "https://a.org/p7"), 1.0),  # listed and opened
        (("https://a.org/p7", "https://b.org/p7"), 0.0),
        (("https://a.org/p",), 0.0),
        (("",), 0.0),
        ((), 0.0),
    ],
)
def test_cited_is_naming_sources_that_were_seen_and_only_those(sources: tuple[str, ...], worth: float) -> None:
    trajectory = searched("Merova", "see [Tarn](https://a.org/p9)", sources=sources, url="https://a.org/p7")
    assert by_rule(trajectory, "cited") == worth


# ---------------------------------------------------------------- functions of users


def by_length(task: Task, trajectory: Trajectory) -> float:
    return len(trajectory.answer.answer) / 10 if trajectory.answer else 0.0


async def later(task: Task, trajectory: Trajectory) -> Grade:
    await asyncio.sleep(0)
    return Grade(None, "the oracle sleeps", "oracle")


def silent(task: Task, trajectory: Trajectory) -> None: ...


def broken(task: Task, trajectory: Trajectory) -> float:
    raise KeyError("a bug")


def test_a_function_gives_a_number_a_grade_or_none_now_or_later() -> None:
    def graded(name: str) -> Grade:
        return grade(Rule(rule=f"test_expert:{name}").build(), searched("Merova"))

    assert graded("by_length") == Grade(0.6, grader="rule:test_expert:by_length")
    assert graded("later") == Grade(None, "the oracle sleeps", "oracle")
    assert graded("silent").value is None and graded("silent").cause == "rule test_expert:silent returned None"
    with pytest.raises(KeyError, match="a bug"):
        graded("broken")


@pytest.mark.parametrize("value", [1.1, -0.1, float("nan"), "1.0", [1.0]])
def test_a_value_that_is_no_grade_is_refused(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "changing", lambda task, trajectory: value)
    with pytest.raises(ConfigError, match=r"changing returned .* for g0/r0/searcher/0; return 0 to 1, None or a Grade"):
        grade(Rule(rule="test_expert:changing").build(), searched("Merova"))


def test_rules_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="did you mean 'grounded'"):
        Rule(rule="gronded")
    for rule in ("test_expert:nothing", "no_such_module:f", "test_expert:TASK"):
        with pytest.raises(ConfigError, match="expert.rule"):
            Rule(rule=rule).build()
