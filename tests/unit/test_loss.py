"""Token coefficients, the clipped surrogate, and gradients that no split or padding may change."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_rows import POLICY_LOSS, SFT_LOSS, per_turn, row_of

from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.coefficients import gradient_mass, token_coefficients
from mgrpo.algorithm.loss import Objective, TokenSums, token_loss
from mgrpo.algorithm.packing import pack
from mgrpo.types import TrajectoryId

MODES = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "rollout-mean"]
ONE_ROW = torch.zeros(2, dtype=torch.int64)
VOCABULARY = 11


class Causal(torch.nn.Module):
    """A small causal model whose output depends on every earlier token and on the position."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64))
        self.position = torch.nn.Parameter(torch.randn(32, 6, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(6, VOCABULARY, generator=generator, dtype=torch.float64))

    def logprobs(self, batch):
        states = (self.embedding[batch.input_ids] + self.position[batch.position_ids]).cumsum(1).tanh()
        scores = (states @ self.head).log_softmax(-1)[:, :-1]
        chosen = scores.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return chosen[batch.targets[:, 1:]]

    def gradient(self, loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.parameters()))])


def row(sampled, rollout=0, *, prompt=2, group=0, segment=0, weight=1.0, reward=0.0, old=-2.0):
    tokens = tuple((3 * rollout + 5 * i + group) % VOCABULARY for i in range(prompt + sampled))
    mask = (False,) * prompt + (True,) * sampled
    logprobs = tuple(old - 0.1 * (i % 3) if m else 0.0 for i, m in enumerate(mask))
    return row_of(TrajectoryId(group, rollout, "a", 0), tokens, mask, logprobs, reward, weight, segment)


def surrogate(new, advantages, **options):
    """J of each token, against a policy that gave it probability 1."""
    return -token_loss(
        new, torch.zeros_like(new), advantages, torch.zeros(new.shape, dtype=torch.int64), Objective(**options)
    )


def total(rows, *, model, budget=1000, mode="seq-mean-token-mean", drop_zero=False):
    """Loss, gradient and metrics of a whole optimiser step, added over its micro-batches."""
    batches = pack(rows, advantages(rows).values, token_coefficients(rows, mode), budget, 0, drop_zero)
    parts = [POLICY_LOSS(new := model.logprobs(batch), torch.zeros_like(new), batch) for batch in batches]
    loss = torch.stack([part for part, _ in parts]).sum()
    return loss.detach(), model.gradient(loss), sum((sums for _, sums in parts), TokenSums())


ROWS = [
    row(3, 0, reward=1.0, weight=2.0),
    row(7, 1, reward=0.0),
    row(1, 2, reward=0.4, weight=0.5),
    row(5, 3, reward=0.0, prompt=9),
    row(4, 0, group=1, reward=0.3),
    row(2, 1, group=1, reward=0.3),
    row(6, 0, group=2, reward=0.7),
]


# ---------------------------------------------------------------- coefficients


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.75),
        ("seq-mean-token-mean", 0.5),
        ("seq-mean-token-sum", 1.5),
        ("seq-mean-token-sum-norm", 0.375),
        ("rollout-mean", 0.5),
    ],
)
@pytest.mark.parametrize("budget", [10, 3])
def test_aggregation_is_the_same_in_any_split(mode, expected, budget):
    """verl #6957: token losses A [1, 1, 1] and B [0]; the micro-batches are {A, B} or {A}, {B}."""
    rows = [row(3, 0, prompt=1), row(1, 1, prompt=1)]
    batches = pack(rows, per_turn(rows, [1.0, 1.0]), token_coefficients(rows, mode, 4.0), budget, 0)
    assert len(batches) == (1 if budget == 10 else 2)
    token_losses = {0: 1.0, 1: 0.0}
    loss = 0.0
    for batch in batches:
        new = torch.tensor([-token_losses[batch.ids[b].rollout] for b in batch.row])
        loss += float(SFT_LOSS(new, torch.zeros_like(new), batch)[0])
    assert loss == pytest.approx(expected)


