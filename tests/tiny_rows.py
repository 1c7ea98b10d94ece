"""Rows and micro-batches without rollouts, for tests of the learner."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mgrpo.algorithm.loss import token_coefficients
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.types import Row, TrajectoryId


def random_rows(count: int = 5, seed: int = 0, vocabulary: int = 64) -> list[Row]:
    """Rows of two sampled stretches; log-probabilities are those of a policy somewhat like a uniform one."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        mask = [False] * draw.randint(1, 4) + [True] * draw.randint(1, 5) + [False] * 2 + [True] * draw.randint(1, 3)
        ids = tuple(draw.randrange(2, vocabulary) for _ in mask)
        logprobs = tuple(-draw.uniform(3.0, 5.0) if sampled else 0.0 for sampled in mask)
        versions = tuple(0 if sampled else -1 for sampled in mask)
        rows.append(Row(TrajectoryId(0, i, "a", 0), 0, ids, tuple(mask), logprobs, versions, draw.random()))
    return rows


def batches(rows: Sequence[Row], max_tokens: int = 4096) -> list[Batch]:
    """Packed with alternating advantages of +-1."""
    values = [1.0 - 2.0 * (i % 2) for i in range(len(rows))]
    return pack(rows, values, token_coefficients(rows), max_tokens, pad_id=0)
