"""What the processes of a run write, read while they write it, and shown in one place."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import config_of, group_of, rewarded, rollout
from rich.console import Console

from mgrpo.errors import StoreUnavailable
from mgrpo.report.board import Board, PartLine
from mgrpo.report.display import panel
from mgrpo.report.follow import Follower, last_lines, last_written
from mgrpo.report.metrics_log import FILE, MetricsLog, Record
from mgrpo.report.parts import Announced, PartEvent, PartsView
from mgrpo.report.reporter import Reporter


def append(path: Path, *records: Record | str) -> None:
    """Records as lines; text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records)


def collect(step: int, time: float = 0.0, **values: object) -> Record:
    return {"kind": "collect", "step": step, "stage": "rl", "time": time, **values}


def learn(step: int, agent: str, time: float = 0.0, **values: object) -> Record:
    return {"kind": "learn", "step": step, "stage": "rl", "time": time, "agent": agent, **values}


def stage(name: str, first: int, steps: int, time: float = 0.0, demonstrations: bool = False) -> Record:
    shape = {"name": name, "steps": steps, "total_steps": 62, "demonstrations": demonstrations}
    return {"kind": "stage", "step": first, "stage": name, "time": time, **shape}


def steps(records: Sequence[Record]) -> list[int]:
    return [record["step"] for record in records]


# ---------------------------------------------------------------- files


def test_every_file_is_followed_as_it_appears_and_grows(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.records() == []
    own, first, late = tmp_path / FILE, tmp_path / "parts/collect-0" / FILE, tmp_path / "parts/learn-a" / FILE
    append(own, collect(0, 1.0))
    append(first, collect(2, 3.0), collect(3, 4.0))
    assert steps(follower.records()) == [0, 2, 3] and follower.records() == []
    append(late, learn(1, "a", 2.0), learn(9, "a", 9.0))
    append(first, collect(4, 5.0))
    assert steps(follower.records()) == [1, 4, 9]  # by time over all that is new


def test_a_line_comes_when_it_is_whole_and_what_is_no_record_never_does(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), tmp_path / "parts/collect-0" / FILE
    append(path, collect(0), '{"kind": "collect", "st')
    assert steps(follower.records()) == [0] and follower.records() == []
    append(path, 'ep": 1}\n', "not json\n", '{"kind": "collect"}\n', collect(2))
    assert steps(follower.records()) == [1, 2]


def test_a_part_that_starts_again_after_half_a_line_is_followed_on(tmp_path: Path) -> None:
    follower, home = Follower(tmp_path), tmp_path / "parts/collect-0"
    append(home / FILE, collect(0), '{"kind": "collect", "step": 1, "succ')
    assert steps(follower.records()) == [0]
    log = MetricsLog(home)
    log.write("collect", 1, "rl", {})
    log.close()
    assert steps(follower.records()) == [1]


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_from_its_start(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), tmp_path / FILE
    append(path, collect(0), collect(1))
    follower.records()
    path.write_text("")
    append(path, collect(5))
    assert steps(follower.records()) == [5]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12), st.integers(0, 8))
def test_however_a_file_grows_each_record_comes_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], count: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    data = b"".join(json.dumps(collect(step)).encode() + b"\n" for step in range(count))
    follower, found, position = Follower(folder), [], 0
    with (folder / FILE).open("ab", buffering=0) as file:
        for size in [*cuts, len(data)]:
            file.write(data[position : position + size])
            position += size
            found += steps(follower.records())
    assert found == list(range(count))