def test_weights_enter_numerator_and_denominator():
    rows = [row(2, 0, weight=3.0), row(4, 1, weight=1.0)]
    assert token_coefficients(rows) == pytest.approx([3 / (2 * 4), 1 / (4 * 4)])
    assert token_coefficients(rows, "token-mean") == pytest.approx([3 / 10, 1 / 10])
    assert token_coefficients(rows, "seq-mean-token-sum") == pytest.approx([3 / 4, 1 / 4])


@pytest.mark.parametrize("mode", MODES)
def test_splitting_a_trajectory_into_segments_changes_nothing(mode):
    whole = token_coefficients([row(6, 0, weight=3.0), row(4, 1)], mode)
    split = token_coefficients([row(2, 0, weight=1.0), row(4, 0, weight=2.0, segment=1), row(4, 1)], mode)
    assert split == pytest.approx([whole[0], whole[0], whole[1]])


@pytest.mark.parametrize("mode", MODES)
def test_a_row_with_everything_masked_leaves_the_denominator(mode):
    """trl #6439."""
    assert token_coefficients([row(3, 0), row(0, 1, prompt=5)], mode) == token_coefficients([row(3, 0)], mode) + [0.0]
    assert token_coefficients([row(0, 0)], mode) == [0.0]
    assert token_coefficients([], mode) == []


# ---------------------------------------------------------------- the surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "flows"),
    [
        (1.5, 1.0, 1.2, False),
        (1.1, 1.0, 1.1, True),
        (0.5, 1.0, 0.5, True),
        (0.5, -1.0, -0.8, False),
        (0.1, -1.0, -0.8, False),
        (1.5, -1.0, -1.5, True),
        (10.0, -1.0, -10.0, True),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clipping_is_pessimistic_on_both_sides(ratio, advantage, objective, flows):
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value = surrogate(new, torch.tensor([advantage]))
    assert value.item() == pytest.approx(objective)
    (gradient,) = torch.autograd.grad(value, new)
    assert gradient.item() == pytest.approx(ratio * advantage if flows else 0.0)


def test_the_two_clip_ratios_are_independent():
    new = torch.log(torch.tensor([1.5, 0.5]))
    found = surrogate(new, torch.tensor([1.0, -1.0]), clip_ratio_low=0.1, clip_ratio_high=0.28)
    assert found.tolist() == pytest.approx([1.28, -0.9])


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    objective = -token_loss(new, new.detach(), torch.tensor([0.7, -0.3]), ONE_ROW, Objective()).sum()
    assert torch.autograd.grad(objective, new)[0].tolist() == pytest.approx([0.7, -0.3])


def test_a_policy_far_from_its_sampler_stays_finite():
    new = torch.tensor([0.0, -1e4], requires_grad=True)
    value = token_loss(new, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, -1.0]), ONE_ROW, Objective()).sum()
    assert torch.isfinite(value) and torch.isfinite(torch.autograd.grad(value, new)[0]).all()


# ---------------------------------------------------------------- whole steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [1, 15, 40])
def test_micro_batches_and_padding_do_not_change_the_gradient(mode, budget):
    model = Causal()
    loss, gradient, metrics = total(ROWS, model=model, mode=mode)
    split_loss, split_gradient, split_metrics = total(ROWS, model=model, mode=mode, budget=budget)
    assert abs(loss - split_loss) <= 1e-10
    assert (gradient - split_gradient).abs().max() <= 1e-10
    assert gradient.abs().max() > 1e-3
    assert split_metrics.metrics() == pytest.approx(metrics.metrics())


@pytest.mark.parametrize("mode", MODES)
def test_dropping_rows_of_advantage_zero_does_not_change_the_gradient(mode):
    model = Causal()
    loss, gradient, metrics = total(ROWS, model=model, mode=mode)
    dropped_loss, dropped_gradient, dropped_metrics = total(ROWS, model=model, mode=mode, drop_zero=True)
    assert abs(loss - dropped_loss) <= 1e-10
    assert (gradient - dropped_gradient).abs().max() <= 1e-10
    assert (metrics.tokens, dropped_metrics.tokens) == (28, 16)


