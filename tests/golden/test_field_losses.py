"""Faults that other trainers have had in their losses and estimators, each with its input and the right value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from linear_policy import Bigram, noting_policy
from tiny_recipe import table
from tiny_rows import SFT_LOSS, per_turn, random_rows, row_of
from torch import Tensor

from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.coefficients import LossAggMode, token_coefficients
from mgrpo.algorithm.correction import is_weights, kept
from mgrpo.algorithm.loss import KlEstimator, Objective, kl_estimate, objective_loss, policy_ratio, token_loss
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.config import resolve
from mgrpo.errors import ConfigError
from mgrpo.policy.step import StepPlan, take_step
from mgrpo.policy.update import Policy, Schedule, score
from mgrpo.types import Row, TrajectoryId

REINFORCE_LOSS = Objective("reinforce")
NUMBER = torch.Generator().manual_seed(0)
TABLE = torch.randn(8, 8, generator=NUMBER, dtype=torch.float64)


def row(sampled: int, rollout: int = 0, group: int = 0, reward: float = 0.0) -> Row:
    """One token of prompt, then ``sampled`` tokens with log-probability -1."""
    tokens = [1 + (3 * rollout + 5 * group + i * i) % 7 for i in range(sampled + 1)]
    return row_of(TrajectoryId(group, rollout, "a", 0), tokens, [i > 0 for i in range(sampled + 1)], None, reward)


def one_batch(sampled: int, advantage: float = 1.0) -> Batch:
    rows = [row(sampled)]
    (batch,) = pack(rows, [(advantage,)], token_coefficients(rows), 100, pad_id=0)
    return batch


# ---------------------------------------------------------------- denominators

A, B = row(3, 0), row(1, 1)  # their token losses are [1, 1, 1] and [0]
AGGREGATED: list[tuple[LossAggMode, float]] = [
    ("token-mean", 0.75),
    ("seq-mean-token-mean", 0.5),
    ("seq-mean-token-sum", 1.5),
    ("seq-mean-token-sum-norm", 0.375),
    ("rollout-mean", 0.5),
]


@pytest.mark.parametrize(("mode", "expected"), AGGREGATED)
@pytest.mark.parametrize(
    ("ranks", "budget"), [([[0, 1]], 100), ([[0, 1]], 4), ([[0], [1]], 100)], ids=["AB", "A, B", "two ranks"]
)
def test_a_loss_is_the_same_in_any_micro_batches_and_on_any_ranks(
    mode: LossAggMode, expected: float, ranks: list[list[int]], budget: int
) -> None:
    """R-29: 3/4, 1/2, 3/2 and, by a constant of 4, 3/8; a mean of the micro-batches' token means would be 1/2.
    A rank packs its own rows with the coefficients of all."""
    rows = [A, B]
    coefficients = token_coefficients(rows, mode, scale_factor=4.0)
    total = 0.0
    for own in ranks:
        mine = [rows[i] for i in own]
        for batch in pack(mine, per_turn(mine, [1.0] * len(mine)), [coefficients[i] for i in own], budget, 0):
            losses = [float(batch.ids[r].rollout == 0) for r in batch.row.tolist()]
            total += float(SFT_LOSS(-torch.tensor(losses), torch.zeros(len(losses)), batch)[0])
    assert total == pytest.approx(expected, abs=1e-6)


def token_mean_gradient(rows: Sequence[Row], values: Sequence[float]) -> Tensor:
    """d/d table of - mean over all sampled tokens of A log pi, written out."""
    logits = TABLE.clone().requires_grad_()
    terms = []
    for one, value in zip(rows, values, strict=True):
        before, after = torch.tensor(one.token_ids[:-1]), torch.tensor(one.token_ids[1:])
        terms.append(-value * torch.log_softmax(logits[before], -1).gather(1, after[:, None])[:, 0])
    torch.cat(terms).mean().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_every_optimiser_step_is_the_token_mean_of_its_own_tokens(num_iterations: int) -> None:
    """R-30: four optimiser steps on four groups, each in at least two micro-batches. No step's gradient is scaled by
    how many others there are, nor by how it was accumulated."""
    rows = [row(2 + group + 3 * k, k, group) for group in range(4) for k in (0, 1)]
    values = [1.0 - 0.3 * i for i in range(len(rows))]
    policy, gradients = noting_policy(TABLE)
    plan = StepPlan(REINFORCE_LOSS, 8, 0, loss_agg_mode="token-mean", num_minibatches=4, num_iterations=num_iterations)
    taken = take_step(policy, rows, per_turn(rows, values), plan, 0)
    assert len(gradients) == 4 * num_iterations
    for step, gradient in enumerate(gradients):
        own = [i for i, one in enumerate(rows) if one.id.group == step % 4]
        assert len(pack([rows[i] for i in own], [(1.0,)] * 2, [1.0] * 2, 8, 0)) == 2
        expected = token_mean_gradient([rows[i] for i in own], [values[i] for i in own])
        assert torch.allclose(gradient, expected, atol=1e-6) and expected.abs().max() > 0.01
    assert taken.metrics["tokens"] == num_iterations * sum(one.sampled for one in rows)
    shares = [one.sampled * abs(value) for one, value in zip(rows, values, strict=True)]
    of_steps = [sum(shares[i : i + 2]) / (rows[i].sampled + rows[i + 1].sampled) for i in range(0, 8, 2)]
    assert taken.mass == {("a", 0): pytest.approx(sum(of_steps) / 4)}


def masked(rollout: int) -> Row:
    return row_of(TrajectoryId(0, rollout, "a", 0), (1, 2, 3), (False,) * 3)


@pytest.mark.parametrize(("mode", "expected"), AGGREGATED)
def test_what_is_masked_is_in_no_denominator(mode: LossAggMode, expected: float) -> None:
    """R-31: beside a masked sequence the others count exactly what they count alone."""
    alone = token_coefficients([A, B], mode, 4.0)
    assert token_coefficients([A, masked(7), B], mode, 4.0) == [alone[0], 0.0, alone[1]]
    assert 3 * alone[0] == pytest.approx(expected)


@pytest.mark.parametrize("objective", [REINFORCE_LOSS, Objective(kl_coef=0.1), Objective(entropy_coef=0.1)])
def test_a_step_of_masked_sequences_alone_is_skipped(objective: Objective) -> None:
    """R-31, R-32: no NaN of 0 / 0, no update, no loss in the metrics (unknown is not zero)."""
    policy, gradients = noting_policy(TABLE)
    rows = [masked(0), masked(1)]
    plan = StepPlan(objective, 100, 0)
    reference = Bigram(TABLE) if objective.kl_coef else None
    assert take_step(policy, rows, [(1.0,), (1.0,)], plan, 0, reference).metrics == {}
    assert gradients == []


@pytest.mark.parametrize("objective", [Objective(), Objective(importance_sampling_level="sequence", entropy_coef=0.1)])
def test_an_empty_mask_is_loss_zero_with_a_finite_gradient(objective: Objective) -> None:
    """R-32: a micro-batch in which nothing was sampled: 0.0, gradient 0, and no metric."""
    (batch,) = pack([masked(0)], [(1.0,)], [0.0], 100, 0)
    model = Bigram(TABLE)
    loss, sums = objective_loss(*score(model, batch, 1.0, entropy_grad=True), batch, objective)
    loss.backward()
    assert (float(loss.detach()), sums.metrics()) == (0.0, {})
    assert model.table.grad is not None and not model.table.grad.any()


# ---------------------------------------------------------------- KL to a reference


def test_a_nan_at_a_masked_position_stays_there() -> None:
    """R-33: log pi [.2, .3, .5, .7], reference [.1, .2, .4, nan], weights [1, .5, .25, 0]. k3 of .1 is exp(-.1) - 1 +
    .1 = .004837; the masked position is no target, so its NaN meets neither loss nor gradient."""
    whole = replace(one_batch(4, 0.0), coefficients=torch.tensor([1.0, 0.5, 0.25, 0.0]))
    whole = replace(whole, ref_logprobs=torch.tensor([0.1, 0.2, 0.4, math.nan]))
    mask = torch.tensor([True, True, True, False])
    logprobs = torch.tensor([0.2, 0.3, 0.5, 0.7], requires_grad=True)
    batch = whole.keeping(mask)
    assert batch.ref_logprobs is not None
    k3 = kl_estimate(logprobs[mask], batch.ref_logprobs, "k3")
    assert k3.tolist() == pytest.approx([0.004837] * 3, abs=1e-6)
    loss, _ = objective_loss(logprobs[mask], torch.zeros(3), batch, Objective(kl_coef=1.0))
    (slopes,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx(1.75 * 0.0048374, abs=1e-6)
    # d k3 / d log pi = 1 - exp(-.1)
    assert slopes.tolist() == pytest.approx([c * (1 - math.exp(-0.1)) for c in (1.0, 0.5, 0.25, 0.0)], abs=1e-6)


def test_a_broken_reference_off_the_targets_is_never_read() -> None:
    """R-33 from the model on: the reference is NaN wherever the last token was not followed by a sampled one."""
    source = row_of(TrajectoryId(0, 0, "a", 0), (1, 2, 3, 4), (False, True, False, False))
    spoilt = TABLE.clone()
    spoilt[[0, 2, 3, 4]] = math.nan
    policy, gradients = noting_policy(TABLE)
    taken = take_step(policy, [source], [(1.0, 0.0)], StepPlan(Objective(kl_coef=0.5), 100, 0), 0, Bigram(spoilt))
    assert taken.metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(gradients[0]).all() and gradients[0].any()


@pytest.mark.parametrize(
    ("estimator", "slope"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))], ids=["k1", "k2", "k3"]
)
def test_the_kl_term_has_a_gradient(estimator: KlEstimator, slope: float) -> None:
    """R-34: pi is .5 above the reference in log-probability. d k1 = 1, d k2 = .5, d k3 = 1 - exp(-.5), times the
    coefficient .2. In the logits the slope of a token is that times (1 - pi)."""
    batch = replace(one_batch(1, 0.0), ref_logprobs=torch.tensor([-1.5]))
    logits = torch.tensor([[math.e - 1.0, 1.0]]).log().requires_grad_()  # pi of the second is exp(-1)
    logprobs = torch.log_softmax(logits, -1)[:, 1]
    loss, _ = objective_loss(logprobs, torch.zeros(1), batch, Objective(kl_coef=0.2, kl_estimator=estimator))
    loss.backward()
    assert logits.grad is not None
    pull = 0.2 * slope * (1 - math.exp(-1))
    assert logits.grad.tolist() == [pytest.approx([-pull, pull], abs=1e-6)]


def moved(kl_coef: float, differs: bool = True) -> bool:
    """Whether a step on a group of equal rewards moves the weights."""
    policy = Policy(Bigram(TABLE))
    policy.begin(Schedule(1e-3, 10))
    rows = [replace(one, reward=0.5) for one in random_rows(4, vocabulary=8)]
    compared = advantages(rows)
    assert compared.stats.zero_variance_groups == 1 and not any(map(any, compared.values))
    reference = Bigram(TABLE.flip(0) if differs else TABLE) if kl_coef else None
    taken = take_step(policy, rows, compared.values, StepPlan(Objective(kl_coef=kl_coef), 100, 0), 0, reference)
    assert ("kl" in taken.metrics) == (kl_coef > 0.0)
    assert all(pull == 0.0 for pull in taken.mass.values())
    return not torch.equal(policy.model.table, TABLE)


def test_a_group_without_spread_still_feels_the_kl_term() -> None:
    """R-41: its advantages are 0, but with kl_coef > 0 the step pulls towards the reference; with 0 there is none."""
    assert moved(kl_coef=0.1)
    assert not moved(kl_coef=0.0)
    assert not moved(kl_coef=0.1, differs=False)  # k3 and its gradient are 0 where the two agree


# ---------------------------------------------------------------- the policy that sampled


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.0181), (1.0, -0.1269)])
def test_the_learner_scores_at_the_temperature_of_sampling(temperature: float, expected: float) -> None:
    """R-35: logits [2, 0]: log softmax([4, 0])[0] = -log(1 + e^-4) = -.0181 at T = .5, -.1269 at T = 1."""
    source = row_of(TrajectoryId(0, 0, "a", 0), (0, 0), (False, True))
    (batch,) = pack([source], [(1.0,)], [1.0], 100, 0)
    policy = Policy(Bigram(torch.tensor([[2.0, 0.0], [0.0, 0.0]])), temperature)
    assert policy.scored(batch).tolist() == pytest.approx([expected], abs=5e-5)
    logprobs, entropy = score(policy.model, batch, temperature)
    p = math.exp(expected)
    assert logprobs.tolist() == pytest.approx([expected], abs=5e-5)
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)], abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_training_at_no_temperature_is_refused(temperature: float) -> None:
    """R-35: at T = 0 the policy is not the one that is trained."""
    recipe = table()
    recipe["agents"]["planner"]["temperature"] = temperature
    with pytest.raises(ConfigError, match=r"agents\.planner\.temperature: must be greater than 0"):
        resolve(recipe)


@pytest.mark.parametrize("refused", [{"top_p": 0.6}, {"top_k": 50}, {"min_p": 0.1}])
def test_sampling_from_a_part_of_the_vocabulary_is_refused_for_training(refused: dict[str, Any]) -> None:
    """R-35: a loss over the whole vocabulary is not that of a truncated distribution."""
    recipe = table()
    recipe["agents"]["planner"] |= refused
    (key,) = refused
    with pytest.raises(ConfigError, match=rf"agents\.planner\.{key}: refused"):
        resolve(recipe)
    recipe["agents"]["planner"] |= {"trainable": False}
    resolve(recipe)


ALONE = torch.tensor([0, 0, 0])


def test_importance_weights_are_truncated_from_above_alone() -> None:
    """R-37: log-differences [1, 0, -1] and a cap of 2: exp gives 2.718, 1, .3679. Of the whole row the sum is 0, so
    every token's weight is 1; of two rows each has its own."""
    old, behaviour = torch.tensor([1.0, 0.0, -1.0]) - 1.0, torch.tensor([-1.0, -1.0, -1.0])
    assert is_weights(old, behaviour, ALONE, "token", 2.0).tolist() == pytest.approx([2.0, 1.0, 0.3679], abs=5e-5)
    assert is_weights(old, behaviour, ALONE, "sequence", 2.0).tolist() == pytest.approx([1.0] * 3)
    rows = torch.tensor([0, 0, 1])
    assert is_weights(old, behaviour, rows, "sequence", 2.0).tolist() == pytest.approx([2.0, 2.0, 0.3679], abs=5e-5)
    assert is_weights(old, behaviour, ALONE, "none", 2.0).tolist() == [1.0] * 3


