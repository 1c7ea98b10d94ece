"""Alarms ring for planted faults, once per episode, and not on healthy data."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mgrpo.report.alarms import (
    Alarm,
    AlarmBell,
    Metrics,
    call_capture,
    entropy_collapse,
    failed_rollouts,
    flat_held_out,
    gradient_capture,
    idle_agent,
    invalid_format,
    lazy_planner,
    logprob_mismatch,
    skipped_steps,
)


def steps(zero: Sequence[float], calls: Sequence[float]) -> list[Metrics]:
    return [{"zero_call_fraction": z, "calls_per_rollout": c} for z, c in zip(zero, calls, strict=True)]


def ends(count: int) -> range:
    """Lengths of a history of ``count`` steps, as a run goes through them."""
    return range(count + 1)


def learned(entropy: Sequence[float], reward: Sequence[float], **others: float) -> list[Metrics]:
    return [{"entropy": e, "reward_mean": r, **others} for e, r in zip(entropy, reward, strict=True)]


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


def test_a_sub_agent_that_is_no_longer_called_rings_for_itself() -> None:
    made = [2.0, 2.0, 2.0, 1.5, 1.0, 0.6, 0.3, 0.0]
    history = [{"calls/searcher": 1.5, "calls/comparer": calls} for calls in made]
    assert [idle_agent(history[:end], "comparer") is not None for end in ends(8)] == [False] * 8 + [True]
    assert idle_agent(history, "searcher") is None and idle_agent(history, "nobody") is None
    alarm = idle_agent(history, "comparer")
    assert alarm is not None and "0.30 times per rollout, 2.00 at the start" in alarm.message
    assert idle_agent([{"calls/comparer": 0.0}] * 9, "comparer") is None  # it was never called in this stage


def test_an_agent_that_takes_nearly_all_of_the_gradient_rings() -> None:
    history = [{"planner": 0.06, "searcher": 0.94}] * 5
    assert gradient_capture(history[:4]) is None
    alarm = gradient_capture(history)
    assert alarm is not None and alarm.name == "gradient_capture"
    assert "searcher has 94% of the gradient mass of all agents, 94% at the start" in alarm.message


def test_an_agent_that_takes_the_gradient_over_rings_before_it_has_nearly_all() -> None:
    """Naive sums over calls: the more the planner delegates, the more its searcher outweighs it."""
    history = [{"planner": 1 / (1 + calls), "searcher": calls / (1 + calls)} for calls in (1,) * 5 + (7,) * 5]
    rung = [gradient_capture(history[:end]) is not None for end in ends(10)]
    assert rung == [False] * 10 + [True]  # 88 % of the last five steps
    grows = [{"planner": 1 / (1 + calls), "searcher": calls / (1 + calls)} for calls in (1,) * 5 + (4,) * 9]
    assert gradient_capture(grows) is None


def test_healthy_shares_ring_nothing() -> None:
    rng = random.Random(1)
    for mean in (0.3, 0.5, 0.7):
        shares = [min(0.99, max(0.01, rng.gauss(mean, 0.1))) for _ in range(200)]
        history = [{"planner": share, "searcher": 1 - share} for share in shares]
        assert not any(gradient_capture(history[:end]) for end in ends(200))
    # A searcher without rows, or only with ties, has alarms and metrics of its own.
    assert gradient_capture([{"planner": 1.0, "searcher": 0.0}] * 9) is None
    assert gradient_capture([{"planner": 0.5, "searcher": 0.5}] * 3 + [{"planner": 1.0, "searcher": 0.0}] * 9) is None


def test_an_invocation_that_takes_nearly_all_of_its_agents_gradient_rings() -> None:
    several = [{"calls/searcher": 2.4, "zero_call_fraction/searcher": 0.1}] * 9
    shares = [{0: 0.4, 1: 0.35, 2: 0.25}] * 5 + [{0: 0.95, 1: 0.04, 2: 0.01}] * 5
    assert call_capture(shares[:5], several, "searcher") is None
    alarm = call_capture(shares, several, "searcher")
    assert alarm is not None and alarm.name == "call_capture/searcher"
    assert "invocation 0 of searcher has 95% of its gradient mass, 40% at the start" in alarm.message


def test_the_first_invocation_of_an_agent_that_is_mostly_called_once_may_have_most_of_the_gradient() -> None:
    once = [{"calls/searcher": 1.1, "zero_call_fraction/searcher": 0.1}] * 9
    assert call_capture([{0: 0.95, 1: 0.05}] * 9, once, "searcher") is None
    rarely = [{"calls/searcher": 0.3, "zero_call_fraction/searcher": 0.9}] * 9  # three calls where there are any
    assert call_capture([{0: 0.95, 1: 0.03, 2: 0.02}] * 9, rarely, "searcher") is not None


def test_entropy_that_collapses_without_reward_rings() -> None:
    entropy = [0.4, 0.5, 0.45, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01]
    history = learned(entropy, [0.2, 0.3, 0.3, 0.35, 0.35, 0.35, 0.35, 0.35, 0.35, 0.35])
    rung = [entropy_collapse(history[:end], "planner") is not None for end in ends(10)]
    assert rung == [False] * 8 + [True] * 3
    alarm = entropy_collapse(history, "planner")
    assert alarm is not None and alarm.name == "entropy_collapse/planner"
    assert "0.010 nats per token, 0.450 at the start" in alarm.message and "stands at 0.35" in alarm.message


def test_entropy_that_falls_as_the_reward_rises_or_is_nearly_all_got_rings_nothing() -> None:
    entropy = [0.16 * 0.8**step + 0.004 for step in range(40)]
    rising = learned(entropy, [min(0.99, 0.1 + 0.06 * step) for step in range(40)])
    assert not any(entropy_collapse(rising[:end], "planner") for end in ends(40))
    low = learned([0.04] * 20, [0.3] * 20)  # low from the start is the model's, not the stage's
    assert not any(entropy_collapse(low[:end], "planner") for end in ends(20))
    assert entropy_collapse([{"rows": 4.0}] * 9, "planner") is None


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"logprob_abs_diff": 0.2, "rollout_kl": 0.03}, "disagree by 0.2 nats per token and 0.03 of KL"),
        ({"logprob_abs_diff": 0.2}, "disagree by 0.2 nats per token:"),
        ({"logprob_abs_diff": 0.01, "rollout_kl": 0.05}, "0.05 of KL"),
        ({"logprob_abs_diff": 0.02, "rollout_kl": 0.001}, ""),  # a sound bfloat16 engine
        ({}, ""),
    ],
)
def test_an_engine_that_disagrees_with_its_learner_rings(metrics: Metrics, said: str) -> None:
    alarm = logprob_mismatch([metrics] * 3, "searcher")
    assert (alarm is not None) == bool(said)
    if alarm is not None:
        assert alarm.name == "logprob_mismatch/searcher" and said in alarm.message


def evaluations(*scores: float | None) -> list[tuple[int, Metrics]]:
    return [(10 * (i + 1), {"success": score}) for i, score in enumerate(scores)]


def test_a_reward_that_rises_while_the_held_out_score_is_flat_rings() -> None:
    rises = [{"reward/planner": min(0.9, 0.2 + 0.02 * step)} for step in range(40)]
    flat = evaluations(0.30, 0.28, 0.33, 0.31)
    assert [flat_held_out(rises, flat[:end], "planner") is not None for end in ends(4)] == [False] * 3 + [True] * 2
    alarm = flat_held_out(rises, flat, "planner")
    assert alarm is not None and alarm.name == "flat_held_out"
    assert "planner's reward rose from 0.36 to 0.90" in alarm.message and "from 0.30 to 0.32" in alarm.message


def test_a_reward_and_a_held_out_score_that_move_together_ring_nothing() -> None:
    rises = [{"reward/planner": 0.2 + 0.02 * step} for step in range(40)]
    level = [{"reward/planner": 0.5}] * 40
    assert flat_held_out(rises, evaluations(0.3, 0.4, 0.55, 0.6), "planner") is None
    assert flat_held_out(level, evaluations(0.5, 0.5, 0.5, 0.49), "planner") is None
    assert flat_held_out(rises, evaluations(0.3, None, None, None), "planner") is None  # unknown is no score


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
