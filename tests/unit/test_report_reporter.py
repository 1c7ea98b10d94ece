"""The reporter: one call of training reaches the log, the alarms, the display and the trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from report_samples import config_of, failed, group_of, rewarded, rollout
from rich.console import Console

from mgrpo.config import Config
from mgrpo.report.metrics_log import Record, read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.types import Failure, Group


class Recorder:
    """A user's tracker, found by its import path."""

    made: list[Recorder] = []

    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise RuntimeError("no tracker today")
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self.made.append(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def console() -> Console:
    return Console(file=StringIO(), width=100)


def text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def lazy_group(step: int, calls: int) -> Group:
    return group_of(*(rollout(index, calls, group=step) for index in range(4)), id=step)


def collect(reporter: Reporter, step: int, calls: int = 2) -> None:
    group = lazy_group(step, calls)
    reporter.collected(step, [group], rewarded(group), seconds=0.5)


def of_kind(folder: Path, kind: str) -> list[Record]:
    return [record for record in read_metrics(folder) if record["kind"] == kind]


def test_a_whole_run_leaves_its_metrics(tmp_path: Path) -> None:
    screen = console()
    with Reporter(tmp_path, config_of(), screen) as reporter:
        reporter.stage("warmup", 2, 0, 62)
        for step in (0, 1):
            collect(reporter, step)
            reporter.learned(step, "planner", step, {"loss": 3.0, "skipped_steps": 0.0}, 0.1)
        reporter.progress("evaluating", 3, 10)
        reporter.evaluated("before", 2, {"success": 0.07, "sub_answer": None})
        reporter.stage("rl", 60, 2, 62)
        collect(reporter, 2)
        reporter.learned(2, "planner", 3, {"loss": 0.1, "grad_norm": 0.4}, 0.1)
    stages = of_kind(tmp_path, "stage")
    assert [(s["name"], s["step"], s["steps"], s["demonstrations"]) for s in stages] == [
        ("warmup", 0, 2, True),
        ("rl", 2, 60, False),
    ]
    collected = of_kind(tmp_path, "collect")
    assert [(c["step"], c["stage"], c["success"], c["seconds"]) for c in collected][-1] == (2, "rl", 1.0, 0.5)
    assert collected[-1]["tokens_per_second"] == collected[-1]["sampled_tokens"] / 0.5
    learned = of_kind(tmp_path, "learn")[-1]
    assert (learned["agent"], learned["from_version"], learned["grad_norm"]) == ("planner", 3, 0.4)
    (evaluated,) = of_kind(tmp_path, "evaluate")
    assert (evaluated["name"], evaluated["success"], evaluated["sub_answer"]) == ("before", 0.07, None)
    assert of_kind(tmp_path, "alarm") == []
    lines = text(screen).splitlines()
    assert "evaluated before: success 0.07  sub_answer -" in lines
    assert any(row.startswith("warmup 2/2") for row in lines)  # always at the end of a stage
    assert any(row.startswith("rl 1/60") for row in lines)


def test_calls_that_collapse_to_zero_ring_once(tmp_path: Path) -> None:
    screen = console()
    with Reporter(tmp_path, config_of(), screen) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 22):
            collect(reporter, step, calls=2 if step < 10 else 0)
    (alarm,) = of_kind(tmp_path, "alarm")
    assert alarm["name"] == "lazy_planner" and alarm["step"] == 11  # two of the last three steps made no call
    assert text(screen).count("warning: step 11: the planner delegates nothing in 67% of rollouts") == 1


def test_demonstrations_and_teams_of_one_ring_nothing(tmp_path: Path) -> None:
    with Reporter(tmp_path / "a", config_of(), console()) as reporter:
        reporter.stage("warmup", 2, 0, 62)
        collect(reporter, 0, calls=0)
    planner = {"role": "planner", "model": {"type": "tiny"}, "format": "compact", "tools": ["search", "visit"]}
    with Reporter(tmp_path / "b", config_of(agents={"planner": planner}), console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 12):
            collect(reporter, step, calls=0)
    assert of_kind(tmp_path / "a", "alarm") == of_kind(tmp_path / "b", "alarm") == []


def test_broken_infrastructure_is_said_counted_and_rings(tmp_path: Path) -> None:
    screen = console()
    with Reporter(tmp_path, config_of(), screen) as reporter:
        reporter.stage("warmup", 2, 0, 62)
        reporter.retried(1, Failure("EngineError", "no [server]"))
        group = group_of(rollout(0, 2), failed(1))
        reporter.collected(0, [group], rewarded(group), seconds=0.5)
        collect(reporter, 1)
    (alarm,) = of_kind(tmp_path, "alarm")
    assert alarm["name"] == "failed_rollouts" and "50% of rollouts fail" in alarm["message"]
    assert [(r["failed_rollouts"], r["retried_groups"]) for r in of_kind(tmp_path, "collect")] == [(1, 1), (0, 0)]
    assert "warning: groups that were cut off and run again: 1; EngineError: no [server]" in text(screen)


