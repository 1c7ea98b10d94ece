"""One trainable model and its optimiser. It hears of batches and losses; never of planners, groups or rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgrpo.algorithm.loss import TokenSums
from mgrpo.algorithm.packing import Batch
from mgrpo.engines.model import logits_at
from mgrpo.errors import NonFiniteGradients
from mgrpo.policy.optimizers import lr_factor, make_optimizers

# (log-probabilities [N], entropy [N], batch) -> the batch's share of the loss, and its metrics
LossFunction = Callable[[Tensor, Tensor, Batch], tuple[Tensor, TokenSums]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the weights move in one stage of ``steps`` optimiser steps."""

    learning_rate: float
    steps: int
    warmup_steps: int = 0
    lr_scheduler: str = "constant"
    min_lr_ratio: float = 0.0
    optimizer: str = "adamw"
    adam_betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 5


def score(model: Any, batch: Batch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """log pi(token | before) and the entropy of the distribution it was drawn from (nats), both [N], at the targets.

    ``temperature`` is the one of sampling: the policy that is trained is the policy that sampled.
    """
    select = torch.zeros_like(batch.targets)
    select[:, :-1] = batch.targets[:, 1:]  # logits at t - 1 score token t
    logits = logits_at(
        model,
        select,
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    every = torch.log_softmax(wide / temperature, dim=-1)
    chosen = every.gather(1, batch.input_ids[batch.targets][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(every.exp() * every).sum(-1)
    return chosen, entropy


class Policy:
    """A model that learns, by one schedule after another."""

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self.optimizers: list[torch.optim.Optimizer] = []
        self._skipped = 0

    def begin(self, schedule: Schedule) -> None:
        """A fresh optimiser for a new stage."""
        self.schedule = schedule
        self._skipped = 0
        self.optimizers = make_optimizers(
            self.model, schedule.optimizer, schedule.learning_rate, schedule.adam_betas, schedule.weight_decay
        )

    @torch.no_grad()
    def scored(self, batch: Batch) -> Tensor:
        """Log-probabilities of the batch's targets under the weights as they are, [N]."""
        return score(self.model, batch.to(self.model.device), self.temperature)[0].to(batch.row.device)

    def update(
        self, batches: Sequence[Batch], loss_function: LossFunction, step: int, entropy_grad: bool = False
    ) -> dict[str, float]:
        """Optimiser step number ``step`` (from 0) of the schedule, over all micro-batches; their losses add up.

        "tokens" counts the targets in ``batches``; the means of ``loss_function`` are over these tokens alone,
        whatever rows were left out before. Without any they and "loss" are absent. ``entropy_grad`` is for losses with
        an entropy term. A NaN or infinite gradient skips the step: weights and optimiser state stay bit-identical,
        "skipped_steps" is 1. Raises NonFiniteGradients after ``max_skipped_steps`` of them in a row.
        """
        loss, sums = 0.0, TokenSums()
        for batch in batches:
            batch = batch.to(self.model.device)
            part, part_sums = loss_function(*score(self.model, batch, self.temperature, entropy_grad), batch)
            part.backward()  # type: ignore[no-untyped-call]
            loss, sums = loss + float(part.detach()), sums + part_sums
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.max_grad_norm))
        finite = math.isfinite(norm)
        rate = self._apply(step) if finite else 0.0
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._count(finite)
        taken = {
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped_steps": float(not finite),
            "tokens": float(sums.tokens),
        }
        return taken | ({"loss": loss, **sums.metrics()} if sums.tokens else {})

    def _apply(self, step: int) -> float:
        plan = self.schedule
        factor = lr_factor(plan.lr_scheduler, step, plan.warmup_steps, plan.steps, plan.min_lr_ratio)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * factor
            optimizer.step()
        return plan.learning_rate * factor

    def _count(self, finite: bool) -> None:
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped >= self.schedule.max_skipped_steps:
            raise NonFiniteGradients(
                f"{self._skipped} optimiser steps in a row had NaN or infinite gradients; nothing was changed by them."
                " Lower learning_rate, or look for broken data, in a new run"
            )

    # ------------------------------------------------------------ what a checkpoint holds beside the weights

    def state(self) -> dict[str, Any]:
        return {"skipped": self._skipped, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; call `begin` with the same schedule first."""
        self._skipped = state["skipped"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
