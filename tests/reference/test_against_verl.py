"""Equal numbers to verl 0.9.1's own code on random tensors, in float64, wherever the two definitions coincide.

Where they do not, the test's name says so and the assertion shows that the difference is exactly that.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from published_verl import ActorConfig, core_algos, rollout_correction, torch_functional
from token_grid import (
    Grid,
    Loss,
    assert_equal_losses,
    random_grid,
    random_groups,
    row_of,
    value_and_gradients,
    weighed,
)
from torch import Tensor

from mgrpo.algorithm.advantages import Comparison, advantages
from mgrpo.algorithm.coefficients import LossAggMode, token_coefficients
from mgrpo.algorithm.correction import Level, is_weights, kept
from mgrpo.algorithm.loss import KlEstimator, Objective, kl_estimate, objective_loss
from mgrpo.policy.update import score
from mgrpo.types import Row

SEEDS = range(4)
SIZES = [4, 2, 7, 3]  # of the groups; verl needs no equal ones
GRPO_EPSILON = 1e-6  # added to the group's std
WHITEN_EPSILON = 1e-8  # added to the variance
LENGTH = 40  # loss_scale_factor
MODES: list[LossAggMode] = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


# ---------------------------------------------------------------- advantages


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_advantages_are_equal_but_for_the_epsilon_in_the_std(seed: int) -> None:
    rows = random_groups(SIZES, seed)
    std = torch.cat([part.std().expand(len(part)) for part in _rewards(rows).split(SIZES)])
    theirs = _their_advantages("compute_grpo_outcome_advantage", rows, norm_adv_by_std_in_grpo=True)
    _assert_close(_ours(rows, Comparison(std_unbiased=True)) * std / (std + GRPO_EPSILON), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo_advantages_are_equal(seed: int) -> None:
    rows = random_groups(SIZES, seed)
    theirs = _their_advantages("compute_grpo_outcome_advantage", rows, norm_adv_by_std_in_grpo=False)
    _assert_close(_ours(rows, Comparison(scale_rewards="none")), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_advantages_are_equal(seed: int) -> None:
    rows = random_groups(SIZES, seed)
    theirs = _their_advantages("compute_rloo_outcome_advantage", rows)
    _assert_close(_ours(rows, Comparison(scale_rewards="none", leave_one_out=True)), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_baseline_is_equal_but_for_the_epsilon_in_the_variance(seed: int) -> None:
    rows = random_groups(SIZES, seed)
    centred = _ours(rows, Comparison(scale_rewards="none"))
    tokens = torch.tensor([row.sampled for row in rows])
    variance = centred.repeat_interleave(tokens).var()
    ours = _ours(rows, Comparison(scale_rewards="none", whiten_advantages=True))
    theirs = _their_advantages("compute_reinforce_plus_plus_baseline_outcome_advantage", rows)
    # A second epsilon of 1e-8 stands beside the token counts; at these 100 tokens it moves the mean by 1e-10.
    _assert_close(ours * (variance / (variance + WHITEN_EPSILON)).sqrt(), theirs, tolerance=1e-9)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_keeps_its_raw_reward_in_verl_and_gets_zero_here(estimator: str) -> None:
    rows = [row_of(0, 0, 0.7), row_of(1, 0, 1.0), row_of(1, 1, 0.0)]
    theirs = _their_advantages(f"compute_{estimator}_outcome_advantage", rows)
    comparison = Comparison(leave_one_out=True, scale_rewards="none") if estimator == "rloo" else Comparison()
    _assert_close(theirs[0], torch.tensor(0.7).double(), tolerance=1e-5)
    assert float(_ours(rows, comparison)[0]) == 0.0


def _rewards(rows: list[Row]) -> Tensor:
    return torch.tensor([row.reward for row in rows], dtype=torch.float64)


def _ours(rows: list[Row], comparison: Comparison) -> Tensor:
    return torch.tensor([own[0] for own in advantages(rows, comparison).values], dtype=torch.float64)


def _their_advantages(estimator: str, rows: list[Row], **options: bool) -> Tensor:
    """verl wants a reward per token and gives an advantage per token; the reward stands at each row's last one."""
    tokens = torch.tensor([row.sampled for row in rows])
    position = torch.arange(int(tokens.max()))
    mask = (position < tokens[:, None]).double()
    rewards = (position == tokens[:, None] - 1) * _rewards(rows)[:, None]
    queries = np.array([row.id.group for row in rows])
    found: Tensor = getattr(core_algos, estimator)(rewards, mask, queries, **options)[0]
    first = found[:, 0]
    _assert_close(found, first[:, None] * mask)
    return first


def _assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance)


# ---------------------------------------------------------------- losses


def _theirs(name: str, grid: Grid, mode: LossAggMode, weights: Tensor | None = None, **options: float) -> Loss:
    config = ActorConfig(global_batch_info={"loss_scale_factor": LENGTH}, **options)
    function = getattr(core_algos, f"compute_policy_loss_{name}")

    def loss(logprobs: Tensor, _: Tensor) -> Tensor:
        value: Tensor = function(grid.old, logprobs, grid.advantages, grid.mask, mode, config, weights)[0]
        return value

    return loss