def learn(reporter: Reporter, step: int, masses: Mapping[str, Mapping[int, float]], **metrics: float) -> None:
    """Every agent's update of ``step``, with its gradient mass by invocation."""
    for agent, own in masses.items():
        by_call = {f"gradient_mass/{index}": mass for index, mass in own.items()}
        values = {"rows": 8.0, "gradient_mass": sum(own.values()), "logprob_abs_diff": 1e-7, **by_call, **metrics}
        reporter.learned(step, agent, step, values, 0.1)


HEALTHY = {"planner": {0: 0.8}, "searcher": {0: 0.5, 1: 0.3}}


def test_a_healthy_run_rings_nothing(tmp_path: Path) -> None:
    with Reporter(tmp_path, config_of(), console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 42):
            if step % 10 == 2 and step > 2:
                reporter.evaluated("dev", step, {"success": 0.1 + step / 50})
            collect(reporter, step)
            rises = min(0.95, 0.2 + step / 40)
            learn(reporter, step, HEALTHY, entropy=0.3 * 0.92**step, reward_mean=rises)
    assert of_kind(tmp_path, "alarm") == []


@pytest.mark.parametrize(
    ("masses", "metrics", "names"),
    [
        ({"planner": {0: 0.05}, "searcher": {0: 0.6, 1: 0.4}}, {}, ["gradient_capture"]),
        ({"planner": {0: 0.8}, "searcher": {0: 0.79, 1: 0.01}}, {}, ["call_capture/searcher"]),
        (HEALTHY, {"rollout_kl": 0.2}, ["logprob_mismatch/planner", "logprob_mismatch/searcher"]),
    ],
)
def test_faults_of_learning_ring_once_each(
    tmp_path: Path, masses: Any, metrics: dict[str, float], names: list[str]
) -> None:
    screen = console()
    with Reporter(tmp_path, config_of(), screen) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 20):
            collect(reporter, step)
            learn(reporter, step, masses if step > 10 else HEALTHY, **(metrics if step > 10 else {}))
    alarms = of_kind(tmp_path, "alarm")
    assert [alarm["name"] for alarm in alarms] == names and all(alarm["step"] > 10 for alarm in alarms)
    assert all(text(screen).count(f"warning: step {alarm['step']}: {alarm['message']}") == 1 for alarm in alarms)


