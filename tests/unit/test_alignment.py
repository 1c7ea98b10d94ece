"""How often each invocation counts, and the rows that come of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.alignment import align, multiplicities, recommended_d, rows_of
from mgrpo.errors import SamplingEvidenceError
from mgrpo.types import Parent, Reply, Reward, Sample, Trajectory, TrajectoryId, Turn

ROOT = TrajectoryId(0, 0, "planner", 0)


def turn(context, sampled, *, version=0, new_row=False):
    return Turn(context, sampled, tuple(-0.1 * t for t in sampled), version, "stop", "", Reply(), new_row=new_row)


def sample(rollout, invocation=0, reward=1.0, *, group=0, agent="searcher", turns=None, root=False):
    id = TrajectoryId(group, rollout, agent, invocation)
    parent = None if root else Parent(replace(ROOT, group=group, rollout=rollout), 0, 0)
    turns = (turn((1, 2), (3, 4)),) if turns is None else turns
    return Sample(Trajectory(id, "t", turns, "answer", parent=parent), Reward(reward, cause="no judge"))


def weights(rows):
    return {(row.id.group, row.id.rollout, row.id.invocation): row.weight for row in rows}


CALLS = [sample(k, i) for k, d_k in enumerate([1, 2, 3]) for i in range(d_k)]


# ---------------------------------------------------------------- multiplicities


def test_weight_is_the_expected_multiplicity():
    assert [multiplicities(count, 2, "weight", ()) for count in (0, 1, 2)] == [[], [2.0], [1.0, 1.0]]
    assert multiplicities(3, 2, "weight", ()) == [2 / 3] * 3


def test_none_counts_every_call_once():
    assert multiplicities(5, 2, "none", ()) == [1.0] * 5


def test_resample_duplicates_and_drops_to_exactly_d():
    for count in (1, 2, 3, 20):
        drawn = multiplicities(count, 4, "resample", (7, 0, count))
        assert sum(drawn) == 4 and all(share == int(share) for share in drawn)
        assert len(drawn) == count
        assert min(drawn) >= 1 if count <= 4 else max(drawn) == 1, "below d every call is kept, above none is repeated"
    assert multiplicities(0, 4, "resample", (7, 0)) == []


def test_resample_is_a_pure_function_of_its_key():
    drawn = multiplicities(5, 2, "resample", (7, 0, "searcher", 1))
    assert drawn == multiplicities(5, 2, "resample", (7, 0, "searcher", 1))
    assert any(multiplicities(5, 2, "resample", (seed, 0, "searcher", 1)) != drawn for seed in range(20))


def test_resample_draws_are_pinned():
    """The same seed draws the same calls on every machine."""
    assert multiplicities(2, 4, "resample", (0, 0, 0, "searcher", 0)) == [2.0, 2.0]
    assert multiplicities(5, 4, "resample", (0, 0, 0, "searcher", 1)) == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_resample_frequencies_are_uniform():
    duplicated, kept = Counter(), Counter()
    for seed in range(600):
        duplicated.update({i: share - 1 for i, share in enumerate(multiplicities(2, 3, "resample", (seed,)))})
        kept.update(i for i, share in enumerate(multiplicities(3, 1, "resample", (seed, "kept"))) if share)
    assert all(abs(count - 300) < 75 for count in duplicated.values())
    assert all(abs(count - 200) < 70 for count in kept.values())


def test_a_target_below_one_is_refused():
    with pytest.raises(ValueError, match="trajectories_per_rollout must be at least 1"):
        multiplicities(1, 0, "weight", ())


@pytest.mark.parametrize(
    ("counts", "quantile", "expected"),
    [([1] * 99 + [9], 0.99, 1), ([1] * 98 + [9, 9], 0.99, 9), ([0, 0], 0.99, 1), (range(1, 101), 0.07, 7), ([3], 1, 3)],
)
def test_recommended_d_is_the_smallest_that_covers_the_quantile(counts, quantile, expected):
    assert recommended_d(counts, quantile) == expected


def test_recommended_d_needs_rollouts():
    with pytest.raises(ValueError, match="at least one rollout"):
        recommended_d([])


# ---------------------------------------------------------------- align


def test_align_in_the_three_modes():
    assert weights(align(CALLS, "none", 2, seed=0, step=0)) == {
        (0, s.trajectory.id.rollout, s.trajectory.id.invocation): 1.0 for s in CALLS
    }
    by_weight = align(CALLS, "weight", 2, seed=0, step=0)
    assert [row.weight for row in by_weight] == [2, 1, 1, 2 / 3, 2 / 3, 2 / 3]
    drawn = align(CALLS, "resample", 2, seed=0, step=0)
    assert sum(row.weight for row in drawn) == 6
    assert len(drawn) == 5


def test_align_does_not_depend_on_order_of_arrival():
    for mode in ("weight", "resample"):
        assert align(CALLS[::-1], mode, 2, seed=3, step=1) == align(CALLS, mode, 2, seed=3, step=1)


def test_draws_change_with_seed_step_and_group():
    calls = [sample(k, i, group=g) for g in range(2) for k in range(4) for i in range(6)]
    drawn = weights(align(calls, "resample", 2, seed=0, step=0))
    assert drawn != weights(align(calls, "resample", 2, seed=1, step=0))
    assert drawn != weights(align(calls, "resample", 2, seed=0, step=1))
    first, second = ({key[1:] for key in drawn if key[0] == group} for group in range(2))
    assert first != second


def test_a_planner_or_a_root_always_has_weight_one():
    planners = [sample(k, agent="planner", root=True) for k in range(3)]
    for d in (None, 8):
        assert [row.weight for row in align(planners, "weight", d, seed=0, step=0)] == [1, 1, 1]


def test_unknown_rewards_and_empty_trajectories_leave_before_calls_are_counted():
    calls = [
        sample(0, 0),
        sample(0, 1, None),
        sample(0, 2, turns=()),
        sample(0, 3, turns=(turn((1,), ()),)),
        sample(1, 0, None),
    ]
    assert weights(align(calls, "weight", 2, seed=0, step=0)) == {(0, 0, 0): 2.0}


def test_no_calls_at_all_gives_no_rows():
    assert align([], "resample", 8, seed=0, step=0) == []


def test_two_agents_or_one_id_twice_are_refused():
    with pytest.raises(ValueError, match=r"\['reader', 'searcher'\]; align one agent at a time"):
        align([sample(0), sample(0, agent="reader")], "weight", 2, seed=0, step=0)
    with pytest.raises(ValueError, match="share an id: g0/r0/searcher/0"):
        align([sample(0), sample(0)], "weight", 2, seed=0, step=0)


def test_samples_none_of_which_is_graded_never_become_zero():
    """trl #5775: rewards [unknown, -1, -1, unknown] give the known ones 0 and the others no rows."""
    rows = align(
        [sample(0, 0, None), sample(1, 0, -1.0), sample(2, 0, -1.0), sample(3, 0, None)], "none", None, seed=0, step=0
    )
    assert [row.id.rollout for row in rows] == [1, 2]
    assert advantages(rows).values == ((0.0,), (0.0,))


