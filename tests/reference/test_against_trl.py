"""Equal numbers to TRL 1.16's own code on random tensors, in float64, wherever the two definitions coincide.

Where they do not, the test's name says so and the assertion shows that the difference is exactly that.
"""

from __future__ import annotations

import pytest
import torch
from published_trl import trl_advantages, trl_importance_ratio, trl_loss
from token_grid import Grid, Loss, assert_equal_losses, random_grid, random_groups, row_of, value_and_gradients
from torch import Tensor

from mgrpo.algorithm.advantages import Comparison, ScaleRewards, advantages
from mgrpo.algorithm.coefficients import LossAggMode
from mgrpo.algorithm.correction import Level, is_weights, kept
from mgrpo.algorithm.loss import Objective
from mgrpo.types import Row

SEEDS = range(4)
STD_EPSILON = 1e-4  # TRL's, added to every standard deviation
LOSS_TYPES: dict[str, LossAggMode] = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
LENGTH = 40  # TRL's max_completion_length, our scale_factor


# ---------------------------------------------------------------- advantages


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_are_equal_but_for_the_epsilon_in_the_std(scale_rewards: ScaleRewards, seed: int) -> None:
    rows = random_groups([5] * 4, seed)
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    std = {
        "group": rewards.view(4, 5).std(dim=1).repeat_interleave(5),
        "batch": rewards.std().expand(20),
        "none": torch.full((20,), torch.inf),
    }[scale_rewards]
    # An infinite sigma stands for no division, where no epsilon is added.
    shrink = torch.where(std.isinf(), 1.0, std / (std + STD_EPSILON))
    torch.testing.assert_close(
        _ours(rows, scale_rewards) * shrink, trl_advantages(rewards, 5, scale_rewards), rtol=0.0, atol=1e-12
    )


def test_a_group_of_equal_rewards_gets_zeros_in_both() -> None:
    rows = [row_of(0, k, 0.1) for k in range(4)] + [row_of(1, k, float(k)) for k in range(4)]
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    assert _ours(rows, "group")[:4].tolist() == [0.0] * 4
    torch.testing.assert_close(trl_advantages(rewards, 4, "group")[:4], torch.zeros(4).double(), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_a_completion_without_a_reward_leaves_the_statistics_in_both(scale_rewards: ScaleRewards) -> None:
    values = [1.0, torch.nan, 0.0, 0.5]
    known = [row_of(0, k, value) for k, value in enumerate(values) if value == value]
    std = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64).std()
    shrink = 1.0 if scale_rewards == "none" else std / (std + STD_EPSILON)
    theirs = trl_advantages(torch.tensor(values, dtype=torch.float64), 4, scale_rewards)
    assert theirs[1] == 0.0
    torch.testing.assert_close(_ours(known, scale_rewards) * shrink, theirs[[0, 2, 3]], rtol=0.0, atol=1e-12)


def _ours(rows: list[Row], scale_rewards: ScaleRewards) -> Tensor:
    comparison = Comparison(scale_rewards=scale_rewards, std_unbiased=True)
    return torch.tensor([own[0] for own in advantages(rows, comparison).values], dtype=torch.float64)


# ---------------------------------------------------------------- losses