def test_entropy_that_collapses_and_a_flat_held_out_score_ring(tmp_path: Path) -> None:
    with Reporter(tmp_path, config_of(), console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 30):
            if step % 7 == 2 and step > 2:
                reporter.evaluated("dev", step, {"success": 0.3})
            group = group_of(*(rollout(i, 2, "Merova" if 4 * i < step // 2 else "Tarn", group=step) for i in range(4)))
            reporter.collected(step, [group], rewarded(group), 0.5)
            learn(reporter, step, HEALTHY, entropy=0.3 if step < 9 else 0.001, reward_mean=0.5)
    names = [alarm["name"] for alarm in of_kind(tmp_path, "alarm")]
    assert names == ["entropy_collapse/planner", "entropy_collapse/searcher", "flat_held_out"]


def test_a_capture_is_not_told_before_every_agent_that_learns_has_told(tmp_path: Path) -> None:
    with Reporter(tmp_path, config_of(), console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 12):
            learn(reporter, step, {"planner": {0: 0.8}})
        assert of_kind(tmp_path, "alarm") == []
        for step in range(2, 12):
            learn(reporter, step, {"searcher": {0: 0.01}})
    assert [alarm["name"] for alarm in of_kind(tmp_path, "alarm")] == ["gradient_capture"]


def test_demonstrations_ring_nothing_of_learning(tmp_path: Path) -> None:
    with Reporter(tmp_path, config_of(), console()) as reporter:
        reporter.stage("warmup", 2, 0, 62)
        for step in range(20):
            learn(
                reporter, step, {"planner": {0: 0.01}, "searcher": {0: 1.0}}, entropy=6.7 * 0.3**step, reward_mean=0.1
            )
    assert of_kind(tmp_path, "alarm") == []


def test_a_sub_agent_that_nobody_calls_any_more_rings(tmp_path: Path) -> None:
    tiny = {"model": {"type": "tiny"}, "format": "compact"}
    reads = {"role": "subagent", "tools": ["search", "visit"], **tiny}
    planner = {"role": "planner", "tools": ["searcher", "comparer"], **tiny}
    config = config_of(agents={"planner": planner, "searcher": reads, "comparer": reads})
    with Reporter(tmp_path, config, console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 12):
            members = [rollout(index, 2, group=step) for index in range(4)]
            if step < 6:
                own = [replace(m.trajectories[2], id=replace(m.root.id, agent="comparer")) for m in members]
                members = [replace(m, trajectories=(*m.trajectories[:2], t)) for m, t in zip(members, own, strict=True)]
            reporter.collected(step, [group_of(*members, id=step)], {}, 0.5)
    (alarm,) = of_kind(tmp_path, "alarm")
    assert alarm["name"] == "idle_agent/comparer" and alarm["step"] == 8


def test_counts_of_collecting_are_written_with_the_step(tmp_path: Path) -> None:
    with Reporter(tmp_path, config_of(), console(), quiet=True) as reporter:
        reporter.stage("rl", 60, 2, 62)
        group = lazy_group(2, 1)
        reporter.collected(2, [group], rewarded(group), 0.5, {"replaced_groups": 3.0, "judge_cost": 0.02})
    (record,) = of_kind(tmp_path, "collect")
    assert (record["replaced_groups"], record["judge_cost"], record["groups"]) == (3.0, 0.02, 1)


def test_the_header_says_what_is_compared_and_descended_unless_quiet(tmp_path: Path) -> None:
    loud, quiet = console(), console()
    for screen, folder in ((loud, "a"), (quiet, "b")):
        with Reporter(tmp_path / folder, config_of(), screen, quiet=screen is quiet):
            pass
    assert text(loud).startswith("sample: preset m_grpo, seed 0") and text(loud).count("(equation 13)") == 1
    assert "loss = - sum of c min(r A, clip(r, 0.8, 1.2) A)" in text(loud) and text(quiet) == ""


def test_long_work_is_shown_and_short_work_is_not(tmp_path: Path) -> None:
    now, screen = [0.0], console()
    with Reporter(tmp_path, config_of(), screen, clock=lambda: now[0]) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for done in range(1, 10):
            now[0] += 1.0
            reporter.progress("evaluating before", done, 10)
    said = [row for row in text(screen).splitlines() if row.startswith("evaluating")]
    assert said[0].startswith("evaluating before 3/10  left")


def test_skipped_steps_ring_for_their_agent(tmp_path: Path) -> None:
    with Reporter(tmp_path, config_of(), console(), quiet=True) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 6):
            reporter.learned(step, "searcher", 1, {"grad_norm": float("nan"), "skipped_steps": 1.0}, 0.1)
    (alarm,) = of_kind(tmp_path, "alarm")
    assert alarm["name"] == "skipped_steps/searcher" and alarm["step"] == 2


def test_after_a_resume_alarms_know_how_the_stage_began(tmp_path: Path) -> None:
    config = config_of()
    with Reporter(tmp_path, config, console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(2, 10):
            collect(reporter, step, calls=5)
    with Reporter(tmp_path, config, console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        for step in range(7, 12):  # 7 to 9 are collected again
            collect(reporter, step, calls=1)
    (alarm,) = of_kind(tmp_path, "alarm")
    assert alarm["step"] == 9 and "1.00 calls per rollout, 5.00 at the start" in alarm["message"]
    assert [r["calls_per_rollout"] for r in of_kind(tmp_path, "collect")] == [5.0] * 5 + [1.0] * 5


def test_examples_and_the_end_of_a_run(tmp_path: Path) -> None:
    screen = console()
    with Reporter(tmp_path, config_of(), screen) as reporter:
        reporter.stage("rl", 60, 2, 62)
        collect(reporter, 2)
        reporter.evaluated("after", 62, {"success": 0.625, "calls_per_rollout": 2.0})
        group = lazy_group(2, 2)
        reporter.example("after", group, rewarded(group))
        summary = reporter.finish(12.0)
    assert summary["success_after"] == 0.625 and json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    said = text(screen)
    assert "example after training" in said and "-> searcher: capital of country 1" in said
    assert "62.5 %" in said and "0:12 in all" in said
    assert said.count("rl 0/60") == 2  # at its beginning and, once, at its end


def with_tracker(**options: Any) -> Config:
    return config_of(trackers=[{"type": f"{__name__}:Recorder", **options}])


def test_trackers_get_flat_numbers_and_are_closed(tmp_path: Path) -> None:
    with Reporter(tmp_path, with_tracker(), console(), quiet=True) as reporter:
        tracker = Recorder.made[-1]
        reporter.stage("rl", 60, 2, 62)
        collect(reporter, 2)
        reporter.learned(2, "planner", 3, {"loss": 0.25}, 0.1)
        reporter.evaluated("dev", 2, {"success": 0.5, "sub_answer": None})
    assert tracker.closed
    names = {name: value for step, values in tracker.logged for name, value in values.items() if step == 2}
    assert names["collect/success"] == 1.0 and names["learn/planner/loss"] == 0.25
    assert names["evaluate/dev/success"] == 0.5 and "evaluate/dev/sub_answer" not in names


def test_what_was_opened_is_closed_when_a_later_tracker_fails(tmp_path: Path) -> None:
    path = f"{__name__}:Recorder"
    config = config_of(trackers=[{"type": path}, {"type": path, "fail": True}])
    with pytest.raises(RuntimeError, match="no tracker today"), Reporter(tmp_path, config, console()):
        pass
    assert Recorder.made[-1].closed


def test_an_error_inside_passes_through_and_closes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Reporter(tmp_path, with_tracker(), console()) as reporter:
        reporter.stage("rl", 60, 2, 62)
        raise KeyboardInterrupt
    assert Recorder.made[-1].closed
