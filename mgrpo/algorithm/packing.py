"""Rows -> micro-batches of tensors, within a token budget.

Shapes: B rows, T tokens of the longest, N targets. Position t of a [B, T] tensor speaks of token t: ``targets[b, t]``
says that token t was sampled and is trained, predicted from the tokens before it. Nothing is shifted here: a model's
logits at t - 1 are what scores position t. What a loss needs of each target stands in [N] tensors, in row-major order.

    tokens   [10, 11, 12, 13]    sampled  [0, 0, 1, 0]    targets  [0, 0, 1, 0]    scored by logits[1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from mgrpo.types import Row, TrajectoryId


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of B rows, right-padded to T tokens; 0 / False where padded."""

    ids: tuple[TrajectoryId, ...]  # of the B rows, in order
    indices: tuple[int, ...]  # where each of them stands in the sequence that was packed
    input_ids: Tensor  # [B, T] int64, ``pad_id`` where padded
    attention_mask: Tensor  # [B, T] int64, 1 where a token stands
    position_ids: Tensor  # [B, T] int64, 0 .. T - 1 in every row
    targets: Tensor  # [B, T] bool, True where the token was sampled; never at position 0
    row: Tensor  # [N] int64, which of the B rows the target is in
    advantages: Tensor  # [N] float, of the ``dtype`` that was packed
    coefficients: Tensor  # [N] float, what the token counts in the loss
    behaviour_logprobs: Tensor  # [N] float, of the engine that sampled it
    old_logprobs: Tensor | None = None  # [N] float, of the learner before its first update on these rows
    ref_logprobs: Tensor | None = None  # [N] float, of the reference model

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def weighed(self, coefficients: Sequence[float]) -> Batch:
        """With other ``coefficients``, one per packed row."""
        of_rows = self.coefficients.new_tensor([coefficients[i] for i in self.indices])
        return replace(self, coefficients=of_rows[self.row])

    def keeping(self, kept: Tensor) -> Batch:
        """Without the targets that are not ``kept`` ([N] bool): nothing is computed for them any more."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        left: dict[str, Any] = {name: v[kept] for name, v in values.items() if isinstance(v, Tensor) and v.dim() == 1}
        return replace(self, targets=self.targets.masked_scatter(self.targets, kept), **left)


def pack(
    rows: Sequence[Row],
    advantages: Sequence[Sequence[float]],
    coefficients: Sequence[float],
    max_tokens_per_microbatch: int,
    pad_id: int,
    drop_zero: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """Every row in exactly one Batch, longest first, B * T <= ``max_tokens_per_microbatch`` (or B = 1).

    ``advantages`` holds one number per turn of each row, ``coefficients`` one per row. The order is a function of
    lengths and ids alone. ``drop_zero`` leaves out rows whose advantages or coefficient are 0: their policy gradient
    is 0, and denominators are already in the coefficients, so the gradient is unchanged. Not for a loss with other
    terms (sft, KL, entropy). ``dtype`` is that of advantages, coefficients and log-probabilities. Raises ValueError
    where the sequences or a turn's own lengths disagree, and for a row whose first token was sampled (nothing predicts
    it).
    """
    if not len(rows) == len(advantages) == len(coefficients):
        raise ValueError(f"{len(rows)} rows, {len(advantages)} advantages, {len(coefficients)} coefficients: one each")
    chosen = [i for i in range(len(rows)) if not drop_zero or (coefficients[i] and any(advantages[i]))]
    lengths = {i: _length(rows[i], advantages[i]) for i in chosen}
    chosen.sort(key=lambda i: (-lengths[i], rows[i].id, rows[i].segment))
    batches = []
    start = 0
    while start < len(chosen):
        longest = lengths[chosen[start]]
        part = chosen[start : start + max(1, max_tokens_per_microbatch // max(1, longest))]
        picked = [rows[i] for i in part]
        batch = _batch(picked, part, longest, pad_id, [advantages[i] for i in part], dtype)
        batches.append(batch.weighed(coefficients))
        start += len(part)
    return batches


def _batch(
    rows: Sequence[Row],
    indices: Sequence[int],
    length: int,
    pad_id: int,
    advantages: Sequence[Sequence[float]],
    dtype: torch.dtype,
) -> Batch:
    masks = [row.loss_mask for row in rows]
    targets = torch.tensor([[*mask, *(False,) * (length - len(mask))] for mask in masks], dtype=torch.bool)
    tokens = [row.token_ids for row in rows]
    positions = torch.arange(length).expand(len(rows), length)
    sampled = [
        (a, turn) for row, own in zip(rows, advantages, strict=True) for a, turn in zip(own, row.turns, strict=True)
    ]
    spread = [a for a, turn in sampled for _ in turn.token_ids]
    return Batch(
        ids=tuple(row.id for row in rows),
        indices=tuple(indices),
        input_ids=torch.tensor([[*ids, *(pad_id,) * (length - len(ids))] for ids in tokens], dtype=torch.int64),
        attention_mask=(positions < torch.tensor([[len(ids)] for ids in tokens])).to(torch.int64),
        position_ids=positions.contiguous(),
        targets=targets,
        row=targets.nonzero()[:, 0],
        advantages=torch.tensor(spread, dtype=dtype),
        coefficients=torch.zeros(len(spread), dtype=dtype),
        behaviour_logprobs=torch.tensor([p for _, turn in sampled for p in turn.logprobs], dtype=dtype),
    )


def _length(row: Row, advantages: Sequence[float]) -> int:
    """Tokens of the row. Raises ValueError as `pack` says."""
    name = f"{row.id} segment {row.segment}"
    if len(advantages) != len(row.turns):
        raise ValueError(f"{name}: {len(advantages)} advantages for {len(row.turns)} turns; one each")
    if row.turns and not row.turns[0].context_ids:
        raise ValueError(f"{name}: its first token was sampled, but nothing precedes it; a prompt needs a token")
    for turn in row.turns:
        if len(turn.logprobs) != len(turn.token_ids):
            lengths = f"{len(turn.token_ids)} tokens, {len(turn.logprobs)} log-probabilities"
            raise ValueError(f"{name}: a turn has {lengths}; a sampled token has one")
    return sum([len(turn.context_ids) + len(turn.token_ids) for turn in row.turns])
