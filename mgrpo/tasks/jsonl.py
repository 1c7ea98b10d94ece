"""Tasks from a user's JSONL file, with an optional JSONL corpus and a choice of grader."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from mgrpo.config.vocabulary import pieces
from mgrpo.errors import ConfigError, DataError
from mgrpo.tasks.grading import exact_match, gaia_score
from mgrpo.types import Corpus, Grade, Page, Task, Trajectory
from mgrpo.worlds.vocabulary import common_words

GradeTrajectory = Callable[[Task, Trajectory], float | None]  # in [0, 1]; None is unknown


class Settings(BaseModel, extra="forbid"):
    """``question``, ``answer`` and ``id`` name fields of a record; without ``id`` a task is named by its line.

    ``answer`` set to null reads tasks without gold answers, for a grader that needs none. ``corpus`` is a JSONL file
    of pages {url, title, text, links}. ``grader`` is "gaia", "exact" or an import path "module:function" of a
    function (task, trajectory) -> float | None.
    """

    type: Literal["jsonl"] = "jsonl"
    path: Path
    question: str = "question"
    answer: str | None = "answer"
    id: str | None = None
    corpus: Path | None = None
    grader: str = "gaia"

    def vocabulary(self) -> list[str]:
        """Every word of questions, answers and pages, for tiny models: what else is asked, they cannot read."""
        texts = [text for task in _read_tasks(self) for text in (task.question, task.answer or "")]
        pages = {} if self.corpus is None else _read_corpus(self.corpus).pages
        texts += [text for page in pages.values() for text in (page.url, page.title, page.text)]
        return sorted(common_words().union(*map(pieces, texts)))

    def build(self, seed: int = 0) -> JsonlSource:
        """Reads the files at once. Raises DataError naming file and line, ConfigError for the grader."""
        if self.answer is None and self.grader in _RULES:
            raise ConfigError(f"grader {self.grader!r} needs gold answers: name the answer field or another grader")
        return JsonlSource(_read_tasks(self), None if self.corpus is None else _read_corpus(self.corpus), self.grader)


class JsonlSource:
    """Tasks in the order of the file. Two records with the same text are two tasks."""

    def __init__(self, tasks: list[Task], corpus: Corpus | None, grader: str) -> None:
        self._tasks = tasks
        self._corpus = corpus
        self._grader = grader
        self._grade = _grader(grader)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        if not 0 <= index < len(self._tasks):
            raise IndexError(f"task {index}: choose 0 to {len(self._tasks) - 1}")
        return self._tasks[index]

    def corpus(self, task: Task) -> Corpus | None:
        return self._corpus

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        """The root's answer, or whatever the imported function makes of a trajectory. Rules cannot grade subtasks."""
        if trajectory.failure is not None:
            return Grade(None, f"{trajectory.failure.kind}: {trajectory.failure.message}", self._grader)
        if trajectory.parent is not None and self._grader in _RULES:
            return Grade(None, "a task file holds no gold answers of subtasks", self._grader)
        value = self._grade(task, trajectory)
        if value is None:
            return Grade(None, f"grader {self._grader} returned None", self._grader)
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"grader {self._grader} returned {value} for {trajectory.id}: return 0 to 1, or None")
        return Grade(float(value), grader=self._grader)


# ---------------------------------------------------------------- graders


def _by_rule(rule: Callable[[str, str | None], bool]) -> GradeTrajectory:
    def grade(task: Task, trajectory: Trajectory) -> float | None:
        if task.answer is None:
            return None
        return float(trajectory.answer is not None and rule(task.answer, trajectory.answer.answer))

    return grade


_RULES: Mapping[str, GradeTrajectory] = {"gaia": _by_rule(gaia_score), "exact": _by_rule(exact_match)}


def _grader(name: str) -> GradeTrajectory:
    if name in _RULES:
        return _RULES[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f'grader = "{name}": choose "gaia", "exact" or an import path "module:function"')
    try:
        found: GradeTrajectory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'grader = "{name}" cannot be imported: {error}') from error
    return found


# ---------------------------------------------------------------- files


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, record) of every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON text may hold other line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give a UTF-8 JSONL file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: bad JSON ({error.msg}, column {error.colno})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: a record must be a JSON object, not {type(record).__name__}")
        yield number, record


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    """The field as text; numbers are written as Python writes them."""
    if field not in record:
        known = ", ".join(sorted(record)) or "none"
        raise DataError(f"{where}: field {field!r} is missing (fields here: {known}); map the fields in the settings")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: field {field!r} must be text or a number, not {type(value).__name__}")
    return str(value)


def _read_tasks(settings: Settings) -> list[Task]:
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, record in _records(settings.path):
        where = f"{settings.path}:{number}"
        id = str(number) if settings.id is None else _text(record, settings.id, where)
        if id in lines:
            raise DataError(f"{where}: id {id!r} is already used in line {lines[id]}; ids must differ")
        lines[id] = number
        answer = None if settings.answer is None else _text(record, settings.answer, where)
        question = _text(record, settings.question, where)
        if not question.strip():
            raise DataError(f"{where}: field {settings.question!r} is empty")
        tasks.append(Task(id, question, answer, info=record))
    if not tasks:
        raise DataError(f"{settings.path}: holds no tasks; give at least one JSON object, one a line")
    return tasks


def _read_corpus(path: Path) -> Corpus:
    pages: dict[str, Page] = {}
    for number, record in _records(path):
        where = f"{path}:{number}"
        url, title, text = (_text(record, field, where) for field in ("url", "title", "text"))
        links = record.get("links", [])
        if not isinstance(links, list) or not all(isinstance(link, str) for link in links):
            raise DataError(f"{where}: field 'links' must be a list of URLs")
        if url in pages:
            raise DataError(f"{where}: url {url!r} occurs twice")
        pages[url] = Page(url, title, text, tuple(links))
    if not pages:
        raise DataError(f"{path}: holds no pages; give at least one JSON object, one a line")
    return Corpus(f"jsonl-{path.resolve()}", pages)
