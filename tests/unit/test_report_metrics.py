"""Numbers of one step of collecting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import failed, group_of, rewarded, rollout

from mgrpo.algorithm.shaping import Shaping, shaped
from mgrpo.report.metrics import rollout_metrics
from mgrpo.types import Failure, Rollout, ToolResult


def test_means_counts_and_histogram() -> None:
    group = group_of(rollout(0, 2), rollout(1, 1, "Tarn"), rollout(2, 0), rollout(3, 1))
    metrics = rollout_metrics([group], rewarded(group, expert=0.5))
    assert metrics["success"] == 0.75  # three of four planners say Merova
    assert metrics["sub_answer"] == 0.5
    assert metrics["calls_per_rollout"] == 1.0 and metrics["zero_call_fraction"] == 0.25
    assert [metrics[f"calls_histogram/{d}"] for d in (0, 1, 2)] == [1, 2, 1]
    assert metrics["recommended_d/searcher"] == 2 and metrics["calls/searcher"] == 1.0
    assert metrics["reward/planner"] == pytest.approx((1 + 0.1 + 1 + 1) / 4)
    assert metrics["reward/searcher"] == pytest.approx((3 * 0.75 + 0.35) / 4)
    assert metrics["part/searcher/correct_main"] == 0.75 and metrics["part/planner/format"] == 1.0
    assert metrics["invalid_format/planner"] == 0.0 and metrics["turns/searcher"] == 2.0
    # Planner turns: 2 + 2 + 1 + 2, searcher turns: 4 x 2; three tokens each.
    assert metrics["sampled_tokens"] == 3 * (7 + 8)
    assert metrics["endings/answer"] == 8 and metrics["unknown_fraction"] == 0.0
    assert not [key for key in metrics if key.startswith("failures/")]


def test_unknown_is_none_and_never_zero() -> None:
    group = group_of(rollout(0, 1))
    metrics = rollout_metrics([group], rewarded(group, expert=None))
    assert metrics["sub_answer"] is None and metrics["part/searcher/expert"] is None
    assert metrics["part/searcher/correct_main"] == 1.0
    without_rewards = rollout_metrics([group], {})
    assert without_rewards["success"] is None and without_rewards["reward/planner"] is None
    assert without_rewards["unknown_fraction"] == 1.0 and without_rewards["calls_per_rollout"] == 1.0


def test_nothing_collected_is_unknown() -> None:
    metrics = rollout_metrics([], {})
    assert metrics["groups"] == 0 and metrics["success"] is None and metrics["calls_per_rollout"] is None


def test_a_failed_rollout_counts_as_failure_and_unknown_only() -> None:
    group = group_of(rollout(0, 2), failed(1))
    metrics = rollout_metrics([group], rewarded(group))
    assert metrics["success"] == 1.0 and metrics["calls_per_rollout"] == 2.0 and metrics["zero_call_fraction"] == 0.0
    assert metrics["rollouts"] == 2 and metrics["unknown_fraction"] == 0.25 and metrics["failed_rollouts"] == 1
    assert metrics["failures/EngineTimeout"] == 1 and metrics["endings/failure"] == 1


def test_failures_of_tools_are_counted() -> None:
    sound = rollout(0, 1)
    broken = ToolResult("search failed", failure=Failure("ToolTimeout", "2 s"))
    searcher = sound.trajectories[1]
    turns = (replace(searcher.turns[0], results=(broken,)), *searcher.turns[1:])
    group = group_of(replace(sound, trajectories=(sound.root, replace(searcher, turns=turns))))
    assert rollout_metrics([group], rewarded(group))["failures/ToolTimeout"] == 1


def test_invalid_format_is_the_trajectory_s_not_the_turn_s() -> None:
    group = group_of(rollout(0, 1, error="unknown tool"), rollout(1, 1, answer=None))
    metrics = rollout_metrics([group], rewarded(group))
    assert metrics["invalid_format/planner"] == 1.0 and metrics["invalid_format/searcher"] == 0.0
    assert metrics["reward/planner"] == 0.0 and metrics["endings/max_turns"] == 1


def by_name(member: Rollout, *names: str) -> Rollout:
    """``member`` with its sub-agents' invocations given to ``names`` in order."""
    own = zip(member.trajectories[1:], names, strict=True)
    counts = dict.fromkeys(names, 0)
    renamed = []
    for trajectory, name in own:
        renamed.append(replace(trajectory, id=replace(trajectory.id, agent=name, invocation=counts[name])))
        counts[name] += 1
    return replace(member, trajectories=(member.root, *renamed))


def test_calls_are_told_of_every_sub_agent() -> None:
    two = by_name(rollout(0, 3), "searcher", "comparer", "searcher")
    group = group_of(two, rollout(1, 1), rollout(2, 0), rollout(3, 1))
    metrics = rollout_metrics([group], {}, ("searcher", "comparer", "calculator"))
    assert [metrics[f"calls/{agent}"] for agent in ("searcher", "comparer", "calculator")] == [1.0, 0.25, 0.0]
    zero = [metrics[f"zero_call_fraction/{agent}"] for agent in ("searcher", "comparer", "calculator")]
    assert zero == [0.25, 0.75, 1.0] and metrics["zero_call_fraction"] == 0.25
    assert [metrics.get(f"calls_histogram/searcher/{d}") for d in range(4)] == [1, 2, 1, None]
    assert [metrics.get(f"calls_histogram/{d}") for d in range(4)] == [1, 2, None, 1]
    assert metrics["calls_histogram/comparer/1"] == 1 and metrics["calls_histogram/calculator/0"] == 4
    assert (metrics["recommended_d/searcher"], metrics["recommended_d/calculator"]) == (2, 1)


def test_shaped_and_masked_rewards_are_told() -> None:
    group = group_of(rollout(0, 1), rollout(1, 1, answer=None), rollout(2, 1))
    raw = rewarded(group)
    plans = {"planner": Shaping(10, mask_truncated=True), "searcher": Shaping(4, 2, 0.5)}  # turns have 3 tokens
    worth = {id: reward for member in group.rollouts for id, reward in shaped(member, raw, plans).items()}
    metrics = rollout_metrics([group], worth)
    assert metrics["masked_fraction/planner"] == pytest.approx(1 / 3) and metrics["masked_fraction/searcher"] == 0.0
    assert metrics["unknown_fraction"] == 0.0  # masked by choice
    assert metrics["reward/planner"] == 1.0 and metrics["success"] == pytest.approx(2 / 3)
    assert metrics["part/searcher/overlong"] == -0.25
    assert metrics["reward/searcher"] == pytest.approx((1.0 + 0.6 + 1.0) / 3 - 0.25)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_calls_add_up_and_order_does_not_matter(counts: list[int]) -> None:
    members = [rollout(index, count) for index, count in enumerate(counts)]
    group = group_of(*members)
    metrics = rollout_metrics([group], rewarded(group))
    histogram = {int(k.rpartition("/")[2]): v for k, v in metrics.items() if k.startswith("calls_histogram/s")}
    histogram = histogram or {0: len(counts)}  # nobody was called, and no sub-agent was named
    assert sum(d * n for d, n in histogram.items()) == sum(counts)
    assert sum(histogram.values()) == len(counts)
    backwards = group_of(*reversed(members))
    assert rollout_metrics([backwards], rewarded(backwards)) == metrics
