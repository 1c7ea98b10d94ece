"""The supervisor of parts: real processes, real signals, and nothing left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from report_samples import config_of
from rich.console import Console

from mgrpo import launch as launching
from mgrpo.errors import InfrastructureError, RunFolderError, UserError
from mgrpo.launch import PartPlan, launch, part_plans, supervise
from mgrpo.report.parts import PartEvent

# Every life writes its number and its process to a file: "1 4711". What it does then is the test's.
PROLOGUE = """
import os, signal, subprocess, sys, time
from pathlib import Path
name, home = sys.argv[1], Path(sys.argv[2])
lives = home / f"{name}.lives"
life = len(lives.read_text().splitlines()) + 1 if lives.exists() else 1
def ready(*more):
    with lives.open("a") as file:
        file.write(" ".join(map(str, (life, os.getpid(), *more))) + "\\n")
"""
STAYS = "ready(); time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)"
PARENT = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); ready(child.pid);"


def part(home: Path, name: str, body: str, kind: launching.Kind = "collect") -> PartPlan:
    program = home / f"{name}.py"
    program.write_text(PROLOGUE + body + "\n")
    return PartPlan(name, (sys.executable, str(program), name, str(home)), kind)


def run(home: Path, *plans: PartPlan, **options: Any) -> int:
    """Supervise in this process; restarts come quickly."""
    settings = {"max_restarts": 3, "restart_window_s": 60.0, "first_delay_s": 0.01, "grace_s": 20.0, **options}
    return asyncio.run(asyncio.wait_for(supervise(plans, home / "run", **settings), 60))


def lives(home: Path, name: str) -> list[list[int]]:
    """Of every life its number, its process and those it started."""
    path = home / f"{name}.lives"
    return [[int(n) for n in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def processes(home: Path) -> list[int]:
    return [pid for path in home.glob("*.lives") for _, *pids in lives(home, path.stem) for pid in pids]


def runs(pid: int) -> bool:
    """Whether there is such a process; one that only waits to be buried is none."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def wait_until(true: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


def all_gone(home: Path) -> bool:
    return not any(map(runs, processes(home)))


def events(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "run" / "parts" / "events.jsonl").read_text().splitlines()]


def happened(home: Path, name: str) -> list[str]:
    return [event["event"] for event in events(home) if event["part"] == name]


# ---------------------------------------------------------------- restarts


def test_a_killed_part_starts_again_and_the_run_ends_when_its_workers_have(tmp_path: Path) -> None:
    killed = "print('at work', flush=True); ready(); life == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    plans = part(tmp_path, "collect-0", killed), part(tmp_path, "serve-a-0", STAYS, "engine")
    assert run(tmp_path, *plans) == 0
    assert [life for life, _ in lives(tmp_path, "collect-0")] == [1, 2] and all_gone(tmp_path)
    assert happened(tmp_path, "collect-0") == ["start", "death", "restart", "complete"]
    assert happened(tmp_path, "serve-a-0") == ["start", "stop", "stopped"]
    death = next(event for event in events(tmp_path) if event["event"] == "death")
    assert (death["code"], death["reason"], death["again_in_s"]) == (-signal.SIGKILL, "SIGKILL: at work", 0.01)
    assert death["pid"] == lives(tmp_path, "collect-0")[0][1] and death["time"] > 1.7e9


def test_a_crash_loop_is_bounded_and_says_which_part_how_often_why_and_where(tmp_path: Path) -> None:
    broken = "ready(); print('loading'); sys.exit('no room on the device')"
    plans = part(tmp_path, "learn-a", broken, "learn"), part(tmp_path, "tools-0", STAYS, "tools")
    with pytest.raises(InfrastructureError) as caught:
        run(tmp_path, *plans, max_restarts=2)
    log = tmp_path / "run" / "parts" / "learn-a" / "log.txt"
    expected = "learn-a died 3 times within 60 s, the last time by exit code 1: no room on the device"
    assert str(caught.value) == f"{expected}; its log: {log}"
    assert len(lives(tmp_path, "learn-a")) == 3 and all_gone(tmp_path)
    delays = [event.get("again_in_s") for event in events(tmp_path) if event["event"] == "death"]
    assert delays == [0.01, 0.02, None]


def test_deaths_long_ago_do_not_count(tmp_path: Path) -> None:
    plan = part(tmp_path, "collect-0", "ready(); time.sleep(0.05); sys.exit(life < 5)")
    assert run(tmp_path, plan, max_restarts=1, restart_window_s=0.01) == 0
    assert len(lives(tmp_path, "collect-0")) == 5


def test_the_delay_doubles_up_to_a_limit() -> None:
    policy = launching._Policy(5, 300.0, 0.5, 10.0)
    assert [policy.delay(deaths) for deaths in (1, 2, 3, 5, 6, 5000)] == [0.5, 1.0, 2.0, 8.0, 10.0, 10.0]


