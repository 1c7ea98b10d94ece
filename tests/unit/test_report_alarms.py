"""Alarms ring for planted faults, once per episode, and not on healthy data."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mgrpo.report.alarms import Alarm, AlarmBell, Metrics, failed_rollouts, invalid_format, lazy_planner, skipped_steps


def steps(zero: Sequence[float], calls: Sequence[float]) -> list[Metrics]:
    return [{"zero_call_fraction": z, "calls_per_rollout": c} for z, c in zip(zero, calls, strict=True)]


def test_healthy_steps_ring_nothing() -> None:
    rng = random.Random(0)
    noise = [rng.gauss(0, 0.1) for _ in range(200)]
    history = steps([abs(x) for x in noise], [1.9 + x for x in noise])
    formats = [{"invalid_format/searcher": min(1.0, abs(x))} for x in noise]
    for end in range(1, 200):
        assert lazy_planner(history[:end]) is None
        assert invalid_format(formats[:end], "searcher") is None


def test_a_planner_that_stops_delegating_rings() -> None:
    zero = [0.0, 0.1, 0.1, 0.2, 0.4, 0.7, 0.9, 1.0]
    history = steps(zero, [2 * (1 - z) for z in zero])
    rung = [lazy_planner(history[:end]) is not None for end in range(1, len(history) + 1)]
    assert rung == [False] * 6 + [True] * 2
    alarm = lazy_planner(history)
    assert alarm is not None and alarm.name == "lazy_planner" and "87% of rollouts" in alarm.message


def test_calls_under_a_quarter_of_the_start_ring() -> None:
    history = steps([0.3] * 9, [6.0, 6.0, 6.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0])
    assert lazy_planner(history[:7]) is None
    alarm = lazy_planner(history)
    assert alarm is not None and "1.00 calls per rollout, 6.00 at the start" in alarm.message


def test_a_planner_that_never_delegated_rings_at_the_first_step() -> None:
    assert lazy_planner(steps([1.0], [0.0])) is not None


@pytest.mark.parametrize("history", [[], [{}], [{"zero_call_fraction": None, "calls_per_rollout": None}]])
def test_unknown_rings_nothing(history: list[Metrics]) -> None:
    assert lazy_planner(history) is None and invalid_format(history, "planner") is None


def test_invalid_format_rings_when_it_rises_not_when_it_falls() -> None:
    falling = [0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1]
    rising = [0.3, 0.6, 0.8, 0.9]
    history = [{"invalid_format/planner": share} for share in [*falling, *rising]]
    assert invalid_format(history[: len(falling)], "planner") is None
    alarm = invalid_format(history, "planner")
    assert alarm is not None and "77% of planner's trajectories" in alarm.message and "10% at its best" in alarm.message
    assert invalid_format(history, "searcher") is None


def test_failing_infrastructure_rings() -> None:
    history = [{"rollouts": 16, "failed_rollouts": failed} for failed in (0, 1, 1, 0, 8, 16)]
    assert [failed_rollouts(history[:end]) is not None for end in range(7)] == [False] * 5 + [True] * 2
    alarm = failed_rollouts(history)
    assert alarm is not None and alarm.message.startswith("50% of rollouts fail by infrastructure")
    assert failed_rollouts([{"rollouts": 0, "failed_rollouts": 0}]) is None


def test_skipped_steps_ring() -> None:
    assert skipped_steps({"skipped_steps": 0.0}, "planner") is None and skipped_steps({}, "planner") is None
    alarm = skipped_steps({"skipped_steps": 1.0}, "planner")
    assert alarm is not None and alarm.name == "skipped_steps/planner"


def test_the_bell_rings_once_per_episode() -> None:
    bell, trouble = AlarmBell(), Alarm("lazy_planner", "...")
    found = [trouble] * 4 + [None] * 2 + [trouble] * 3 + [None] * 5 + [trouble] * 2
    rung = [bell.ring("lazy_planner", alarm) is not None for alarm in found]
    assert [i for i, rang in enumerate(rung) if rang] == [0, 14]  # two quiet checks end no episode, five do


def test_episodes_of_different_troubles_are_apart() -> None:
    bell = AlarmBell()
    assert bell.ring("a", Alarm("a", "")) is not None
    assert bell.ring("ab", Alarm("ab", "")) is not None
    assert bell.ring("a", Alarm("a", "")) is None