def test_an_empty_mask_is_loss_zero_and_no_metric():
    """NeMo-RL #166."""
    empty = row(0, 0)
    batch = pack([empty], per_turn([empty], [1.0]), [0.0], 100, 0)[0]
    logprobs = torch.zeros(0, requires_grad=True)
    for function in (POLICY_LOSS, SFT_LOSS):
        loss, sums = function(logprobs, torch.zeros(0), batch)
        assert loss.item() == 0.0
        assert sums.metrics() == {}


def test_supervised_loss_is_the_weighted_negative_log_likelihood():
    rows = [row(2, 0, weight=3.0), row(4, 1, weight=1.0)]
    batch = pack(rows, per_turn(rows, [1.0, 1.0]), token_coefficients(rows), 100, 0)[0]
    logprobs = torch.tensor([-0.5 if batch.ids[b].rollout == 0 else -1.0 for b in batch.row])
    loss, sums = SFT_LOSS(logprobs, torch.zeros_like(logprobs), batch)
    assert loss.item() == pytest.approx((3 * 0.5 + 1 * 1.0) / 4)
    assert (sums.tokens, sums.metrics()["nll"]) == (6, pytest.approx((2 * 0.5 + 4 * 1.0) / 6))


def test_metrics_of_known_tokens():
    source = row_of(TrajectoryId(0, 0, "a", 0), (1,) * 5, (False,) + (True,) * 4)
    batch = pack([source], [(1.0,)], [0.25], 10, 0)[0]
    ratios = torch.tensor([1.5, 1.1, 0.5, 1.0])
    metrics = POLICY_LOSS(ratios.log() - 1.0, torch.full((4,), 0.5), batch)[1].metrics()
    logs = [math.log(1.5), math.log(1.1), math.log(0.5), 0.0]
    assert (metrics["clip_fraction"], metrics["entropy"]) == (0.25, 0.5)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["approx_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in logs) / 4, rel=1e-5)
    assert metrics["rollout_kl"] == pytest.approx(metrics["approx_kl"])
    assert metrics["logprob_abs_diff"] == pytest.approx(sum(abs(x) for x in logs) / 4, rel=1e-5)


def test_gradient_mass_is_told_by_agent_and_invocation():
    rows = [row(2, 0), row(3, 1)]
    mass = gradient_mass(rows, per_turn(rows, [0.5, -1.0]), [0.25, 0.1])
    assert mass == {("a", 0): pytest.approx(0.25 * 0.5 * 2 + 0.1 * 1.0 * 3)}


def test_metric_sums_add_up():
    left, right = TokenSums(1, {"kl": 1.0}, {"max": 2.0}), TokenSums(3, {"kl": 5.0, "nll": 4.0}, {"max": 1.0})
    assert (left + right).metrics() == {"kl": 1.5, "nll": 1.0, "max": 2.0}
    assert left + TokenSums() == left


def test_a_team_of_one_is_plain_grpo():
    """GRPO written out: mean over K of token means of the clipped surrogate, population sigma, no epsilon."""
    rewards, lengths = [1.0, 0.1, 0.0, 1.0], [3, 5, 2, 4]
    rows = [row(n, k, reward=r) for k, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    model = Causal()
    loss, gradient, _ = total(rows, model=model, budget=12)

    scores = torch.tensor(rewards, dtype=torch.float64)
    scores = (scores - scores.mean()) / scores.std(correction=0)
    objective = 0.0
    for each, advantage in zip(rows, scores, strict=True):
        tokens = torch.tensor([each.token_ids])
        states = (model.embedding[tokens] + model.position[: tokens.shape[1]]).cumsum(1).tanh()
        new = (states @ model.head).log_softmax(-1)[0, 1:-1].gather(-1, tokens[0, 2:, None])[:, 0]
        ratio = (new - torch.tensor(each.logprobs[2:], dtype=torch.float64)).exp()
        objective = objective + torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() / 4
    assert loss.item() == pytest.approx(-objective.item(), rel=1e-6)
    torch.testing.assert_close(gradient, model.gradient(-objective), rtol=1e-5, atol=1e-7)
