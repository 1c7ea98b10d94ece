"""What must hold for any group, whatever its size and rewards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.alignment import align, multiplicities, rows_of
from mgrpo.algorithm.loss import TokenSums, policy_loss, sft_loss, token_coefficients
from mgrpo.algorithm.packing import pack
from mgrpo.types import Parent, Reply, Reward, Row, Sample, Trajectory, TrajectoryId, Turn

FEW = settings(max_examples=40, deadline=None)
MODES = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]
REWARD = st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.1, 0.5, 1.0])


@st.composite
def samples(draw):
    """One agent's samples: up to 3 groups of up to 4 rollouts of 0 to 6 calls, some unknown, in any order."""
    result = []
    for group in range(draw(st.integers(1, 3))):
        for rollout in range(draw(st.integers(1, 4))):
            for i in range(draw(st.integers(0, 6))):
                result.append(sample(draw, TrajectoryId(group, rollout, "sub", i)))
    return draw(st.permutations(result))


def sample(draw, id):
    turns = tuple(
        Turn((1,) * draw(st.integers(1, 3)), (2,) * n, (-0.5,) * n, 0, "stop", "", Reply(), new_row=draw(st.booleans()))
        for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    )
    parent = Parent(replace(id, agent="main", invocation=0), 0, 0)
    return Sample(Trajectory(id, "t", turns, "answer", parent=parent), Reward(draw(REWARD | st.none())))


@st.composite
def rows(draw, min_size=1):
    """Rows of one agent in up to 3 groups, one per trajectory, with weights and token counts of their own."""
    sizes = draw(
        st.lists(
            st.tuples(st.integers(0, 2), REWARD, st.integers(1, 5), st.integers(1, 4)), min_size=min_size, max_size=9
        )
    )
    weights = draw(st.lists(st.floats(0.125, 8.0), min_size=len(sizes), max_size=len(sizes)))
    return [
        row(TrajectoryId(g, k, "sub", 0), prompt, n, reward, weight)
        for k, ((g, reward, n, prompt), weight) in enumerate(zip(sizes, weights, strict=True))
    ]


def row(id, prompt, sampled, reward, weight):
    mask = (False,) * prompt + (True,) * sampled
    return Row(id, 0, (1,) * len(mask), mask, tuple(-1.0 * m for m in mask), (0,) * len(mask), reward, weight)


def groups_of(rows):
    return {row.id.group: [i for i, other in enumerate(rows) if other.id.group == row.id.group] for row in rows}


# ---------------------------------------------------------------- alignment


@FEW
@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 9), st.integers(0, 2**63))
def test_alignment_gives_every_calling_rollout_the_same_total(counts, d, seed):
    calls = dict(enumerate(counts))
    for mode in ("weight", "resample"):
        weights = multiplicities(calls, d, mode, (seed, "sub"))
        for rollout, count in calls.items():
            shares = [w for (k, _), w in weights.items() if k == rollout]
            assert math.fsum(shares) == pytest.approx(d if count else 0)
            assert mode == "weight" or len(shares) >= min(count, d)


@FEW
@given(samples(), st.sampled_from(["weight", "resample"]), st.integers(1, 4), st.integers(0, 5))
def test_aligned_rows_hold_k_times_d_and_only_what_is_known(samples, mode, d, seed):
    aligned = align(samples, mode, d, seed=seed, step=1)
    known = {
        s.trajectory.id for s in samples if s.reward.value is not None and any(t.token_ids for t in s.trajectory.turns)
    }
    assert {row.id for row in aligned} <= known
    assert mode == "resample" or {row.id for row in aligned} == known
    for group in range(3):
        calling = {id.rollout for id in known if id.group == group}
        assert math.fsum(row.weight for row in aligned if row.id.group == group) == pytest.approx(len(calling) * d)


@FEW
@given(samples(), st.data())
def test_alignment_does_not_see_the_order_of_arrival(samples, data):
    shuffled = data.draw(st.permutations(samples))
    assert align(shuffled, "resample", 2, seed=0, step=0) == align(samples, "resample", 2, seed=0, step=0)


@FEW
@given(samples(), st.floats(0.1, 8.0))
def test_rows_keep_every_sampled_token_and_the_whole_weight(samples, weight):
    for each in samples:
        if each.reward.value is None:
            continue
        made = rows_of(each, weight)
        sampled = [t for turn in each.trajectory.turns for t in turn.token_ids]
        trained = [t for r in made for t, m in zip(r.token_ids, r.loss_mask, strict=True) if m]
        assert trained == sampled
        assert math.fsum(r.weight for r in made) == pytest.approx(weight if sampled else 0.0)
        assert all(len(r.token_ids) == len(r.logprobs) == len(r.versions) for r in made)