def _aggregated(values: Tensor, grid: Grid, mode: LossAggMode) -> Tensor:
    value: Tensor = core_algos.agg_loss(values, grid.mask, mode, loss_scale_factor=LENGTH)
    return value


def _tolerance(mode: LossAggMode) -> float:
    """verl divides a sequence by its length + 1e-8."""
    return 2e-8 if mode == "seq-mean-token-mean" else 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_dual_clipped_loss_and_its_gradient_are_equal(mode: LossAggMode, seed: int) -> None:
    grid = random_grid(seed, spread=1.5)
    ours = grid.ours(Objective(clip_ratio_high=0.28, clip_ratio_c=3.0), mode, LENGTH)
    theirs = _theirs("vanilla", grid, mode, clip_ratio_high=0.28, clip_ratio_c=3.0)
    assert_equal_losses(ours, theirs, grid, _tolerance(mode))
    plain = grid.ours(Objective(clip_ratio_high=0.28), mode, LENGTH)
    assert value_and_gradients(ours, grid)[0] < value_and_gradients(plain, grid)[0]
    unbounded = _theirs("vanilla", grid, mode, clip_ratio_high=0.28, clip_ratio_c=1e9)
    assert_equal_losses(plain, unbounded, grid, _tolerance(mode))


def test_sequence_token_mean_differs_by_the_epsilon_in_the_length() -> None:
    grid = random_grid(seed=0)
    lengths = grid.mask.sum(dim=1)
    shrink = lengths / (lengths + 1e-8)
    coefficients = (torch.tensor(token_coefficients(grid.rows), dtype=torch.float64) * shrink).tolist()
    batch = replace(weighed(grid.batch, coefficients), behaviour_logprobs=grid.old[grid.batch.targets])

    def ours(logprobs: Tensor, entropy: Tensor) -> Tensor:
        at = batch.targets
        return objective_loss(logprobs[at], entropy[at], replace(batch, ref_logprobs=None), Objective())[0]

    assert_equal_losses(ours, _theirs("vanilla", grid, "seq-mean-token-mean", clip_ratio_c=1e9), grid)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_gspo_and_its_gradient_are_equal(mode: LossAggMode, seed: int) -> None:
    """verl writes the sequence ratio per token with a stopped gradient: the sums over a sequence are the same."""
    grid = random_grid(seed)
    objective = Objective(clip_ratio_low=0.1, clip_ratio_high=0.15, importance_sampling_level="sequence")
    theirs = _theirs("gspo", grid, mode, clip_ratio_low=0.1, clip_ratio_high=0.15)
    assert_equal_losses(grid.ours(objective, mode, LENGTH), theirs, grid, _tolerance(mode))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_cispo_and_its_gradient_are_equal(mode: LossAggMode, seed: int) -> None:
    grid = random_grid(seed)
    objective = Objective(policy_loss="cispo", clip_ratio_low=0.3, clip_ratio_high=0.5)
    theirs = _theirs("cispo", grid, mode, clip_ratio_low=0.3, clip_ratio_high=0.5)
    assert_equal_losses(grid.ours(objective, mode, LENGTH), theirs, grid, _tolerance(mode))


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_reinforce_with_importance_weights_is_equal(mode: LossAggMode, level: Level) -> None:
    grid = random_grid(seed=1)
    weights = None if level == "none" else _importance_weights(grid, level, 2.0)
    objective = Objective(policy_loss="reinforce", rollout_is=level, rollout_is_threshold=2.0)
    theirs = _theirs("reinforce", grid, mode, weights)
    assert_equal_losses(grid.ours(objective, mode, LENGTH), theirs, grid, _tolerance(mode))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", MODES)