def test_rows_are_grouped_by_id_not_by_arrival():
    """Interleaved arrivals of two queries, with equal rewards within each query."""
    arrivals = [
        sample(0, 0, 1.0, group=1),
        sample(0, 0, 0.0, group=2),
        sample(1, 0, 1.0, group=1),
        sample(1, 0, 0.0, group=2),
    ]
    assert set(advantages(align(arrivals, "weight", 1, seed=0, step=0)).values) == {(0.0,)}


# ---------------------------------------------------------------- rows


def test_rows_hold_what_was_sampled_and_where():
    (row,) = rows_of(sample(0, turns=(turn((1, 2), (3, 4), version=5), turn((6,), (7,), version=6))), weight=2.0)
    assert row.token_ids == (1, 2, 3, 4, 6, 7)
    assert row.loss_mask == (False, False, True, True, False, True)
    assert row.logprobs == pytest.approx((0.0, 0.0, -0.3, -0.4, 0.0, -0.7))
    assert row.versions == (-1, -1, 5, 5, -1, 6)
    assert (row.segment, row.weight, row.reward) == (0, 2.0, 1.0)


def test_tool_tokens_are_not_trained():
    """trl #4857: 4 sampled, 3 from a tool, 5 sampled."""
    (row,) = rows_of(sample(0, turns=(turn((1,), (2,) * 4), turn((3,) * 3, (4,) * 5))))
    assert row.loss_mask.count(True) == 9
    assert row.loss_mask[5:8] == (False,) * 3


def test_a_rewritten_history_starts_a_row_and_shares_the_weight_by_sampled_tokens():
    turns = (turn((1,), (2, 3, 4)), turn((1, 9), (5,), new_row=True), turn((6,), (7, 8), new_row=False))
    first, second = rows_of(sample(0, turns=turns), weight=3.0)
    assert (first.token_ids, first.segment, first.weight) == ((1, 2, 3, 4), 0, 1.5)
    assert (second.token_ids, second.segment, second.weight) == ((1, 9, 5, 6, 7, 8), 1, 1.5)
    assert second.loss_mask == (False, False, True, False, True, True)


def test_a_segment_without_sampled_tokens_gives_no_row():
    rows = rows_of(sample(0, turns=(turn((1,), ()), turn((1, 9), (5,), new_row=True))))
    assert [(row.segment, row.weight) for row in rows] == [(1, 1.0)]


def test_missing_log_probabilities_are_an_error_never_padding():
    """AReaL #1554."""
    broken = replace(turn((1,), (2, 3, 4, 5, 6)), logprobs=(-0.1,) * 4)
    with pytest.raises(SamplingEvidenceError, match="g0/r0/searcher/0 turn 0: 5 sampled tokens but 4 log-prob"):
        rows_of(sample(0, turns=(broken,)))


def test_rows_of_an_unknown_reward_are_refused():
    with pytest.raises(ValueError, match=r"g0/r0/searcher/0: its reward is unknown \(no judge\)"):
        rows_of(sample(0, reward=None))