# ---------------------------------------------------------------- advantages


@FEW
@given(rows())
def test_weighted_advantages_of_a_group_sum_to_zero_with_unit_variance(rows):
    values = advantages(rows).values
    for members in groups_of(rows).values():
        total = math.fsum(rows[i].weight for i in members)
        assert abs(math.fsum(rows[i].weight * values[i] for i in members)) <= 1e-9 * total
        square = math.fsum(rows[i].weight * values[i] ** 2 for i in members) / total
        tie = len({rows[i].reward for i in members}) == 1
        assert square == pytest.approx(0.0 if tie else 1.0, abs=1e-9)


@FEW
@given(rows(), st.data())
def test_permuting_rows_permutes_advantages(rows, data):
    order = data.draw(st.permutations(range(len(rows))))
    values = advantages(rows).values
    assert advantages([rows[i] for i in order]).values == tuple(values[i] for i in order)


@FEW
@given(rows(), REWARD)
def test_equal_rewards_give_zeros(rows, reward):
    result = advantages([replace(row, reward=reward) for row in rows])
    assert set(result.values) == {0.0}
    assert result.stats.zero_variance_groups + result.stats.singleton_groups == result.stats.groups


@FEW
@given(rows(min_size=2))
def test_no_query_enters_the_statistics_of_another(rows):
    whole = advantages(rows).values
    for members in groups_of(rows).values():
        assert advantages([rows[i] for i in members]).values == tuple(whole[i] for i in members)


# ---------------------------------------------------------------- loss


def step(rows, values, mode, budget, logprob=-0.9, drop_zero=False):
    """The loss of an optimiser step, and the slope of every token of every row."""
    loss, slopes, sums = 0.0, {}, TokenSums()
    for batch in pack(rows, values, token_coefficients(rows, mode), budget, 0, drop_zero):
        logprobs = torch.full(batch.targets.shape, logprob, dtype=torch.float64, requires_grad=True)
        part, metrics = policy_loss(logprobs, batch, 0.2, 0.2)
        (gradient,) = torch.autograd.grad(part, logprobs)
        slopes |= {id: g[t].tolist() for id, g, t in zip(batch.ids, gradient, batch.targets, strict=True)}
        loss, sums = loss + part.item(), sums + metrics
    return loss, slopes, sums


@FEW
@given(rows(), st.sampled_from(MODES), st.integers(1, 60))
def test_any_split_gives_the_same_loss_and_slopes(rows, mode, budget):
    values = advantages(rows).values
    loss, slopes, sums = step(rows, values, mode, 10_000)
    split_loss, split_slopes, split_sums = step(rows, values, mode, budget)
    assert split_loss == pytest.approx(loss, abs=1e-10)
    assert split_slopes == slopes
    assert split_sums.tokens == sums.tokens == sum(row.loss_mask.count(True) for row in rows)


@FEW
@given(rows(), st.sampled_from(MODES))
def test_dropped_rows_had_slopes_of_zero_and_the_others_keep_theirs(rows, mode):
    values = advantages(rows).values
    _, slopes, _ = step(rows, values, mode, 30)
    _, kept, _ = step(rows, values, mode, 30, drop_zero=True)
    assert kept == {id: slope for id, slope in slopes.items() if any(slope)}


@FEW
@given(rows(), st.sampled_from(MODES))
def test_a_row_twice_at_half_weight_is_the_row_once(rows, mode):
    first = rows[0]
    half = replace(first, weight=first.weight / 2)
    for twin in (half, replace(half, id=replace(first.id, invocation=1))):
        doubled = [half, twin, *rows[1:]]
        assert advantages(doubled).values[1:] == pytest.approx(advantages(rows).values, abs=1e-9)
        once, twice = token_coefficients(rows, mode), token_coefficients(doubled, mode)
        assert [twice[0] + twice[1], *twice[2:]] == pytest.approx(once)


@FEW
@given(rows())
def test_a_supervised_loss_of_constant_log_probability_is_that_constant(rows):
    for mode in ("seq-mean-token-mean", "token-mean"):
        batches = pack(rows, [1.0] * len(rows), token_coefficients(rows, mode), 40, 0)
        losses = [sft_loss(torch.full(batch.targets.shape, -0.7), batch)[0].item() for batch in batches]
        assert sum(losses) == pytest.approx(0.7, rel=1e-5)
