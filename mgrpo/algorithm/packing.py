"""Rows -> micro-batches of tensors, within a token budget.

Position t of every tensor speaks of token t: ``targets[b, t]`` says that token t was sampled and is trained, predicted
from the tokens before it; ``old_logprobs[b, t]`` is the engine's log-probability of that same token. Nothing is shifted
here: a model's logits at t - 1 are what scores position t.

    tokens   [10, 11, 12, 13]    sampled  [0, 0, 1, 0]    targets  [0, 0, 1, 0]    scored by logits[1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgrpo.types import Row, TrajectoryId


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: B rows, right-padded to T tokens. All tensors are [B, T] and 0 / False where padded."""

    ids: tuple[TrajectoryId, ...]  # of the B rows, in order
    input_ids: Tensor  # int64, ``pad_id`` where padded
    attention_mask: Tensor  # int64, 1 where a token stands
    position_ids: Tensor  # int64, 0 .. T - 1 in every row
    targets: Tensor  # bool, True where the token was sampled; never at position 0
    advantages: Tensor  # float32, the row's at targets, else 0
    coefficients: Tensor  # float32, what the token counts in the loss, 0 off targets
    old_logprobs: Tensor  # float32, the engine's at targets, else 0

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``."""
        return Batch(
            self.ids,
            self.input_ids.to(device),
            self.attention_mask.to(device),
            self.position_ids.to(device),
            self.targets.to(device),
            self.advantages.to(device),
            self.coefficients.to(device),
            self.old_logprobs.to(device),
        )


def pack(
    rows: Sequence[Row],
    advantages: Sequence[float],
    coefficients: Sequence[float],
    max_tokens_per_microbatch: int,
    pad_id: int,
    drop_zero: bool = False,
) -> list[Batch]:
    """Every row in exactly one Batch, longest first, B * T <= ``max_tokens_per_microbatch`` (or B = 1).

    ``advantages`` and ``coefficients`` hold one number per row. The order is a function of lengths and ids alone.
    ``drop_zero`` leaves out rows whose advantage or coefficient is 0: their policy gradient is 0, and denominators
    are already in the coefficients, so the gradient is unchanged. Not for a loss with other terms (sft, KL).
    Raises ValueError where the three sequences or a row's own lengths disagree, and for a row whose first token was
    sampled (nothing predicts it).
    """
    if not len(rows) == len(advantages) == len(coefficients):
        raise ValueError(f"{len(rows)} rows, {len(advantages)} advantages, {len(coefficients)} coefficients: one each")
    chosen = [i for i in range(len(rows)) if not drop_zero or advantages[i] * coefficients[i] != 0.0]
    chosen.sort(key=lambda i: (-len(rows[i].token_ids), rows[i].id, rows[i].segment))
    batches = []
    start = 0
    while start < len(chosen):
        length = len(rows[chosen[start]].token_ids)
        part = chosen[start : start + max(1, max_tokens_per_microbatch // max(1, length))]
        batches.append(
            _batch([rows[i] for i in part], [advantages[i] for i in part], [coefficients[i] for i in part], pad_id)
        )
        start += len(part)
    return batches


def _batch(rows: Sequence[Row], advantages: Sequence[float], coefficients: Sequence[float], pad_id: int) -> Batch:
    for row in rows:
        _check(row)
    length = max(len(row.token_ids) for row in rows)
    targets = torch.tensor([_padded(row.loss_mask, length, False) for row in rows], dtype=torch.bool)
    positions = torch.arange(length).expand(len(rows), length)
    lengths = torch.tensor([[len(row.token_ids)] for row in rows])
    return Batch(
        ids=tuple(row.id for row in rows),
        input_ids=torch.tensor([_padded(row.token_ids, length, pad_id) for row in rows], dtype=torch.int64),
        attention_mask=(positions < lengths).to(torch.int64),
        position_ids=positions.contiguous(),
        targets=targets,
        advantages=torch.tensor(advantages, dtype=torch.float32)[:, None] * targets,
        coefficients=torch.tensor(coefficients, dtype=torch.float32)[:, None] * targets,
        old_logprobs=torch.tensor([_padded(row.logprobs, length, 0.0) for row in rows], dtype=torch.float32) * targets,
    )


def _padded(values: Sequence[float], length: int, filler: float) -> list[float]:
    return [*values, *[filler] * (length - len(values))]


def _check(row: Row) -> None:
    name = f"{row.id} segment {row.segment}"
    if not len(row.token_ids) == len(row.loss_mask) == len(row.logprobs):
        lengths = f"{len(row.token_ids)} tokens, {len(row.loss_mask)} mask, {len(row.logprobs)} log-probabilities"
        raise ValueError(f"{name}: {lengths}; a row has one of each per token")
    if row.loss_mask[:1] == (True,):
        raise ValueError(f"{name}: its first token was sampled, but nothing precedes it; a prompt needs a token")
