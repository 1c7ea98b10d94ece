"""What moves the weights: AdamW, or Muon for the matrices inside the layers with AdamW for all the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mgrpo.errors import ConfigError


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalised (Jordan et al. 2024, "Muon"), in the gradient's dtype.

    ``torch.optim.Muon`` computes the orthogonalisation in bfloat16, which processors without bfloat16 instructions
    emulate about twenty times slower than float32; this one also handles matrices of one shape together. Updates are
    scaled to the root mean square of AdamW's, so that both share a learning rate.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum_buffer"], group["momentum"])
                by_shape.setdefault(tuple(update.shape), []).append((parameter, update))
            for shape, pairs in by_shape.items():
                scale = 0.2 * max(shape) ** 0.5
                updates = orthogonalised(torch.stack([update for _, update in pairs]))
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to ``matrices`` [N, rows, columns], by a quintic Newton-Schulz iteration.

    Singular values above about 1 % of the matrix's norm end between 0.6 and 1.3, close enough for an update direction;
    smaller ones stay smaller.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def make_optimizers(
    model: Any, optimizer: str, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """The optimisers of one model; together they hold each trainable parameter once. ConfigError on another name."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if optimizer == "adamw":
        return [torch.optim.AdamW([p for _, p in named], learning_rate, betas, weight_decay=weight_decay)]
    if optimizer != "muon":
        raise ConfigError(f"learner.optimizer: unknown optimiser {optimizer!r}; known: adamw, muon")
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    ends = {id(weight) for weight in [*tables, model.get_output_embeddings().weight]}
    inner = [p for _, p in named if p.ndim == 2 and id(p) not in ends]
    rest = [p for _, p in named if p.ndim != 2 or id(p) in ends]
    return [
        Muon(inner, learning_rate, weight_decay=weight_decay),
        torch.optim.AdamW(rest, learning_rate, betas, weight_decay=weight_decay),
    ]


def lr_factor(scheduler: str, step: int, warmup_steps: int, steps: int, min_ratio: float) -> float:
    """What the learning rate is multiplied with at ``step`` (from 0) of ``steps``: linear warm-up, then the schedule.

    "linear" and "cosine" reach ``min_ratio`` at the last step.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[scheduler]
    return 1.0 - (1.0 - min_ratio) * fall
