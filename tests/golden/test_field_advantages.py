"""Faults that other trainers have had in their group statistics, each with its input and the right value.

From stored samples to the advantages of tokens, with the unbiased standard deviation that those libraries use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from tiny_rows import row_of

from mgrpo.algorithm.advantages import Advantages, Comparison, advantages
from mgrpo.algorithm.alignment import align
from mgrpo.algorithm.coefficients import gradient_mass, token_coefficients
from mgrpo.algorithm.packing import pack
from mgrpo.algorithm.rewards import rewards
from mgrpo.types import Findings, Grade, Parent, Reply, Reward, Rollout, Row, Sample, Trajectory, TrajectoryId, Turn

NORMALISED = Comparison(std_unbiased=True)
CENTRED = Comparison(scale_rewards="none")
LEAVE_ONE_OUT = Comparison(scale_rewards="none", leave_one_out=True)
OUTAGE = Reward(None, cause="EngineTimeout: no reply")
ROOT = 0.5**0.5


def turn(sampled: int, context: int = 2, new_row: bool = False) -> Turn:
    return Turn((1,) * context, (2,) * sampled, (-1.0,) * sampled, 0, "stop", "", Reply(), new_row=new_row)


def sample(
    reward: float | None,
    rollout: int,
    group: int = 0,
    agent: str = "planner",
    invocation: int = 0,
    turns: tuple[Turn, ...] = (turn(3),),
) -> Sample:
    parent = None if agent == "planner" else Parent(TrajectoryId(group, rollout, "planner", 0), 0, 0)
    id = TrajectoryId(group, rollout, agent, invocation)
    worth = OUTAGE if reward is None else Reward(reward)
    return Sample(Trajectory(id, "the same question", turns, "answer", Findings("x"), parent), worth)


def compared(
    samples: Sequence[Sample], comparison: Comparison = NORMALISED, d: int | None = None
) -> tuple[list[Row], Advantages]:
    rows = align(samples, "weight", d, seed=0, step=0)
    return rows, advantages(rows, comparison)


def by_rollout(samples: Sequence[Sample], comparison: Comparison = NORMALISED) -> dict[tuple[int, int], float]:
    """One advantage per (group, rollout); every sampled token of it must have that one."""
    rows, result = compared(samples, comparison)
    found: dict[tuple[int, int], set[float]] = {}
    for row, values in zip(rows, result.values, strict=True):
        found.setdefault((row.id.group, row.id.rollout), set()).update(values)
    assert all(len(values) == 1 for values in found.values())
    return {key: value for key, (value,) in found.items()}


def of_one_group(worths: Sequence[float | None], comparison: Comparison = NORMALISED) -> dict[int, float]:
    found = by_rollout([sample(worth, k) for k, worth in enumerate(worths)], comparison)
    return {rollout: value for (_, rollout), value in found.items()}


# ---------------------------------------------------------------- spread


@pytest.mark.parametrize(("unbiased", "size"), [(True, ROOT), (False, 1.0)])
def test_near_ties_are_normalised_in_full(unbiased: bool, size: float) -> None:
    """R-01: no epsilon and no clamp of the variance stands in the way of a spread of 1e-5."""
    samples = [sample(base + 1e-5 * k, k, group) for group, base in enumerate([1.0, 2.0]) for k in (0, 1)]
    found = by_rollout(samples, Comparison(std_unbiased=unbiased))
    assert found == pytest.approx({(0, 0): -size, (0, 1): size, (1, 0): -size, (1, 1): size}, abs=1e-9)


@pytest.mark.parametrize("comparison", [NORMALISED, CENTRED, LEAVE_ONE_OUT, Comparison(scale_rewards="batch")])
def test_a_group_of_one_has_advantage_zero_and_is_counted(comparison: Comparison) -> None:
    """R-02: neither the raw reward .7 nor the NaN of n - 1 = 0; a second group shows that it alone is meant."""
    alone, beside = [sample(0.7, 0)], [sample(0.7, 0), sample(1.0, 0, 1), sample(0.0, 1, 1)]
    for samples, groups in ((alone, 1), (beside, 2)):
        rows, result = compared(samples, comparison)
        assert result.values[0] == (0.0,)
        assert (result.stats.singleton_groups, result.stats.groups) == (1, groups)
        assert result.stats.zero_variance_groups == 0
        assert all(math.isfinite(value) for values in result.values for value in values)


# ---------------------------------------------------------------- what is unknown


def test_a_failed_rollout_is_not_in_the_baseline() -> None:
    """R-03: rewards [1, 1, 0, 0] of which the second failed. The three others have mean 1/3 and sum of squares 2/3,
    so sigma = sqrt(1/3); a baseline over four would give +-.5 and +-.866."""
    worths = [1.0, None, 0.0, 0.0]
    assert of_one_group(worths, CENTRED) == pytest.approx({0: 2 / 3, 2: -1 / 3, 3: -1 / 3})
    third = 3**-0.5
    assert of_one_group(worths) == pytest.approx({0: 2 * third, 2: -third, 3: -third})
    assert of_one_group(worths)[0] == pytest.approx(1.1547, abs=5e-5)


def test_a_failed_rollout_is_not_in_the_leave_one_out_baseline() -> None:
    """R-03, second case: [1, 3, 2] and one that failed. Left out, each is compared with 2.5, 1.5 and 2."""
    worths = [1.0, 3.0, 2.0, None]
    assert of_one_group(worths) == pytest.approx({0: -1.0, 1: 1.0, 2: 0.0}, abs=1e-12)
    assert of_one_group(worths, LEAVE_ONE_OUT) == pytest.approx({0: -1.5, 1: 1.5, 2: 0.0}, abs=1e-12)


def test_an_unknown_reward_does_not_become_zero() -> None:
    """R-05: [unknown, -1, -1, unknown] has no spread; with zeros in place of the unknown it would be +-.866."""
    rows, result = compared([sample(worth, k) for k, worth in enumerate([None, -1.0, -1.0, None])])
    assert [(row.id.rollout, values) for row, values in zip(rows, result.values, strict=True)] == [
        (1, (0.0,)),
        (2, (0.0,)),
    ]
    assert (result.stats.zero_variance_groups, result.stats.reward_mean) == (1, -1.0)


def test_a_group_of_unknown_rewards_alone_is_nothing() -> None:
    """R-05: no rows, no statistics, no number in place of them."""
    assert compared([sample(None, k) for k in range(4)]) == ([], Advantages())


def test_a_reward_of_zero_is_known() -> None:
    """R-06: [0, 1] are two rows of -+.7071; a score of 0.0 is not a missing one, from the grade on."""
    roots = [sample(None, k).trajectory for k in (0, 1)]
    weights = {"planner": {"format": 0.0, "correct": 1.0}}
    worths = [rewards(Rollout(0, k, (t,)), {t.id: Grade(float(k))}, weights)[t.id] for k, t in enumerate(roots)]
    found = by_rollout([Sample(t, worth) for t, worth in zip(roots, worths, strict=True)])
    assert found == pytest.approx({(0, 0): -ROOT, (0, 1): ROOT})


# ---------------------------------------------------------------- who belongs together


def test_two_tasks_with_the_same_text_are_two_groups() -> None:
    """R-07: tasks a, a, b, b, all of one text, rewards [1, 0, 0, 0]: a is +-.7071, b is 0."""
    samples = [sample(1, 0, 0), sample(0, 1, 0), sample(0, 0, 1), sample(0, 1, 1)]
    assert len({s.trajectory.task for s in samples}) == 1
    found = by_rollout(samples)
    assert found == pytest.approx({(0, 0): ROOT, (0, 1): -ROOT, (1, 0): 0.0, (1, 1): 0.0})
    assert compared(samples)[1].stats.zero_variance_groups == 1


def rewritten(count: int) -> tuple[Turn, ...]:
    """Turns of 1, 2, ... sampled tokens, each with a history that its template rewrote: a row of its own."""
    return tuple(turn(n + 1, new_row=n > 0) for n in range(count))


def test_rows_of_one_rollout_are_one_member_and_share_its_advantage() -> None:
    """R-08: rollouts of 2, 1, 2, 1 rows and rewards [1, 0, 1, 0]: the baseline is 1/2, not 4/6, sigma is sqrt(1/3),
    and every sampled token of every row has the advantage of its rollout, those of the first turn too."""
    samples = [sample(worth, k, turns=rewritten(2 - k % 2)) for k, worth in enumerate([1.0, 0.0, 1.0, 0.0])]
    rows, result = compared(samples, CENTRED)
    assert [row.id.rollout for row in rows] == [0, 0, 1, 2, 2, 3]
    assert by_rollout(samples, CENTRED) == {(0, 0): 0.5, (0, 1): -0.5, (0, 2): 0.5, (0, 3): -0.5}
    assert by_rollout(samples) == pytest.approx({(0, k): (-1) ** k * 0.75**0.5 for k in range(4)})
    batches = pack(rows, result.values, token_coefficients(rows), 4, pad_id=0)
    tokens = [
        (batch.ids[row].rollout, value)
        for batch in batches
        for row, value in zip(batch.row.tolist(), batch.advantages.tolist(), strict=True)
    ]
    assert sorted(tokens) == sorted([(0, 0.5)] * 3 + [(1, -0.5)] + [(2, 0.5)] * 3 + [(3, -0.5)])


def test_turns_of_one_history_are_one_row_and_every_turn_is_credited() -> None:
    """R-08 where nothing is rewritten: two turns, one row, the outcome's advantage on the tokens of both."""
    rows, result = compared([sample(1, 0, turns=(turn(2), turn(3))), sample(0, 1, turns=(turn(1),))], CENTRED)
    assert (len(rows), result.values) == (2, ((0.5, 0.5), (-0.5,)))
    (batch,) = pack(rows, result.values, token_coefficients(rows), 100, pad_id=0)
    assert batch.advantages.tolist() == [0.5] * 5 + [-0.5]


