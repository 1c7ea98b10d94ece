"""Rows and micro-batches without rollouts, for tests of the learner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from mgrpo.algorithm.coefficients import token_coefficients
from mgrpo.algorithm.loss import Objective, objective_loss
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.types import Reply, Row, TrajectoryId, Turn

POLICY_LOSS = partial(objective_loss, objective=Objective())
SFT_LOSS = partial(objective_loss, objective=Objective("sft"))


def row_of(
    id: TrajectoryId,
    token_ids: Sequence[int],
    loss_mask: Sequence[bool],
    logprobs: Sequence[float] | None = None,
    reward: float = 1.0,
    weight: float = 1.0,
    segment: int = 0,
) -> Row:
    """The row in which ``loss_mask`` says what was sampled; ``logprobs`` has one number per token, default -1."""
    stretches = [list(run) for _, run in groupby(range(len(token_ids)), key=lambda i: loss_mask[i])]
    turns, context = [], []
    for stretch in stretches:
        if not loss_mask[stretch[0]]:
            context = stretch
            continue
        known = (-1.0,) * len(stretch) if logprobs is None else tuple(logprobs[i] for i in stretch)
        turns.append(_turn([token_ids[i] for i in context], [token_ids[i] for i in stretch], known))
        context = []
    if context:
        turns.append(_turn([token_ids[i] for i in context], [], ()))
    return Row(id, segment, tuple(turns), reward, weight)


def _turn(context: Sequence[int], sampled: Sequence[int], logprobs: tuple[float, ...]) -> Turn:
    return Turn(tuple(context), tuple(sampled), logprobs, 0, "stop", "", Reply())


def random_rows(count: int = 5, seed: int = 0, vocabulary: int = 64) -> list[Row]:
    """Rows of two sampled stretches; log-probabilities are those of a policy somewhat like a uniform one."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        mask = [False] * draw.randint(1, 4) + [True] * draw.randint(1, 5) + [False] * 2 + [True] * draw.randint(1, 3)
        ids = tuple(draw.randrange(2, vocabulary) for _ in mask)
        logprobs = tuple(-draw.uniform(3.0, 5.0) if sampled else 0.0 for sampled in mask)
        rows.append(row_of(TrajectoryId(0, i, "a", 0), ids, mask, logprobs, draw.random()))
    return rows


def per_turn(rows: Sequence[Row], values: Sequence[float]) -> list[tuple[float, ...]]:
    """One advantage per row, spread over its turns."""
    return [(value,) * len(row.turns) for row, value in zip(rows, values, strict=True)]


def batches(rows: Sequence[Row], max_tokens: int = 4096) -> list[Batch]:
    """Packed with alternating advantages of +-1."""
    values = per_turn(rows, [1.0 - 2.0 * (i % 2) for i in range(len(rows))])
    return pack(rows, values, token_coefficients(rows), max_tokens, pad_id=0)