def test_the_user_s_mistake_stops_everything_at_once_with_the_part_s_own_line(tmp_path: Path) -> None:
    mistaken = "ready(); print('error: agents.planner.model: no folder there'); print('bye'); sys.exit(2)"
    plans = part(tmp_path, "serve-a-0", mistaken, "engine"), part(tmp_path, "collect-0", STAYS)
    with pytest.raises(UserError, match=r"^serve-a-0: agents.planner.model: no folder there$"):
        run(tmp_path, *plans)
    assert len(lives(tmp_path, "serve-a-0")) == 1 and all_gone(tmp_path)


def test_a_server_that_ends_early_is_started_again(tmp_path: Path) -> None:
    engine = part(tmp_path, "serve-a-0", "ready(); life > 1 and time.sleep(600)", "engine")
    worker = part(
        tmp_path, "collect-0", "while not (home / 'serve-a-0.lives').read_text().count('\\n') > 1: time.sleep(0.02)"
    )
    (tmp_path / "serve-a-0.lives").touch()
    assert run(tmp_path, engine, worker) == 0
    assert happened(tmp_path, "serve-a-0") == ["start", "death", "restart", "stop", "stopped"]


def test_a_part_that_dies_takes_its_children_along(tmp_path: Path) -> None:
    body = f"if life == 1:\n    {PARENT} os.kill(os.getpid(), signal.SIGKILL)\n"
    assert run(tmp_path, part(tmp_path, "collect-0", body)) == 0
    (first,) = lives(tmp_path, "collect-0")
    wait_until(lambda: not runs(first[2]), "the child of the killed part to end")


def test_a_program_that_is_not_there_is_a_death_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"collect-0 died once, the last time by exit code 127: .*not found"):
        run(tmp_path, PartPlan("collect-0", ("/no/such/program",), "collect"), max_restarts=0)


def test_output_goes_to_the_log_life_by_life_and_input_is_empty(tmp_path: Path) -> None:
    talks = "print('out', repr(sys.stdin.read())); print('err', file=sys.stderr); sys.exit(life < 2)"
    run(tmp_path, part(tmp_path, "collect-0", "ready(); " + talks))
    log = (tmp_path / "run" / "parts" / "collect-0" / "log.txt").read_text().splitlines()
    headers = [line for line in log if line.startswith("---- ")]
    assert [" start of collect-0: " in headers[0], " restart 1 of collect-0: " in headers[1]] == [True, True]
    assert sorted(line for line in log if line not in headers) == ["err", "err", "out ''", "out ''"]


def test_parts_get_the_environment_that_is_given(tmp_path: Path) -> None:
    plan = part(tmp_path, "collect-0", "sys.exit(os.environ['GREETING'] != 'hello there')")
    assert run(tmp_path, plan, environment={**os.environ, "GREETING": "hello there"}, max_restarts=0) == 0


# ---------------------------------------------------------------- stopping


def test_a_part_that_ignores_being_asked_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = part(tmp_path, "serve-a-0", DEAF, "engine")
    waits = "while not (home / 'serve-a-0.lives').exists(): time.sleep(0.02)"
    assert run(tmp_path, deaf, part(tmp_path, "collect-0", waits), grace_s=0.2) == 0
    assert all_gone(tmp_path)
    assert events(tmp_path)[-1]["reason"] == "SIGKILL"


def test_a_part_may_stop_cleanly(tmp_path: Path) -> None:
    polite = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0))); ready(); time.sleep(600)"
    waits = "while not (home / 'serve-a-0.lives').exists(): time.sleep(0.02)"
    run(tmp_path, part(tmp_path, "serve-a-0", polite, "engine"), part(tmp_path, "collect-0", waits))
    assert (tmp_path / "run/parts/serve-a-0/log.txt").read_text().endswith("saved\n")
    assert events(tmp_path)[-1]["reason"] == "exit code 0"


def test_a_supervisor_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    def break_down(event: PartEvent) -> None:
        if event.part == "collect-1":
            wait_until(lambda: len(processes(tmp_path)) == 2, "the first part and its child")
            raise ZeroDivisionError

    plans = part(tmp_path, "collect-0", PARENT + "time.sleep(600)"), part(tmp_path, "collect-1", "time.sleep(600)")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, *plans, on_event=break_down)
    wait_until(lambda: all_gone(tmp_path), "all parts to end")


def test_two_supervisors_of_one_run_are_refused(tmp_path: Path) -> None:
    with launching._alone(tmp_path / "run"), pytest.raises(RunFolderError, match="another `mgrpo launch`"):
        run(tmp_path, part(tmp_path, "collect-0", STAYS))
    assert not processes(tmp_path)


# ---------------------------------------------------------------- signals to the supervisor

