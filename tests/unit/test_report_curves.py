"""curves.png and what is drawn in it."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo.errors import DataError, RunFolderError
from mgrpo.report.curves import draw_curves, read_curves, smoothed
from mgrpo.report.metrics_log import MetricsLog, read_metrics


def write_run(folder: Path, steps: int = 30) -> None:
    """20 steps of demonstrations for both agents, then ``steps`` of reinforcement learning, evaluated around it."""
    rng = random.Random(0)
    log = MetricsLog(folder)
    for name, first, count in (("warmup", 0, 20), ("rl", 20, steps)):
        shape = {"name": name, "steps": count, "total_steps": 20 + steps, "demonstrations": name == "warmup"}
        log.write("stage", first, name, shape)
        for step in range(first, first + count):
            success = 0.95 if name == "warmup" else 0.1 + 0.6 * (step - 20) / steps + rng.gauss(0, 0.03)
            rewards = {"reward/planner": success, "reward/searcher": 0.5}
            log.write("collect", step, name, {"success": success, "calls_per_rollout": 2.0, **rewards})
            masses = {"gradient_mass/0": 0.15, "gradient_mass/1": 0.1} if name == "rl" else {}
            own = {"planner": {"gradient_mass": 0.75} if masses else {}, "searcher": {"gradient_mass": 0.25, **masses}}
            for agent, mass in own.items():
                log.write(
                    "learn", step, name, {"agent": agent, "rows": 4.0, "entropy": 0.5, **(mass if masses else {})}
                )
    for name, step in (("before", 20), ("dev", 30), ("dev", 40), ("after", 20 + steps)):
        log.write("evaluate", step, "rl", {"name": name, "success": step / 100})
    log.close()


def test_the_picture_is_a_png_of_a_sensible_size(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = draw_curves(tmp_path)
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert path == tmp_path / "curves.png" and data[:8] == b"\x89PNG\r\n\x1a\n"
    assert width > 1000 and height > 700
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_demonstrations_take_little_room_and_show_no_success_of_the_team(tmp_path: Path) -> None:
    write_run(tmp_path)
    curves = read_curves(read_metrics(tmp_path))
    warmup, rl = curves.stages
    assert (warmup.left, rl.right) == (0.0, 1.0) and warmup.right == rl.left == pytest.approx(0.25)
    assert curves.success[0] == [] and len(curves.success[1]) == 30
    assert set(curves.rewards) == {"planner", "searcher"} and curves.rewards["searcher"][0] == []
    assert [value for _, value in curves.calls["sub-agents"][1]] == [2.0] * 30
    assert curves.entropy["searcher"][0] == [] and len(curves.entropy["searcher"][1]) == 30
    assert all(rl.left < place <= 1.0 for place, _ in curves.success[1])


def test_evaluations_stand_at_their_steps(tmp_path: Path) -> None:
    write_run(tmp_path)
    curves = read_curves(read_metrics(tmp_path))
    (before,), (after,) = curves.evaluations["before"], curves.evaluations["after"]
    assert before == (pytest.approx(0.25), 0.2) and after == (1.0, 0.5)
    assert [value for _, value in curves.evaluations["dev"]] == [0.3, 0.4]


def test_shares_of_the_gradient_mass(tmp_path: Path) -> None:
    write_run(tmp_path)
    log = MetricsLog(tmp_path)
    unknown = {"agent": "planner", "rows": 4.0, "gradient_mass": float("nan")}  # and so is the searcher's share
    log.write("learn", 25, "rl", unknown)
    log.close()
    curves = read_curves(read_metrics(tmp_path))
    assert {value for _, value in curves.agent_shares["planner"][1]} == {0.75}
    assert [len(points) for points in curves.agent_shares["searcher"]] == [0, 29]  # demonstrations compare nothing
    by_call = curves.invocation_shares
    assert set(by_call) == {"searcher/0", "searcher/1"} and len(by_call["searcher/0"][1]) == 30
    assert by_call["searcher/0"][1][0][1] == pytest.approx(0.6) and by_call["searcher/1"][1][0][1] == pytest.approx(0.4)


def test_an_agent_that_got_nothing_to_learn_from_has_no_share(tmp_path: Path) -> None:
    """A planner that stops delegating: its searcher has no rows, later rows that all tie; neither is a gap."""
    log = MetricsLog(tmp_path)
    log.write("stage", 0, "rl", {"name": "rl", "steps": 4, "total_steps": 4, "demonstrations": False})
    planner = {"agent": "planner", "rows": 8.0, "gradient_mass": 0.9}
    for step, searcher in enumerate(({"rows": 4.0, "gradient_mass": 0.3}, {}, {"rows": 4.0, "gradient_mass": 0.0})):
        log.write("learn", step, "rl", planner)
        log.write("learn", step, "rl", {"agent": "searcher", **searcher})
    log.write("learn", 3, "rl", planner)  # the searcher's step is not done yet
    log.close()
    shares = read_curves(read_metrics(tmp_path)).agent_shares
    assert [value for _, value in shares["planner"][0]] == pytest.approx([0.75, 1.0, 1.0])
    assert [value for _, value in shares["searcher"][0]] == pytest.approx([0.25, 0.0, 0.0])


def test_only_the_invocations_that_moved_an_agent_most_are_drawn(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("stage", 0, "rl", {"name": "rl", "steps": 4, "total_steps": 4, "demonstrations": False})
    masses = {f"gradient_mass/{i}": float(mass) for i, mass in enumerate((5, 1, 4, 2, 3, 1))}
    log.write("learn", 0, "rl", {"agent": "searcher", "rows": 6.0, "gradient_mass": 16.0, **masses})
    log.write("learn", 0, "rl", {"agent": "planner", "rows": 6.0, "gradient_mass": 16.0, "gradient_mass/0": 16.0})
    log.close()
    by_call = read_curves(read_metrics(tmp_path)).invocation_shares
    assert list(by_call) == ["searcher/0", "searcher/2", "searcher/3", "searcher/4"]
    assert by_call["searcher/2"] == [[(0.25, 0.25)]]


def test_unknown_values_are_gaps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("stage", 0, "rl", {"name": "rl", "steps": 3, "total_steps": 3, "demonstrations": False})
    for step, success in enumerate((0.5, None, 0.7)):
        log.write("collect", step, "rl", {"success": success, "calls_per_rollout": None, "reward/planner": None})
    log.close()
    curves = read_curves(read_metrics(tmp_path))
    assert [value for _, value in curves.success[0]] == [0.5, 0.7] and curves.calls == {"sub-agents": [[]]}
    assert curves.success[0][1][0] == 1.0
    assert draw_curves(tmp_path).exists()


def test_nothing_to_draw_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        draw_curves(tmp_path)
    log = MetricsLog(tmp_path)
    log.write("stage", 0, "rl", {"name": "rl", "steps": 3, "total_steps": 3, "demonstrations": False})
    log.close()
    with pytest.raises(DataError, match="no step in its metrics yet"):
        draw_curves(tmp_path)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 12))
def test_smoothing_keeps_length_range_and_constants(values: list[float], window: int) -> None:
    result = smoothed(values, window)
    assert len(result) == len(values)
    assert min(values) - 1e-9 <= min(result) and max(result) <= max(values) + 1e-9
    assert smoothed([3.0] * len(values), window) == [3.0] * len(values)
    if window == 1:
        assert all(math.isclose(a, b) for a, b in zip(result, values, strict=True))
