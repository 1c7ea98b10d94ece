"""Hand-worked numbers: the paper's equations on one query, and what alignment weights keep of random resampling.

The example: reward weights b = (.1, .4, .5), K = 3 rollouts, d = 2, with one, two and three calls. Rollout 0: right,
expert .8. Rollout 1: wrong, (valid, .6) and (invalid, .9). Rollout 2: right, experts .2, 1, .5.
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import pytest
import torch
from tiny_rows import POLICY_LOSS, per_turn, row_of

from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.alignment import align, multiplicities
from mgrpo.algorithm.coefficients import token_coefficients
from mgrpo.algorithm.packing import pack
from mgrpo.algorithm.rewards import rewards
from mgrpo.types import Findings, Grade, Parent, Reply, Rollout, Sample, Trajectory, TrajectoryId, Turn

EXPERTS = [[0.8], [0.6, 0.9], [0.2, 1.0, 0.5]]
RIGHT = [1.0, 0.0, 1.0]
INVALID = (1, 1)
COUNTS = {0: 1, 1: 2, 2: 3}
REWARDS = {(0, 0): 0.9, (1, 0): 0.4, (1, 1): 0.0, (2, 0): 0.6, (2, 1): 1.0, (2, 2): 0.75}
WEIGHTS = {"main": {"format": 0.1, "correct": 0.9}, "sub": {"format": 0.1, "correct_main": 0.4, "expert": 0.5}}
# The three equally likely results of keeping two of the third rollout's three calls.
OUTCOMES = [{(0, 0): 2.0, (1, 0): 1.0, (1, 1): 1.0} | {(2, i): 1.0 for i in range(3) if i != gone} for gone in range(3)]


def trajectory(agent, rollout, i, parent=None, valid=True):
    reply = Reply(answer=Findings("x")) if valid else Reply(error="unclosed tag")
    turn = Turn((1, 2), (3,) * (i + 2), (-1.0,) * (i + 2), 0, "stop", "x", reply)
    return Trajectory(TrajectoryId(0, rollout, agent, i), "t", (turn,), "answer", reply.answer, parent)


def samples(agent):
    """The example's samples of one agent, rewarded by equations (4) and (5)."""
    result = []
    for k, experts in enumerate(EXPERTS):
        main = trajectory("main", k, 0)
        link = Parent(main.id, 0, 0)
        subs = tuple(trajectory("sub", k, i, link, valid=(k, i) != INVALID) for i in range(len(experts)))
        grades = {main.id: Grade(RIGHT[k])} | {s.id: Grade(e) for s, e in zip(subs, experts, strict=True)}
        rollout = Rollout(0, k, (main, *subs))
        worth = rewards(rollout, grades, WEIGHTS)
        result += [Sample(t, worth[t.id]) for t in rollout.trajectories if t.id.agent == agent]
    return result


def rows_with(weights, copies=((0, None),)):
    """Rows of the example's rewards under ``weights``; several ``copies`` (offset, weights) make a larger group."""
    return [
        row_of(TrajectoryId(0, k + 3 * offset, "sub", i), (1, 2), (False, True), None, REWARDS[k, i], w)
        for offset, own in copies
        for (k, i), w in (own or weights).items()
    ]


def flat(result):
    """One advantage per row; the example's rows have one turn."""
    return [value for (value,) in result.values]


def moments(weights, copies=((0, None),)):
    stats = advantages(rows_with(weights, copies)).stats
    return stats.reward_mean, stats.reward_std


def counted(mode, seed=0):
    """Multiplicities of the example's calls by (rollout, invocation), without the dropped ones."""
    drawn = {k: multiplicities(count, 2, mode, (seed, k)) for k, count in COUNTS.items()}
    return {(k, i): share for k, shares in drawn.items() for i, share in enumerate(shares) if share}


WEIGHTED = counted("weight")


# ---------------------------------------------------------------- the paper's equations


def test_main_agent():
    rows = [
        row_of(TrajectoryId(0, k, "main", 0), (1, 2), (False, True), None, reward)
        for k, reward in enumerate([1.0, 0.1, 0.0, 1.0])
    ]
    result = advantages(rows)
    assert flat(result) == pytest.approx([0.9972413741, -0.8922685978, -1.1022141503, 0.9972413741], abs=1e-9)
    assert result.stats.reward_mean == pytest.approx(0.525, abs=1e-9)
    assert result.stats.reward_std == pytest.approx(0.4763139721, abs=1e-9)


def test_rewards_of_the_example():
    worth = {(s.trajectory.id.rollout, s.trajectory.id.invocation): s.reward.value for s in samples("sub")}
    assert worth == pytest.approx(REWARDS, abs=1e-12)
    assert [s.reward.value for s in samples("main")] == pytest.approx([1.0, 0.1, 1.0])


def test_without_alignment():
    stats = advantages(align(samples("sub"), "none", 2, seed=0, step=0)).stats
    assert (stats.reward_mean, stats.reward_std) == pytest.approx((0.6083333, 0.3346848), abs=1e-6)


