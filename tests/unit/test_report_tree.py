"""A rollout as a tree that a person can read."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from report_samples import answers, calls, failed, group_of, rewarded, rollout, turn
from rich.console import Console

from mgrpo.report.tree import clean, rollout_text, rollout_tree
from mgrpo.types import Failure, Reply, Rollout, Task, ToolResult

TASK = Task("t", "What is the capital ?", "Merova")


def shown(member: Rollout, task: Task = TASK, width: int = 160) -> list[str]:
    return rollout_text(member, rewarded(group_of(member)), task, width).splitlines()


def depth(row: str) -> int:
    """Characters of guide lines before the text."""
    return next(i for i, character in enumerate(row) if character not in "│├└─ ")


def row_with(rows: list[str], words: str) -> str:
    (row,) = [row for row in rows if words in row]
    return row


def test_branches_hang_on_the_call_that_made_them() -> None:
    rows = shown(rollout(0, 2))
    assert rows[0] == "g0/r0  What is the capital ?  gold: Merova"
    planner = row_with(rows, "planner/0")
    assert "reward 1.00 (format 1  correct 1)" in planner and planner.endswith("answer: Merova")
    call, searcher = row_with(rows, "-> searcher: capital of country 1"), row_with(rows, "searcher/1")
    assert rows.index(searcher) == rows.index(call) + 1 and depth(searcher) > depth(call) > depth(planner)
    assert "expert 1)" in searcher
    result = row_with(rows, "<- page 1")
    assert depth(result) > depth(searcher) and rows.index(result) > rows.index(searcher)
    spine = [row for row in rows if row[4:].startswith(("├── turn", "└── turn"))]
    assert [row.partition("turn ")[2][0] for row in spine] == ["0", "1"]


def test_a_single_call_stands_on_its_turn_s_line() -> None:
    rows = shown(rollout(0, 1))
    assert "turn 0  -> searcher: capital of country 0" in row_with(rows, "-> searcher")
    assert "turn 0  -> search: query 0" in row_with(rows, "-> search:")


def test_format_errors_forced_turns_and_endings_are_marked() -> None:
    member = rollout(0, 1, "Tarn", error="unknown tool 'nobody'")
    rows = shown(member)
    assert "turn 1  <call> nobody  format error: unknown tool 'nobody'" in row_with(rows, "turn 1  <call>")
    assert "invalid format" in row_with(rows, "planner/0") and "reward 0.00" in row_with(rows, "planner/0")
    late = replace(member.root, turns=(answers("Tarn", forced=True),), ending="max_turns")
    rows = shown(Rollout(0, 0, (late,)))
    assert "turn 0 (forced)  answer: Tarn" in row_with(rows, "turn 0")
    assert row_with(rows, "planner/0").endswith("ended by max_turns")


def test_failures_are_shown_and_a_child_of_a_lost_turn_is_not() -> None:
    rows = shown(failed(0))
    assert sum("failed: EngineTimeout: no answer after 2 s" in row for row in rows) == 2  # the rollout and its root
    member = rollout(0, 1)
    cut = replace(member.root, turns=(), ending="failure", answer=None, failure=Failure("ToolTimeout", "30 s"))
    rows = shown(Rollout(0, 0, (cut, member.trajectories[1])))
    assert depth(row_with(rows, "searcher/0")) > depth(row_with(rows, "planner/0"))
    assert any("failed: ToolTimeout: 30 s" in row for row in rows)


def test_errors_of_calls_are_shown_under_the_call() -> None:
    refused = ToolResult("too many calls", error="too many calls")
    member = rollout(0, 0)
    root = replace(member.root, turns=(calls("a", "b", results=(refused, ToolResult("p12"))), answers("Merova")))
    rows = shown(Rollout(0, 0, (root,)))
    first, second = row_with(rows, "-> searcher: a"), row_with(rows, "-> searcher: b")
    assert [rows.index(row_with(rows, text)) for text in ("<- too many", "<- p12")] == [
        rows.index(first) + 1,
        rows.index(second) + 1,
    ]


def test_unknown_and_missing_rewards() -> None:
    member = rollout(0, 1)
    unknown = rewarded(group_of(member), expert=None)
    assert "expert -" in row_with(rollout_text(member, unknown, TASK, 160).splitlines(), "searcher/0")
    rows = rollout_text(member, {}, replace(TASK, answer=None), 160).splitlines()
    assert not any("reward" in row or "gold" in row for row in rows)


def test_text_of_models_and_pages_is_no_markup_and_no_escape_sequence() -> None:
    evil = "[red]page[/red] [link=http://x]y[/link] \x1b[2J\x1b]0;title\x07 [/] end"
    root = rollout(0, 0).root
    turns = (calls("a", tool="search", results=(ToolResult(evil),)), turn(Reply(error=evil), text=evil), answers(evil))
    member = Rollout(0, 0, (replace(root, turns=turns),))
    file = StringIO()
    Console(file=file, force_terminal=True, color_system="truecolor", width=400).print(
        rollout_tree(member, {}, Task("t", evil, evil))
    )
    text = file.getvalue()
    assert text.count("[red]page[/red]") >= 5 and "\x1b[2J" not in text and "\x1b]" not in text and "\x07" not in text


def test_long_texts_are_shortened_in_the_middle() -> None:
    text = clean("a" * 500 + " " + "b" * 500, 90)
    assert text == "a" * 60 + " ... " + "b" * 30
    assert clean("line\none\ttwo") == "line one two"