def test_kl_and_entropy_terms_follow_the_aggregation_in_both(mode: LossAggMode, estimator: KlEstimator) -> None:
    grid = random_grid(seed=2)
    policy = _theirs("vanilla", grid, mode, clip_ratio_c=1e9)

    def theirs(logprobs: Tensor, entropy: Tensor) -> Tensor:
        kl = core_algos.kl_penalty(logprobs, grid.ref, estimator)
        return policy(logprobs, entropy) + _aggregated(0.1 * kl - 0.05 * entropy, grid, mode)

    objective = Objective(kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.05)
    assert_equal_losses(grid.ours(objective, mode, LENGTH), theirs, grid, _tolerance(mode))


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimates_are_equal(ours: KlEstimator, theirs: str) -> None:
    new, ref = -2.0 + 0.5 * torch.randn(2, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _assert_close(kl_estimate(new, ref, ours), core_algos.kl_penalty(new, ref, theirs))


def test_far_from_the_reference_verl_bounds_the_k3_estimate_and_we_the_log_ratio_of_all_three() -> None:
    new, ref = torch.tensor([-9.0, -30.0]).double(), torch.tensor([-4.0, -1.0]).double()
    capped = core_algos.kl_penalty(new, ref, "low_var_kl")
    assert capped.tolist() == [10.0, 10.0]
    _assert_close(kl_estimate(new, ref, "k3").clamp(max=10.0), capped)
    assert core_algos.kl_penalty(new, ref, "k1").tolist() == [-5.0, -29.0]
    assert kl_estimate(new, ref, "k1").tolist() == [-5.0, -20.0]


class Bigram(torch.nn.Module):
    """A language model of the shape that `score` expects, over 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


def test_log_probabilities_and_entropies_of_a_model_are_equal_and_so_are_their_gradients() -> None:
    grid, temperature = random_grid(seed=6), 0.7
    model = Bigram().double()
    ids = torch.randint(64, grid.mask.shape, generator=torch.Generator().manual_seed(6))
    batch = replace(grid.batch, input_ids=ids)
    logits = model(input_ids=ids).logits[:, :-1]
    scored = batch.targets[:, 1:]
    theirs = (
        torch_functional.logprobs_from_logits_naive(logits / temperature, ids[:, 1:])[scored],
        torch_functional.entropy_from_logits(logits / temperature)[scored],
    )
    for ours, other in zip(score(model, batch, temperature, entropy_grad=True), theirs, strict=True):
        _assert_close(ours, other)
        weights = torch.linspace(-1.0, 1.0, len(other), dtype=torch.float64)
        mine, reference = (
            torch.autograd.grad((values * weights).sum(), list(model.parameters()), retain_graph=True)
            for values in (ours, other)
        )
        for own, their in zip(mine, reference, strict=True):
            _assert_close(own, their, tolerance=1e-10)


# ---------------------------------------------------------------- engine against learner


def _importance_weights(grid: Grid, level: Level, threshold: float | str) -> Tensor:
    weights: Tensor = rollout_correction.compute_rollout_correction_weights(
        grid.old - grid.behaviour, grid.mask, level, threshold
    )[0]
    return weights


def _old_and_behaviour(grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    assert grid.batch.old_logprobs is not None
    return grid.batch.old_logprobs, grid.batch.behaviour_logprobs, grid.batch.row


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights_and_the_corrected_loss_are_equal(level: Level) -> None:
    grid = random_grid(seed=4)
    theirs = _importance_weights(grid, level, 2.0)
    ours = is_weights(*_old_and_behaviour(grid), level, 2.0)
    _assert_close(ours, theirs[grid.batch.targets])
    assert 0 < int((ours == 2.0).sum()) < len(ours)
    loss = grid.ours(Objective(clip_ratio_c=3.0, rollout_is=level, rollout_is_threshold=2.0))
    assert_equal_losses(loss, _theirs("vanilla", grid, "token-mean", theirs, clip_ratio_c=3.0), grid)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_icepop_weights_are_zero_exactly_where_we_reject(level: Level) -> None:
    grid = random_grid(seed=5)
    ours = kept(*_old_and_behaviour(grid), level, (0.5, 2.0))
    theirs = _importance_weights(grid, level, "0.5_2.0")[grid.batch.targets]
    assert ours.tolist() == (theirs != 0.0).tolist()
    assert 0 < int(ours.sum()) < len(ours)


@pytest.mark.parametrize(("level", "option"), [("token", "token_k1"), ("sequence", "seq_sum_k1")])
@pytest.mark.parametrize("mode", MODES)
def test_rejection_has_the_same_denominators_and_verl_bounds_the_inverse_ratio(
    mode: LossAggMode, level: Level, option: str
) -> None:
    """verl's k1 bounds are on pi_behaviour / pi_old, ours on pi_old / pi_behaviour: (0.4, 2) there is (0.5, 2.5)."""
    grid = random_grid(seed=5)
    left = kept(*_old_and_behaviour(grid), level, (0.5, 2.5))
    log_ratio = grid.old - grid.behaviour
    mask = rollout_correction.compute_rollout_rejection_mask(log_ratio, grid.mask, option, "0.4_2.0")[0]
    assert left.tolist() == (mask[grid.batch.targets] == 1.0).tolist()
    assert 0 < int(left.sum()) < len(left)
    batch = replace(grid.batch.keeping(left), ref_logprobs=None)
    counts = batch.targets.sum(dim=1).tolist()
    coefficients = token_coefficients(grid.rows, mode, LENGTH, kept=counts)
    batch = replace(weighed(batch, coefficients), behaviour_logprobs=grid.old[batch.targets], old_logprobs=None)

    def ours(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return objective_loss(logprobs[batch.targets], entropy[batch.targets], batch, Objective())[0]

    theirs = _theirs("vanilla", replace(grid, mask=mask), mode, clip_ratio_c=1e9)
    assert_equal_losses(ours, theirs, grid, _tolerance(mode))