def _theirs(grid: Grid, loss_type: str, **options: object) -> Loss:
    inputs = {"advantages": grid.advantages[:, 0], "old_per_token_logps": grid.old, "ref_per_token_logps": grid.ref}
    options = {"loss_type": loss_type, "max_completion_length": LENGTH, **options}
    return lambda logprobs, entropy: trl_loss(logprobs, entropy, grid.mask, inputs, **options)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_clipped_loss_and_its_gradient_are_equal(loss_type: str, seed: int) -> None:
    grid = random_grid(seed)
    ours = grid.ours(Objective(clip_ratio_low=0.2, clip_ratio_high=0.28), LOSS_TYPES[loss_type], LENGTH)
    assert_equal_losses(ours, _theirs(grid, loss_type, epsilon_low=0.2, epsilon_high=0.28), grid)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_two_sided_clipping_with_delta_is_our_dual_clip(loss_type: str) -> None:
    """TRL bounds the ratio itself by delta; for delta >= 1 + clip_ratio_high only negative advantages notice."""
    grid = random_grid(seed=0, spread=1.5)
    mode = LOSS_TYPES[loss_type]
    bound = grid.ours(Objective(clip_ratio_c=2.0), mode, LENGTH)
    assert_equal_losses(bound, _theirs(grid, loss_type, delta=2.0), grid)
    assert value_and_gradients(bound, grid)[0] != value_and_gradients(grid.ours(Objective(), mode, LENGTH), grid)[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_sequence_ratio_is_equal(loss_type: str, seed: int) -> None:
    """GSPO. TRL keeps one ratio per sequence and lets the aggregation repeat it over the mask, we one per token."""
    grid = random_grid(seed)
    objective = Objective(clip_ratio_low=0.1, clip_ratio_high=0.15, importance_sampling_level="sequence")
    theirs = _theirs(grid, loss_type, epsilon_low=0.1, epsilon_high=0.15, importance_sampling_level="sequence")
    assert_equal_losses(grid.ours(objective, LOSS_TYPES[loss_type], LENGTH), theirs, grid)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_equal_with_our_lower_bound_off_and_the_upper_one_counted_from_one(seed: int) -> None:
    """TRL's ``epsilon_high`` bounds the ratio itself, ours 1 + clip_ratio_high; TRL's CISPO has no lower bound."""
    grid = random_grid(seed)
    ours = grid.ours(Objective(policy_loss="cispo", clip_ratio_low=1.0, clip_ratio_high=0.5))
    assert_equal_losses(ours, _theirs(grid, "cispo", epsilon_high=1.5), grid)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_kl_to_the_reference_is_the_k3_estimate_under_the_same_denominator(loss_type: str) -> None:
    grid = random_grid(seed=1)
    ours = grid.ours(Objective(kl_coef=0.1, kl_estimator="k3"), LOSS_TYPES[loss_type], LENGTH)
    assert_equal_losses(ours, _theirs(grid, loss_type, beta=0.1), grid)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_entropy_bonus_differs_only_in_that_ours_follows_the_aggregation(loss_type: str) -> None:
    """TRL's bonus is a token mean under every loss type; ours has the coefficients of the policy loss."""
    grid = random_grid(seed=2)
    policy = grid.ours(Objective(), LOSS_TYPES[loss_type], LENGTH)
    both, alone = grid.ours(Objective(entropy_coef=0.05)), grid.ours(Objective())

    def with_token_mean_bonus(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy(logprobs, entropy) + both(logprobs, entropy) - alone(logprobs, entropy)

    theirs = _theirs(grid, loss_type, entropy_coef=0.05)
    assert_equal_losses(with_token_mean_bonus, theirs, grid)
    if LOSS_TYPES[loss_type] == "token-mean":
        assert_equal_losses(both, theirs, grid)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_two_microbatches_of_as_many_rows_add_up_to_our_step(loss_type: str) -> None:
    grid = random_grid(seed=3)
    ours = grid.ours(Objective(), LOSS_TYPES[loss_type], LENGTH)
    assert_equal_losses(ours, _in_two(grid, loss_type), grid)


def test_bnpo_over_two_microbatches_averages_their_token_means_and_ours_has_one_denominator() -> None:
    grid = random_grid(seed=3)
    tokens = [float(part.sum()) for part in grid.mask.chunk(2)]
    assert tokens[0] != tokens[1]
    # Weighing each half by its share of the tokens turns TRL's mean of means into the token mean of the step.
    weights = [2.0 * n / sum(tokens) for n in tokens]
    assert_equal_losses(grid.ours(Objective()), _in_two(grid, "bnpo", weights), grid)


def _in_two(grid: Grid, loss_type: str, weights: list[float] | None = None) -> Loss:
    """TRL's losses of the two halves of the rows, as its trainer adds them up before a step."""
    parts = zip(*(t.chunk(2) for t in (grid.mask, grid.advantages[:, 0], grid.old)), strict=True)
    fixed = [
        (mask, {"advantages": a, "old_per_token_logps": old, "num_items_in_batch": grid.mask.sum()})
        for mask, a, old in parts
    ]
    options = {"loss_type": loss_type, "max_completion_length": LENGTH, "current_gradient_accumulation_steps": 2}

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        halves = zip(weights or [1.0, 1.0], logprobs.chunk(2), entropy.chunk(2), fixed, strict=True)
        return torch.stack([w * trl_loss(p, h, mask, inputs, **options) for w, p, h, (mask, inputs) in halves]).sum()

    return loss


# ---------------------------------------------------------------- engine against learner


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights_and_the_corrected_loss_are_equal(level: Level) -> None:
    grid = random_grid(seed=4)
    ratio = _ratio(grid, f"{level}_truncate", None, 2.0)
    at, batch = grid.batch.targets, grid.batch
    assert batch.old_logprobs is not None
    ours = is_weights(batch.old_logprobs, batch.behaviour_logprobs, batch.row, level, 2.0)
    torch.testing.assert_close(ours, ratio[at], rtol=0.0, atol=1e-12)
    assert 0 < int((ours == 2.0).sum()) < len(ours)
    objective = Objective(rollout_is=level, rollout_is_threshold=2.0, kl_coef=0.1)
    inputs = {
        "advantages": grid.advantages[:, 0],
        "old_per_token_logps": grid.old,
        "ref_per_token_logps": grid.ref,
        "importance_sampling_ratio": ratio,
    }
    options = {"loss_type": "dapo", "use_vllm": True, "beta": 0.1}
    assert_equal_losses(grid.ours(objective), lambda p, h: trl_loss(p, h, grid.mask, inputs, **options), grid)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_importance_weights_are_zero_exactly_where_we_reject(level: Level) -> None:
    """What TRL rejects stays in its denominators; ours are those of what is left."""
    grid = random_grid(seed=5)
    batch = grid.batch
    assert batch.old_logprobs is not None
    ours = kept(batch.old_logprobs, batch.behaviour_logprobs, batch.row, level, (0.5, 2.0))
    theirs = _ratio(grid, f"{level}_mask", 0.5, 2.0)[batch.targets]
    assert ours.tolist() == (theirs != 0.0).tolist()
    assert 0 < int(ours.sum()) < len(ours)


def _ratio(grid: Grid, mode: str, low: float | None, high: float) -> Tensor:
    """[B, T]; TRL pads and masks by itself, so it is given the targets alone."""
    at = grid.batch.targets
    old, behaviour = ([row[own].tolist() for row, own in zip(m, at, strict=True)] for m in (grid.old, grid.behaviour))
    width = max(map(len, old))
    ratio = trl_importance_ratio([[*row, *[0.0] * (width - len(row))] for row in old], behaviour, mode, low, high)
    spread = torch.zeros_like(grid.mask)
    for b, own in enumerate(at):
        spread[b, own] = ratio[b].expand(width)[: int(own.sum())]
    return spread