def test_what_was_not_sampled_is_in_no_statistic() -> None:
    """R-09: advantages [1, 1, 10, 10] under the mask [1, 1, 0, 0] are [1, 1, 0, 0] under it: the same tokens to
    learn from, and the same share of the gradient."""
    row = row_of(TrajectoryId(0, 0, "planner", 0), (7, 2, 3, 4, 5), (False, True, True, False, False))
    packed, masses = [], []
    for beyond in (10.0, 0.0):
        values = [(1.0, beyond)]
        (batch,) = pack([row], values, token_coefficients([row]), 100, pad_id=0)
        packed.append((batch.advantages.tolist(), batch.coefficients.tolist()))
        masses.append(gradient_mass([row], values, token_coefficients([row])))
    assert packed == [([1.0, 1.0], [0.5, 0.5])] * 2
    assert masses == [{("planner", 0): 1.0}] * 2


def test_whitening_counts_sampled_tokens_alone() -> None:
    """R-09: centred advantages +-.5 on 2 and 6 sampled tokens have the token mean -.25 and the sum of squares
    2 (.75)^2 + 6 (.25)^2 = 1.5, so sample std sqrt(1.5 / 7), however much stands between them."""
    comparison = Comparison(scale_rewards="none", whiten_advantages=True)
    for context in (1, 50):
        turns = ((turn(2, context), turn(0, context)), (turn(6, context),))
        rows, result = compared([sample(float(k == 0), k, turns=turns[k]) for k in (0, 1)], comparison)
        deviation = (1.5 / 7) ** 0.5
        assert result.values[0][0] == pytest.approx(0.75 / deviation)
        assert result.values[1] == pytest.approx((-0.25 / deviation,))


def test_sub_agents_are_grouped_by_query_in_whatever_order_they_arrive() -> None:
    """R-11: arrivals q1: 1, q2: 0, q1: 1, q2: 0. Each query's rewards are equal, so nothing is learned; groups of two
    in order of arrival would give +-.707."""
    arrivals = [sample(1 - q, k, q, "searcher") for k in (0, 1) for q in (0, 1)]
    assert [s.reward.value for s in arrivals] == [1, 0, 1, 0]
    for samples in (arrivals, arrivals[::-1]):
        rows, result = compared(samples, d=1)
        assert {value for values in result.values for value in values} == {0.0}
        assert (result.stats.groups, result.stats.zero_variance_groups) == (2, 2)
    mixed = [sample(worth, k, q, "searcher") for k, q, worth in [(1, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)]]
    assert by_rollout(mixed) == pytest.approx({(0, 0): ROOT, (0, 1): -ROOT, (1, 0): ROOT, (1, 1): -ROOT})
