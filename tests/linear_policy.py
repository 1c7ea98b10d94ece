"""A language model that is one table of logits, and a policy whose optimiser only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mgrpo.policy.update import Policy, Schedule


class Bigram(nn.Module):
    """Logits of the next token [V] are the row of ``table`` [V, V] of the last one: gradients by hand."""

    device = torch.device("cpu")

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())
        self.output = nn.Identity()

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.output(self.table[input_ids]))


class Notes:
    """In an optimiser's place: keeps every gradient of the table [V, V] and moves nothing."""

    def __init__(self, model: Bigram) -> None:
        self.table = model.table
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]
        self.gradients: list[Tensor] = []

    def step(self) -> None:
        assert self.table.grad is not None
        self.gradients.append(self.table.grad.clone())

    def zero_grad(self, set_to_none: bool) -> None:
        self.table.grad = None


def noting_policy(table: Tensor, temperature: float = 1.0) -> tuple[Policy, list[Tensor]]:
    """A policy over ``table`` that never moves, and the list that its unclipped gradients go to."""
    policy = Policy(Bigram(table), temperature)
    policy.schedule = Schedule(1.0, 1, max_grad_norm=1e9)
    notes = Notes(policy.model)
    policy.optimizers = [notes]  # type: ignore[list-item]
    return policy, notes.gradients
