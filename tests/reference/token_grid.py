"""One optimiser step written twice: as our rows and [N] target tensors, and as the [B, T] matrices of others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mgrpo.algorithm.coefficients import LossAggMode, token_coefficients
from mgrpo.algorithm.loss import Objective, objective_loss
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.types import Reply, Row, TrajectoryId, Turn

Loss = Callable[[Tensor, Tensor], Tensor]  # of log-probabilities and entropies, [B, T] each


def row_of(group: int, rollout: int, reward: float, lengths: Sequence[int] = (1,)) -> Row:
    """A root's row: before each turn of ``lengths`` sampled tokens stand two that were not sampled."""
    turns = tuple(Turn((1, 1), (2,) * n, (-1.0,) * n, 0, "stop", "", Reply()) for n in lengths)
    return Row(TrajectoryId(group, rollout, "planner", 0), 0, turns, reward)


def random_groups(sizes: Sequence[int], seed: int) -> list[Row]:
    """A query per size, rewards in steps of 1/4 (ties happen), one to three turns of one to six sampled tokens."""
    draw = random.Random(seed)
    return [
        row_of(group, rollout, draw.randint(0, 4) / 4.0, [draw.randint(1, 6) for _ in range(draw.randint(1, 3))])
        for group, size in enumerate(sizes)
        for rollout in range(size)
    ]


@dataclass(frozen=True)
class Grid:
    """B rows of one step in the order of ``batch``; everything else is [B, T] float64 and random also off the mask."""

    rows: list[Row]
    batch: Batch
    mask: Tensor
    advantages: Tensor  # one value per row, repeated over T
    logprobs: Tensor
    old: Tensor
    behaviour: Tensor
    ref: Tensor
    entropy: Tensor

    def ours(self, objective: Objective, mode: LossAggMode = "token-mean", scale_factor: float = 1.0) -> Loss:
        """Our loss of the whole step; the old policy is the behaviour policy unless ``objective`` corrects."""
        coefficients = token_coefficients(self.rows, mode, scale_factor)
        batch = weighed(self.batch, coefficients)
        if objective.rollout_is == "none":
            batch = replace(batch, behaviour_logprobs=self.old[self.batch.targets], old_logprobs=None)
        if objective.kl_coef == 0.0:
            batch = replace(batch, ref_logprobs=None)
        at = batch.targets
        return lambda logprobs, entropy: objective_loss(logprobs[at], entropy[at], batch, objective)[0]


def weighed(batch: Batch, coefficients: Sequence[float]) -> Batch:
    """As `Batch.weighed`, in float64."""
    of_rows = torch.tensor([coefficients[i] for i in batch.indices], dtype=torch.float64)
    return replace(batch, coefficients=of_rows[batch.row])


def random_grid(seed: int, count: int = 6, spread: float = 0.7) -> Grid:
    """``spread`` is the standard deviation of the log-ratio between any two of the policies."""
    draw = torch.Generator().manual_seed(seed)
    rows = random_groups([count], seed)
    [batch] = pack(rows, [(0.0,) * len(row.turns) for row in rows], [0.0] * count, 10_000, pad_id=0)
    rows = [rows[i] for i in batch.indices]
    shape = batch.targets.shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    old = -2.0 + 0.3 * normal(*shape)
    behaviour, ref, logprobs = (old + spread * normal(*shape) for _ in range(3))
    advantages = normal(count, 1).expand(shape)
    at = batch.targets
    batch = replace(
        batch,
        indices=tuple(range(count)),
        advantages=advantages[at],
        behaviour_logprobs=behaviour[at],
        old_logprobs=old[at],
        ref_logprobs=ref[at],
    )
    return Grid(rows, batch, at.double(), advantages, logprobs, old, behaviour, ref, normal(*shape).abs())


def value_and_gradients(loss: Loss, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """A loss and its gradients by log-probability and by entropy, [B, T] each, 0 where it does not depend on them."""
    leaves = grid.logprobs.clone().requires_grad_(), grid.entropy.clone().requires_grad_()
    value = loss(*leaves)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    filled: Any = [torch.zeros_like(grid.mask) if gradient is None else gradient for gradient in gradients]
    return value.detach(), filled[0], filled[1]


def assert_equal_losses(ours: Loss, theirs: Loss, grid: Grid, tolerance: float = 1e-12) -> None:
    """Same value and same gradients, relative to the largest number of each."""
    for mine, other in zip(value_and_gradients(ours, grid), value_and_gradients(theirs, grid), strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(mine, other, rtol=0.0, atol=tolerance * scale)
