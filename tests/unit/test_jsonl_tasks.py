"""Tasks from a user's file."""

from __future__ import annotations

import asyncio
import json

import pytest

from mgrpo.errors import ConfigError, DataError
from mgrpo.tasks.jsonl import Settings
from mgrpo.types import Failure, Findings, Parent, Trajectory, TrajectoryId

ROOT = TrajectoryId(0, 0, "planner", 0)


def length_grader(task, trajectory):
    """Stands for a user's grader: unknown without an answer."""
    return None if trajectory.answer is None else min(1.0, len(trajectory.answer.answer) / 10)


def out_of_range_grader(task, trajectory):
    return 7.0


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def answered(text, id=ROOT, parent=None):
    return Trajectory(id, "q", (), "answer", None if text is None else Findings(text), parent)


def grade(source, trajectory, index=0):
    return asyncio.run(source.grade(source.task(index), trajectory))


def test_records_become_tasks_in_order_and_duplicates_stay_two(tmp_path):
    record = {"question": "Who?", "answer": "Tarn", "extra": 1}
    source = Settings(path=write(tmp_path / "t.jsonl", record, "", record, {"question": "What?", "answer": 42})).build()
    assert len(source) == 3
    assert [source.task(i).id for i in range(3)] == ["1", "3", "4"]
    assert source.task(0).question == source.task(1).question and source.task(0) != source.task(1)
    assert source.task(2).answer == "42" and source.task(0).info["extra"] == 1
    assert source.corpus(source.task(0)) is None
    with pytest.raises(IndexError):
        source.task(3)


def test_fields_are_mapped(tmp_path):
    path = write(tmp_path / "t.jsonl", {"task_id": "x1", "Question": "Q", "Final answer": "A"})
    task = Settings(path=path, question="Question", answer="Final answer", id="task_id").build().task(0)
    assert (task.id, task.question, task.answer) == ("x1", "Q", "A")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no tasks"),
        (["", "  "], "holds no tasks"),
        (['{"question": "q", "answer": "a"}', "{oops"], r"t\.jsonl:2: bad JSON"),
        (["[1]"], r"t\.jsonl:1: a record must be a JSON object"),
        (['{"question": "q"}'], r"t\.jsonl:1: field 'answer' is missing \(fields here: question\)"),
        (['{"question": ["q"], "answer": "a"}'], r"t\.jsonl:1: field 'question' must be text"),
        (['{"question": " ", "answer": "a"}'], r"t\.jsonl:1: field 'question' is empty"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        Settings(path=write(tmp_path / "t.jsonl", *lines)).build()


def test_missing_files_and_repeated_ids(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        Settings(path=tmp_path / "none.jsonl").build()
    record = {"question": "q", "answer": "a", "id": "same"}
    with pytest.raises(DataError, match=r":2: id 'same' is already used in line 1"):
        Settings(path=write(tmp_path / "t.jsonl", record, record), id="id").build()


def test_a_corpus_is_read_and_checked(tmp_path):
    tasks = write(tmp_path / "t.jsonl", {"question": "q", "answer": "a"})
    page = {"url": "u", "title": "T", "text": "x", "links": ["v"]}
    source = Settings(path=tasks, corpus=write(tmp_path / "c.jsonl", page)).build()
    assert source.corpus(source.task(0)).pages["u"].links == ("v",)
    for lines, message in (
        ([page, page], "occurs twice"),
        ([{**page, "links": "v"}], "'links' must be a list"),
        ([{"url": "u"}], "'title' is missing"),
        ([], "holds no pages"),
    ):
        with pytest.raises(DataError, match=message):
            Settings(path=tasks, corpus=write(tmp_path / "c.jsonl", *lines)).build()


def test_other_line_ends_inside_of_texts_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "t.jsonl"
    questions = ["one\u2028two", "one\u0085two", "one\x0ctwo"]
    lines = [json.dumps({"question": text, "answer": "a"}, ensure_ascii=False) for text in questions]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    source = Settings(path=path).build()
    assert [source.task(i).question for i in range(len(source))] == questions


def test_graders(tmp_path):
    path = write(tmp_path / "t.jsonl", {"question": "q", "answer": "1000"})
    gaia, exact = (Settings(path=path, grader=name).build() for name in ("gaia", "exact"))
    assert grade(gaia, answered("1,000")).value == 1.0 and grade(exact, answered("1,000")).value == 0.0
    assert grade(gaia, answered(None)).value == 0.0
    child = answered("1000", TrajectoryId(0, 0, "searcher", 0), Parent(ROOT, 0, 0))
    assert grade(gaia, child).value is None and "subtasks" in grade(gaia, child).cause
    failed = Trajectory(ROOT, "q", (), "failure", failure=Failure("EngineError", "broke"))
    assert grade(gaia, failed).value is None


def test_imported_graders(tmp_path):
    path = write(tmp_path / "t.jsonl", {"question": "q"})
    source = Settings(path=path, answer=None, grader=f"{__name__}:length_grader").build()
    assert grade(source, answered("12345")).value == 0.5
    unknown = grade(source, answered(None))
    assert unknown.value is None and "returned None" in unknown.cause
    with pytest.raises(ConfigError, match="returned 7"):
        grade(Settings(path=path, answer=None, grader=f"{__name__}:out_of_range_grader").build(), answered("a"))


@pytest.mark.parametrize("grader", ["levenshtein", "no_such_module:f", f"{__name__}:missing", ":f"])
def test_graders_that_are_not_there(tmp_path, grader):
    with pytest.raises(ConfigError, match="grader"):
        Settings(path=write(tmp_path / "t.jsonl", {"question": "q", "answer": "a"}), grader=grader).build()


def test_rules_need_gold_answers(tmp_path):
    with pytest.raises(ConfigError, match="gold"):
        Settings(path=write(tmp_path / "t.jsonl", {"question": "q"}), answer=None).build()