SUPERVISOR = """
import asyncio, json, sys
from pathlib import Path
from mgrpo.launch import PartPlan, supervise
plans = [PartPlan(name, tuple(argv), kind) for name, argv, kind in json.loads(sys.argv[2])]
sys.exit(asyncio.run(supervise(
    plans, Path(sys.argv[1]), max_restarts=3, restart_window_s=60.0, grace_s=float(sys.argv[3]))))
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a supervisor process and waits until its parts are ready."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*plans: PartPlan, grace_s: float = 20.0) -> subprocess.Popen[bytes]:
        told = json.dumps([[plan.name, plan.argv, plan.kind] for plan in plans])
        command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "run"), told, str(grace_s)]
        # A shell's background jobs ignore Ctrl-C, and so would a child of a test run that was started as one.
        listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        started.append(subprocess.Popen(command, preexec_fn=listens))
        wait_until(lambda: all(lives(tmp_path, plan.name) for plan in plans), "every part to be ready")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    for pid in filter(runs, processes(tmp_path)):  # none, unless the test failed
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_ends_every_part_and_its_children(
    tmp_path: Path, supervisor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    plans = part(tmp_path, "collect-0", PARENT + "time.sleep(600)"), part(tmp_path, "serve-a-0", STAYS, "engine")
    process = supervisor(*plans)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    wait_until(lambda: all_gone(tmp_path), "all parts to end", 5.0)
    assert len(processes(tmp_path)) == 3
    assert [event["reason"] for event in events(tmp_path) if event["event"] == "stopped"] == ["SIGTERM"] * 2


def test_a_second_ctrl_c_waits_for_nobody(tmp_path: Path, supervisor: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = supervisor(part(tmp_path, "collect-0", DEAF), grace_s=600.0)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stop" in happened(tmp_path, "collect-0"), "the part to be asked")
    assert runs(processes(tmp_path)[0]) and process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and all_gone(tmp_path)


def test_a_killed_supervisor_takes_every_part_along(
    tmp_path: Path, supervisor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Also what ignores signals, what is stopped, and children."""
    stopped = "ready(); os.kill(os.getpid(), signal.SIGSTOP)"
    bodies = PARENT + "time.sleep(600)", DEAF, stopped
    process = supervisor(*(part(tmp_path, f"collect-{i}", body) for i, body in enumerate(bodies)))
    assert len(processes(tmp_path)) == 4 and all(map(runs, processes(tmp_path)))
    os.killpg(lives(tmp_path, "collect-1")[0][1], signal.SIGTERM)  # the whole group of the one that is deaf to it
    process.kill()
    wait_until(lambda: all_gone(tmp_path), "all parts to end", 10.0)


def test_a_run_goes_on_under_a_new_supervisor_after_the_first_was_killed(
    tmp_path: Path, supervisor: Callable[..., subprocess.Popen[bytes]]
) -> None:
    plan = part(tmp_path, "collect-0", "ready(); life == 1 and time.sleep(600)")
    process = supervisor(plan)
    process.kill()
    process.wait()
    assert run(tmp_path, plan) == 0
    assert happened(tmp_path, "collect-0") == ["start", "start", "complete"]
    wait_until(lambda: all_gone(tmp_path), "the first life to end")


# ---------------------------------------------------------------- what is launched, and what is seen of it


def test_a_recipe_s_parts(tmp_path: Path) -> None:
    config = config_of(launch={"collectors": 2, "engines": 2})
    plans = part_plans(config, tmp_path, ("--set", "threads=1"))
    assert [plan.name for plan in plans] == [
        "tools-0",
        *("serve-planner-0", "serve-planner-1", "serve-searcher-0", "serve-searcher-1"),
        *("learn-planner", "learn-searcher", "collect-0", "collect-1"),
    ]
    serve, recipe = plans[1], str(tmp_path / "config.toml")
    assert serve.kind == "engine" and serve.argv[:3] == (sys.executable, "-m", "mgrpo.cli")
    own = ("serve", "planner", recipe, "--run", str(tmp_path), "--name", "serve-planner-0", "--set", "threads=1")
    assert serve.argv[3:] == own
    assert len({plan.name for plan in plans}) == len(plans)
    assert "tools-0" not in [plan.name for plan in part_plans(config_of(launch={"tool_server": False}), tmp_path)]


COLLECTS = """
from mgrpo.report.metrics_log import MetricsLog
ready()
log = MetricsLog(home / "run" / "parts" / name)
stage = {"name": "rl", "steps": 3, "total_steps": 3, "demonstrations": False}
log.write("stage", 0, "rl", stage)
for step in range(3):
    log.write("collect", step, "rl", {"success": 0.5, "reward/planner": 0.4, "calls_per_rollout": 2.0})
    log.write("learn", step, "rl", {"agent": "planner", "from_version": step, "entropy": 0.5})
    life == 1 and step == 1 and os.kill(os.getpid(), signal.SIGKILL)
log.write("evaluate", 3, "rl", {"name": "after", "success": 0.75})
"""


def test_launch_shows_all_parts_in_one_place_and_closes_with_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=StringIO(), width=100)
    monkeypatch.setattr("mgrpo.report.reporter.Console", lambda: screen)
    plans = part(tmp_path, "collect-0", COLLECTS), part(tmp_path, "serve-planner-0", STAYS, "engine")
    assert launch(config_of(), tmp_path / "run", plans, lambda: ()) == 0
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    for words in ("collect-0 (pid ", "died: SIGKILL; starts again in 0.5 s", "evaluated after: success 0.75"):
        assert words in text
    assert "rl 3/3  success 0.50" in text and "75.0 %" in text and text.count("evaluated after") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["success_after"] == 0.75
    assert (tmp_path / "run" / "curves.png").is_file() and all_gone(tmp_path)