def test_aligned_by_weight():
    rows = align(samples("sub"), "weight", 2, seed=0, step=0)
    result = advantages(rows)
    assert [row.weight for row in rows] == pytest.approx([2, 1, 1, 2 / 3, 2 / 3, 2 / 3])
    assert (result.stats.reward_mean, result.stats.reward_std) == pytest.approx((0.6277778, 0.3408414), abs=1e-6)
    assert flat(result) == pytest.approx([0.7987, -0.6683, -1.8418, -0.0815, 1.0921, 0.3586], abs=5e-5)


def test_aligned_by_resampling():
    """The seed whose draw drops the third rollout's second call, against the paper's statistics over K * d rows."""
    drawn = (align(samples("sub"), "resample", 2, seed=seed, step=0) for seed in range(50))
    rows = next(r for r in drawn if [row.id.invocation for row in r if row.id.rollout == 2] == [0, 2])
    result = advantages(rows)
    assert sum(row.weight for row in rows) == 6
    assert (result.stats.reward_mean, result.stats.reward_std) == pytest.approx((0.5916667, 0.3167763), abs=1e-6)
    repeated = [v for v, row in zip(flat(result), rows, strict=True) for _ in range(int(row.weight))]
    assert repeated == pytest.approx([0.97335, 0.97335, -0.60505, -1.86777, 0.02631, 0.49983], abs=5e-6)


# ---------------------------------------------------------------- weights against resampling


def test_the_resampled_outcomes_are_the_three_and_equally_likely():
    drawn = [counted("resample", seed) for seed in range(300)]
    assert all(outcome in OUTCOMES for outcome in drawn)
    assert all(abs(drawn.count(outcome) - 100) < 40 for outcome in OUTCOMES)


def test_expected_multiplicity_mean_and_mean_square_are_equal():
    for key, weight in WEIGHTED.items():
        assert sum(outcome.get(key, 0.0) for outcome in OUTCOMES) / 3 == pytest.approx(weight)
    mean, std = moments(WEIGHTED)
    resampled = [moments(outcome) for outcome in OUTCOMES]
    assert sum(mu for mu, _ in resampled) / 3 == pytest.approx(mean, abs=1e-12)
    assert sum(mu**2 + sigma**2 for mu, sigma in resampled) / 3 == pytest.approx(mean**2 + std**2, abs=1e-12)


def test_expected_variance_is_less_by_the_variance_of_the_mean():
    mean, std = moments(WEIGHTED)
    resampled = [moments(outcome) for outcome in OUTCOMES]
    expected_variance = sum(sigma**2 for _, sigma in resampled) / 3
    assert std**2 == pytest.approx(0.1161728, abs=1e-6)
    assert expected_variance == pytest.approx(0.1154167, abs=1e-6)
    assert expected_variance == pytest.approx(std**2 - sum((mu - mean) ** 2 for mu, _ in resampled) / 3, abs=1e-12)
    assert sum(sigma for _, sigma in resampled) / 3 == pytest.approx(0.3393539, abs=1e-6)


def expected_sigma(copies):
    """E[sigma] of a group made of ``copies`` of the example, each drawn on its own; enumerated."""
    total = 0.0
    for draws in combinations_with_replacement(range(3), copies):
        ways = math.factorial(copies) / math.prod(math.factorial(draws.count(i)) for i in range(3))
        total += ways / 3**copies * moments({}, [(c, OUTCOMES[i]) for c, i in enumerate(draws)])[1]
    return total


def test_the_gap_in_sigma_shrinks_as_rollouts_grow():
    sigma = moments(WEIGHTED)[1]
    gaps = [sigma - expected_sigma(copies) for copies in (1, 2, 4, 8)]
    assert gaps[0] == pytest.approx(0.3408414 - 0.3393539, abs=1e-6)
    assert all(0 < after < 0.6 * before for before, after in zip(gaps, gaps[1:], strict=False))


def gradient(weights, fixed):
    """d loss / d log-probability of every call's tokens, with advantages held fixed."""
    rows = rows_with(weights)
    values = [fixed[row.id.rollout, row.id.invocation] for row in rows]
    (batch,) = pack(rows, per_turn(rows, values), token_coefficients(rows), 100, 0)
    logprobs = torch.full(batch.row.shape, -1.0, requires_grad=True)
    loss, _ = POLICY_LOSS(logprobs, torch.zeros_like(logprobs), batch)
    (slopes,) = torch.autograd.grad(loss, logprobs)
    return {(id.rollout, id.invocation): float(slopes[batch.row == b].sum()) for b, id in enumerate(batch.ids)}


def test_gradients_with_fixed_advantages_are_equal_in_expectation():
    fixed = dict(zip(WEIGHTED, flat(advantages(rows_with(WEIGHTED))), strict=True))
    weighted = gradient(WEIGHTED, fixed)
    enumerated = [gradient(outcome, fixed) for outcome in OUTCOMES]
    sampled = [gradient(counted("resample", seed), fixed) for seed in range(200)]
    for key, slope in weighted.items():
        assert sum(g.get(key, 0.0) for g in enumerated) / 3 == pytest.approx(slope, abs=1e-7)
        assert sum(g.get(key, 0.0) for g in sampled) / 200 == pytest.approx(slope, abs=0.03)
