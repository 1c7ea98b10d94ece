"""Who is compared with whom."""

from __future__ import annotations

import math

import pytest
from tiny_rows import row_of

from mgrpo.algorithm.advantages import Comparison, advantages
from mgrpo.types import TrajectoryId

PAPER = Comparison()
UNSCALED = Comparison(scale_rewards="none")


def row(reward, rollout=0, *, group=0, agent="searcher", invocation=0, segment=0, weight=1.0):
    id = TrajectoryId(group, rollout, agent, invocation)
    return row_of(id, (1, 2), (False, True), None, reward, weight, segment)


def group(*rewards, **where):
    return [row(reward, k, **where) for k, reward in enumerate(rewards)]


def values(rows, comparison=PAPER, roots=None):
    """One number per row; these rows have one turn."""
    return tuple(value for (value,) in advantages(rows, comparison, roots).values)


def spread(*numbers):
    return tuple((number,) for number in numbers)


def test_near_ties_keep_their_full_advantage():
    """verl #6348, population sigma."""
    rows = group(1.00000, 1.00001) + group(2.00000, 2.00001, group=1)
    assert values(rows) == pytest.approx([-1, 1, -1, 1], abs=1e-9)


def test_rewards_one_bit_apart_are_still_centred():
    assert values(group(0.1, math.nextafter(0.1, 1.0))) == (-1.0, 1.0)
    assert values(group(0.0, 5e-324)) == (-1.0, 1.0)


def test_a_group_of_one_is_zero_and_counted():
    """AReaL #1454."""
    result = advantages(group(0.7))
    assert result.values == spread(
        0.0,
    )
    assert (result.stats.groups, result.stats.singleton_groups, result.stats.zero_variance_groups) == (1, 1, 0)


def test_excluded_members_are_not_in_the_baseline():
    """NeMo-RL #4061: [1, 1, 0, 0] with the second excluded; [1, 3, 2, 0] with the last excluded."""
    first = [r for r in group(1, 1, 0, 0) if r.id.rollout != 1]
    assert values(first, UNSCALED) == pytest.approx([0.6667, -0.3333, -0.3333], abs=1e-4)
    assert values(first) == pytest.approx([math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)])
    assert values(group(1, 3, 2), UNSCALED) == pytest.approx([-1, 1, 0])


def test_a_reward_of_zero_is_a_reward():
    """OpenRLHF #1219."""
    assert values(group(0.0, 1.0)) == (-1.0, 1.0)


def test_equal_prompts_in_two_tasks_are_two_groups():
    """NeMo-RL #3882: groups a and b of two rollouts, rewards [1, 0, 0, 0]."""
    result = advantages(group(1, 0) + group(0, 0, group=1))
    assert result.values == spread(1.0, -1.0, 0.0, 0.0)
    assert (result.stats.groups, result.stats.zero_variance_groups) == (2, 1)


def test_rows_of_one_trajectory_are_one_member():
    """agent-lightning #489: rollouts of 2, 1, 2, 1 rows and rewards [1, 0, 1, 0] have the baseline 0.5."""
    rows = [
        row(reward, k, segment=segment, weight=1 / rows_each)
        for k, (reward, rows_each) in enumerate([(1, 2), (0, 1), (1, 2), (0, 1)])
        for segment in range(rows_each)
    ]
    result = advantages(rows, UNSCALED)
    assert result.values == spread(0.5, 0.5, -0.5, 0.5, 0.5, -0.5)
    assert result.stats.reward_mean == 0.5
    assert values(rows) == (1, 1, -1, 1, 1, -1)


def test_agents_are_never_pooled():
    result = advantages(group(0, 1, agent="planner") + group(10, 30, agent="searcher"))
    assert result.values == spread(-1, 1, -1, 1)
    assert result.stats.groups == 2


def test_invocations_of_all_rollouts_are_one_group():
    rows = [row(1, 0), row(0, 1), row(0, 1, invocation=1), row(0, 2)]
    assert values(rows, UNSCALED) == (0.75, -0.25, -0.25, -0.25)


def test_equal_rewards_give_zero_whatever_their_weights():
    """A computed sigma of six rewards of .1 with these weights is 2.8e-17, not 0."""
    rows = [row(0.1, k, weight=w) for k, w in enumerate([2, 1, 1, 2 / 3, 2 / 3, 2 / 3])]
    result = advantages(rows)
    assert (
        result.values
        == spread(
            0.0,
        )
        * 6
    )
    assert result.stats.zero_variance_groups == 1


def test_weights_enter_mean_and_sigma():
    weighted = advantages([row(0, 0, weight=3), row(1, 1)])
    repeated = advantages(group(0, 0, 0, 1))
    assert [value for (value,) in weighted.values] == pytest.approx([repeated.values[0][0], repeated.values[3][0]])
    assert weighted.stats.reward_std == pytest.approx(repeated.stats.reward_std)


def test_statistics_of_no_rows_are_unknown():
    result = advantages([])
    assert result.values == ()
    assert (result.stats.groups, result.stats.reward_mean, result.stats.reward_std) == (0, None, None)


@pytest.mark.parametrize(("reward", "weight"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_row_that_would_poison_its_group_is_named(reward, weight):
    with pytest.raises(ValueError, match="g0/r1/searcher/0"):
        advantages([row(0.0), row(reward, 1, weight=weight)])


def test_rows_of_one_trajectory_must_agree_on_its_reward():
    with pytest.raises(ValueError, match="g0/r0/searcher/0: rows with rewards 0.0 and 1.0"):
        advantages([row(0.0), row(1.0, segment=1)])