def test_importance_weights_enter_the_loss() -> None:
    """R-37: the option is no no-op. A = 1, ratio 1 (before the first update): minus the mean of [2, 1, .3679], and
    so is the gradient, in which the weights are constants."""
    batch = one_batch(3)
    logprobs = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    loss, _ = objective_loss(logprobs, torch.zeros(3), batch, Objective(rollout_is="token"))
    (slopes,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx(-(2.0 + 1.0 + math.exp(-1)) / 3, abs=1e-6)
    assert slopes.tolist() == pytest.approx([-2 / 3, -1 / 3, -math.exp(-1) / 3], abs=1e-6)


def test_tokens_outside_the_bounds_are_rejected() -> None:
    """R-37, IcePop: log-differences [2, 0, -1] in [.5, 5]: ratios 7.39, 1, .37, so the second alone stays. The whole
    row's ratio e^1 stays."""
    old, behaviour = torch.tensor([2.0, 0.0, -1.0]), torch.zeros(3)
    assert kept(old, behaviour, ALONE, "token", (0.5, 5.0)).tolist() == [False, True, False]
    assert kept(old, behaviour, ALONE, "sequence", (0.5, 5.0)).tolist() == [True] * 3
    assert kept(old, behaviour, ALONE, "none", (0.5, 5.0)).tolist() == [True] * 3


def test_rejected_tokens_leave_the_denominators_too() -> None:
    """R-37 in a step: of A's three tokens one is rejected, so the token mean is over 2 + 1 tokens."""
    rows = [row(3, 0), row(1, 1)]
    policy, gradients = noting_policy(TABLE)
    there = [policy.scored(batch) for batch in pack(rows, [(1.0,)] * 2, [1.0] * 2, 100, 0)][0].tolist()
    stored = [(there[0], there[1] - 2.0, there[2]), (there[3],)]
    rows = [
        replace(one, turns=(replace(one.turns[0], logprobs=logprobs),))
        for one, logprobs in zip(rows, stored, strict=True)
    ]
    plan = StepPlan(REINFORCE_LOSS, 100, 0, loss_agg_mode="token-mean", rollout_rs="token")
    taken = take_step(policy, rows, [(1.0,), (1.0,)], plan, 0)
    assert (taken.metrics["tokens"], taken.metrics["rejected_fraction"]) == (3.0, 0.25)
    logits = TABLE.clone().requires_grad_()
    pairs = [(t[i], t[i + 1]) for t in (one.token_ids for one in rows) for i in range(len(t) - 1)]
    del pairs[1]
    before, after = torch.tensor(pairs).T
    (-torch.log_softmax(logits[before], -1).gather(1, after[:, None]).mean()).backward()
    assert logits.grad is not None and torch.allclose(gradients[0], logits.grad, atol=1e-6)


# ---------------------------------------------------------------- ratios and clipping


def test_the_ratio_of_a_sequence_is_the_geometric_mean() -> None:
    """R-38: log-ratios [.1, -.3, .2] have mean 0, so the ratio is 1; the mean of the tokens' ratios is 1.0225."""
    log_ratios = torch.tensor([0.1, -0.3, 0.2])
    assert policy_ratio(log_ratios, torch.zeros(3), ALONE, "sequence").tolist() == pytest.approx([1.0] * 3)
    assert float(policy_ratio(log_ratios, torch.zeros(3), ALONE, "token").mean()) == pytest.approx(1.0225, abs=5e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flows"),
    [(10.0, -1.0, 3.0, False), (0.1, -1.0, 0.8, False), (1.5, 1.0, -1.2, False), (0.5, 1.0, -0.5, True)],
)
def test_dual_clipping_bounds_negative_advantages_alone(
    ratio: float, advantage: float, expected: float, flows: bool
) -> None:
    """R-39, c = 3 and eps = .2: the loss, and the gradient, which is nonzero where nothing was clipped."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    objective = Objective(clip_ratio_c=3.0)
    loss = token_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), torch.tensor([0]), objective)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.tolist() == pytest.approx([expected])
    assert slope.tolist() == pytest.approx([-ratio * advantage if flows else 0.0])