def test_the_last_lines_of_a_log_are_plain_text(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert last_lines(log) == []
    log.write_bytes(b"x" * 9000 + b"\nold\n\x1b[31mred\x07\n\xff\n   \n\n")
    assert last_lines(log)[:3] == ["\ufffd", "[31mred", "old"] and last_lines(log, log.stat().st_size) == []
    assert all(len(line) <= 300 for line in last_lines(log))
    assert last_written(tmp_path) == log.stat().st_mtime and last_written(tmp_path / "none") is None


# ---------------------------------------------------------------- the picture


def screen() -> Console:
    return Console(file=StringIO(), width=100)


def text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


class Picture(Reporter):
    """A reporter that says what its panel shows."""

    @property
    def board(self) -> Board:
        return self._board


def test_the_board_is_the_one_that_a_single_process_would_show(tmp_path: Path) -> None:
    """Everything that one process tells, split over the files of two, gives the same board."""
    with Picture(tmp_path / "one", config_of(), screen()) as one:
        one.stage("rl", 60, 2, 62)
        for step in range(2, 9):
            group = group_of(*(rollout(index, 2, group=step) for index in range(4)), id=step)
            one.collected(step, [group], rewarded(group), 0.5)
            for agent, mass in (("planner", 0.8), ("searcher", 0.2)):
                one.learned(step, agent, step, {"rows": 4.0, "entropy": 0.5, "gradient_mass": mass}, 0.1)
        one.evaluated("dev", 9, {"success": 0.5})
    lines = (tmp_path / "one" / FILE).read_text().splitlines(keepends=True)
    learned = [line for line in lines if '"learn"' in line]
    append(tmp_path / "two/parts/collect-0" / FILE, *(line for line in lines if line not in learned))
    append(tmp_path / "two/parts/learn-0" / FILE, *learned)
    with Picture(tmp_path / "two", config_of(), screen()) as two:
        for record in Follower(tmp_path / "two").records():
            two.hear(record)
    told = [(board.done, board.successes, board.shares, board.evaluations) for board in (one.board, two.board)]
    assert told[0] == told[1] == (7, (1.0,) * 7, {"planner": 0.8, "searcher": 0.2}, {"dev": 0.5})
    assert two.board.agents["searcher"]["entropy"] == 0.5 and two.board.team["reward/planner"] == 1.0


def test_stages_told_by_every_part_begin_once_and_never_go_back(tmp_path: Path) -> None:
    with Picture(tmp_path, config_of(), screen()) as picture:
        append(tmp_path / "parts/learn-a" / FILE, stage("warmup", 0, 2))
        picture.hear(stage("warmup", 0, 2))
        picture.hear(learn(0, "planner"))
        picture.hear(stage("warmup", 0, 2))
        assert picture.board.done == 1
        picture.hear(stage("rl", 2, 60))
        picture.hear(stage("warmup", 0, 2))
        picture.hear(learn(1, "planner"))  # late
        assert (picture.board.stage, picture.board.done, picture.board.done_before) == ("rl", 0, 0)


def test_what_was_there_before_is_shown_but_is_no_news(tmp_path: Path) -> None:
    """A run that is launched again: no pace and no alarms from before, and nothing is printed twice."""
    path = tmp_path / "parts/collect-0" / FILE
    append(path, stage("rl", 2, 60, 1.0), *(collect(step, step, success=0.5) for step in range(2, 12)))
    append(path, *(learn(step, "planner", 99.0, skipped_steps=1.0) for step in range(2, 12)))
    append(path, {"kind": "evaluate", "step": 12, "stage": "rl", "time": 100.0, "name": "dev", "success": 0.25})
    console = screen()
    with Picture(tmp_path, config_of(), console) as picture:
        before = len(text(console))
        PartsView(tmp_path, picture, lambda: ())
        board = picture.board
        assert (board.stage, board.done, board.done_before, board.evaluations) == ("rl", 10, 10, {"dev": 0.25})
        assert board.seconds_left(board.stage_started + 5.0) is None and not board.alarms
        assert text(console)[before:] == ""


def test_alarms_come_from_what_all_parts_wrote(tmp_path: Path) -> None:
    """Two learners, neither of which can know that one of them has nearly all of the gradient."""
    console = screen()
    with Picture(tmp_path, config_of(), console) as picture:
        view = PartsView(tmp_path, picture, lambda: ())
        append(tmp_path / "parts/collect-0" / FILE, stage("rl", 2, 60, 1.0))
        for agent, mass in (("planner", 0.97), ("searcher", 0.03)):
            own = (learn(step, agent, step, rows=4.0, gradient_mass=mass) for step in range(2, 12))
            append(tmp_path / f"parts/learn-{agent}" / FILE, *own)
        view.look()
        view.look()
    assert [alarm.name for alarm in picture.board.alarms] == ["gradient_capture"]
    (written,) = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert written["name"] == "gradient_capture" and text(console).count("planner has 97%") == 1


def test_parts_are_shown_with_what_happened_to_them_and_what_they_say(tmp_path: Path) -> None:
    announced: list[Announced] = [
        ("serve-a-0", "engine", "a", 3, "version 4 could not be loaded: damaged"),
        ("collect-far", "collect", "", -1, ""),
    ]
    append(tmp_path / "parts/collect-0/log.txt", "evaluating before 5/20  left 0:30\n", "---- restart 1\n")
    with Picture(tmp_path, config_of(), screen()) as picture, PartsView(tmp_path, picture, lambda: announced) as view:
        for name, pid in (("serve-a-0", 70), ("collect-0", 71)):
            view.on_event(PartEvent(name, "start", pid))
        view.on_event(PartEvent("serve-a-0", "death", 70, -9, "SIGKILL: loading", 2.0))
        waits = {part.name: part for part in picture.board.parts}["serve-a-0"]
        view.on_event(PartEvent("serve-a-0", "restart", 72))
        view.on_event(PartEvent("collect-0", "complete", 71, 0))
        parts = _until_shown(view, picture, "collect-far")
    assert waits.state in ("starts in 1 s", "starts in 2 s") and waits.pid is None
    serve, collects = parts["serve-a-0"], parts["collect-0"]
    assert (serve.state, serve.pid, serve.restarts, serve.died) == ("running", 72, 1, "SIGKILL: loading")
    assert (serve.version, serve.says) == (3, "version 4 could not be loaded: damaged")
    assert (collects.state, collects.says) == ("complete", "evaluating before 5/20  left 0:30")
    assert parts["collect-far"].state == "elsewhere" and parts["collect-far"].version is None


def test_a_store_that_is_away_is_shown_and_ends_nothing(tmp_path: Path) -> None:
    def ask() -> list[Announced]:
        raise StoreUnavailable("no connection to db")

    with Picture(tmp_path, config_of(), screen()) as picture, PartsView(tmp_path, picture, ask) as view:
        parts = _until_shown(view, picture, "store")
    assert (parts["store"].state, parts["store"].says) == ("away", "no connection to db")


def _until_shown(view: PartsView, picture: Picture, name: str) -> dict[str, PartLine]:
    deadline = time.monotonic() + 10
    while name not in (parts := {part.name: part for part in picture.board.parts}):
        assert time.monotonic() < deadline, parts
        view.look()
        time.sleep(0.01)
    return parts


def test_the_panel_has_a_line_for_every_part_and_one_for_a_death(tmp_path: Path) -> None:
    parts = (
        PartLine("serve-planner-0", "running", 4711, 12, 3.0, "serves planner [bold] at http://127.0.0.1:40001"),
        PartLine("collect-0", "starts in 2 s", None, None, None, "x" * 200, 3, "SIGKILL: evaluating 5/20"),
    )
    board = Board("demo", 0.0, parts=parts).staged("rl", 80, 0, 80, False, 0.0)
    console = Console(file=StringIO(), width=80)
    console.print(panel(board, 1.0))
    lines = text(console).splitlines()
    assert all(len(line) <= 80 for line in lines)
    serve = next(line for line in lines if "serve-planner-0" in line)
    assert serve.split()[1:7] == ["serve-planner-0", "4711", "running", "12", "0:03", "serves"]
    assert any("starts in 2 s" in line and "xxx…" in line for line in lines)
    assert any("collect-0: 3 restarts, last died by SIGKILL: evaluating 5/20" in line for line in lines)
