"""metrics.jsonl and summary.json on disk."""

from __future__ import annotations

import json
import resource
from io import StringIO
from pathlib import Path

import pytest
from report_samples import config_of
from rich.console import Console

from mgrpo.errors import DataError, RunFolderError
from mgrpo.report.metrics_log import FILE, MetricsLog, read_metrics
from mgrpo.report.summary import print_summary, summary_of, write_summary


def test_lines_are_there_at_once_and_say_what_they_are(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    log.write("learn", 3, "rl", {"agent": "planner", "loss": 0.5})
    record = json.loads((tmp_path / "run" / FILE).read_text())
    assert record.pop("time") > 1.7e9
    assert record == {"kind": "learn", "step": 3, "stage": "rl", "agent": "planner", "loss": 0.5}
    log.close()


def test_a_step_done_again_counts_once_by_kind_step_and_agent(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (0, 1, 2):
        log.write("collect", step, "rl", {"success": 0.1})
        for agent in ("planner", "searcher"):
            log.write("learn", step, "rl", {"agent": agent, "loss": 1.0})
    log.close()
    resumed = MetricsLog(tmp_path)
    resumed.write("collect", 1, "rl", {"success": 0.2})
    resumed.write("learn", 1, "rl", {"agent": "planner", "loss": 2.0})
    resumed.close()
    records = read_metrics(tmp_path)
    assert [r["success"] for r in records if r["kind"] == "collect"] == [0.1, 0.2, 0.1]
    learned = [(r["step"], r["agent"], r["loss"]) for r in records if r["kind"] == "learn" and r["step"] == 1]
    assert sorted(learned) == [(1, "planner", 2.0), (1, "searcher", 1.0)]
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)


def test_a_line_cut_by_a_kill_is_ignored_and_then_removed(tmp_path: Path) -> None:
    whole = '{"kind": "collect", "step": 0, "success": 0.5}\n'
    (tmp_path / FILE).write_text(whole + '{"kind": "collect", "step": 1, "succ' + "x" * 9000)
    assert [r["step"] for r in read_metrics(tmp_path)] == [0]
    log = MetricsLog(tmp_path)
    log.write("collect", 1, "rl", {"success": 0.6})
    log.close()
    assert [r["success"] for r in read_metrics(tmp_path)] == [0.5, 0.6]


def test_a_file_of_one_cut_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"kind": ')
    MetricsLog(tmp_path).close()
    assert (tmp_path / FILE).read_bytes() == b"" and read_metrics(tmp_path) == []


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"kind": "learn"}', '{"kind": 3, "step": 1}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / FILE).write_text('{"kind": "collect", "step": 0}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"{FILE}:2: "):
        read_metrics(tmp_path)


def test_no_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is .* a run folder"):
        read_metrics(tmp_path)


def test_the_files_of_all_parts_are_one_run(tmp_path: Path) -> None:
    own, part = tmp_path / FILE, tmp_path / "parts" / "learn-a" / FILE
    part.parent.mkdir(parents=True)
    line = '{{"kind": "learn", "agent": "{}", "step": {}, "time": {}, "loss": {}}}\n'.format
    part.write_text(line("a", 0, 10.0, 1) + line("a", 1, 30.0, 2) + '{"kind": "learn", "st')
    assert [r["loss"] for r in read_metrics(tmp_path)] == [1, 2]  # without a file of the run itself
    own.write_text(line("a", 1, 20.0, 3) + line("b", 1, 40.0, 4) + line("a", 0, 50.0, 5))
    assert [r["loss"] for r in read_metrics(tmp_path)] == [5, 2, 4]  # the last by time stays; by step, then by time
    (tmp_path / "parts" / "other").mkdir()
    part.write_text(line("a", 0, 60.0, 6) + line("a", 0, 55.0, 7))  # a clock that was set back
    assert [r["loss"] for r in read_metrics(tmp_path)] == [7, 3, 4]


def test_a_bad_line_of_a_part_names_its_file(tmp_path: Path) -> None:
    part = tmp_path / "parts" / "learn-a" / FILE
    part.parent.mkdir(parents=True)
    part.write_text('{"kind": "learn", "step": 0, "time": "noon"}\n')
    with pytest.raises(DataError, match=rf"learn-a/{FILE}:1: time 'noon' is no number"):
        read_metrics(tmp_path)


def test_what_a_full_disk_refuses_goes_out_when_there_is_room(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("collect", 0, "rl", {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / FILE).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # room for half a line
    try:
        log.write("collect", 1, "rl", {})
        log.write("collect", 2, "rl", {})
        full = [r["step"] for r in read_metrics(tmp_path)], (tmp_path / FILE).stat().st_size
        with pytest.raises(RunFolderError, match="its end could not be written .* make room"):
            MetricsLog.close(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full == ([0], size + 20)
    log = MetricsLog(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        log.write("collect", 3, "rl", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write("collect", 4, "rl", {})
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 3, 4]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("learn", 0, "rl", {"agent": "planner", "grad_norm": float("nan"), "loss": float("inf")})
    log.close()
    (record,) = read_metrics(tmp_path)
    assert record["grad_norm"] is None and record["loss"] is None


SUMMARY = {
    "success_before": 0.07,
    "success_after": 0.725,
    "greedy_before": 0.78,
    "greedy_after": 0.93,
    "sub_answer_before": None,
    "sub_answer_after": 0.96,
    "closed_book": 0.02,
    "calls_per_rollout": 1.87,
    "seconds": 371.2,
    "warmup_seconds": 250.0,
    "rl_seconds": 100.4,
    "seed": 3,
}


def test_summary_is_sorted_json_and_replaces_the_old_one(tmp_path: Path) -> None:
    write_summary(tmp_path, {"a": 1})
    path = write_summary(tmp_path, SUMMARY)
    assert json.loads(path.read_text()) == SUMMARY
    assert list(json.loads(path.read_text())) == sorted(SUMMARY)
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_summary(tmp_path, {"seed": 1})
    with pytest.raises(ValueError):
        write_summary(tmp_path, {"seed": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"seed": 1}


def test_summary_of_a_run_s_metrics() -> None:
    times = iter((100.0, 103.0, 104.0, 104.5, 200.0, 210.0, 212.0, 213.0, 300.0, 301.0, 330.0))

    def record(kind: str, step: int, stage: str, **values: object) -> dict[str, object]:
        return {"kind": kind, "step": step, "stage": stage, "time": next(times), "seconds": 77.0, **values}

    records = [
        record("stage", 0, "warmup", name="warmup"),
        record("collect", 0, "warmup"),  # 3 s
        record("learn", 0, "warmup", agent="planner"),  # 1 s, at the same time as the next
        record("learn", 0, "warmup", agent="searcher"),  # 0.5 s more
        record("stage", 2, "rl", name="rl"),
        record("evaluate", 2, "rl", name="before", success=0.1, sub_answer=None),
        record("collect", 2, "rl"),  # 2 s
        record("learn", 2, "rl", agent="planner"),  # 1 s, then the process was stopped
        record("stage", 3, "rl", name="rl"),
        record("collect", 3, "rl"),  # 1 s
        record("evaluate", 62, "rl", name="after", success=0.6, sub_answer=0.9, calls_per_rollout=1.5),
    ]
    summary = summary_of(records, config_of(seed=4), 42.0)
    assert (summary["warmup_seconds"], summary["rl_seconds"], summary["seconds"]) == (4.5, 4.0, 42.0)
    assert (summary["success_before"], summary["success_after"], summary["seed"]) == (0.1, 0.6, 4)
    assert summary["sub_answer_before"] is None and summary["sub_answer_after"] == 0.9
    assert summary["greedy_before"] is None and summary["closed_book"] is None and summary["calls_per_rollout"] == 1.5


def printed(summary: dict[str, object]) -> str:
    console = Console(file=StringIO(), width=100)
    print_summary(console, summary)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_printed_summary_compares() -> None:
    text = printed(SUMMARY)
    row = next(line for line in text.splitlines() if "sampled" in line)
    assert "7.0 %" in row and "72.5 %" in row and "+65.5" in row
    assert "6:11 in all" in text and "seed 3" in text and "1.87" in text
    unknown = next(line for line in text.splitlines() if "subtasks" in line)
    assert "96.0 %" in unknown and unknown.count(" - ") == 2  # before, and so the change, are unknown


def test_printed_summary_leaves_out_what_is_not_there() -> None:
    text = printed({"success_after": 0.5, "seconds": 1.0})
    assert "subtasks" not in text and "closed" not in text and "50.0 %" in text
