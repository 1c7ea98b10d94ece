"""Sampling noise is a pure function of (seed, id, position), and turns it into the model's own distribution."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.engines.base import Request, Sampling
from mgrpo.engines.decode import _new_row, _sample, uniforms
from mgrpo.types import TrajectoryId

agents = st.sampled_from(["planner", "searcher"])
ids = st.builds(TrajectoryId, st.integers(0, 10**6), st.integers(0, 64), agents, st.integers(0, 9))
ID = TrajectoryId(0, 0, "planner", 0)


@given(ids, st.integers(0, 2**40), st.integers(0, 500), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_noise_does_not_depend_on_how_a_sequence_is_split_into_turns(
    id: TrajectoryId, seed: int, position: int, turns: list[int]
) -> None:
    whole = uniforms(seed, id, position, sum(turns))
    starts = np.cumsum([position, *turns[:-1]])
    parts = [uniforms(seed, id, int(start), count) for start, count in zip(starts, turns, strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)


@given(ids, ids, st.integers(0, 100), st.integers(0, 100))
def test_another_id_or_seed_is_other_noise(id: TrajectoryId, other: TrajectoryId, seed: int, other_seed: int) -> None:
    same = (id, seed) == (other, other_seed)
    assert np.array_equal(uniforms(seed, id, 3, 8), uniforms(other_seed, other, 3, 8)) == same


@settings(max_examples=6)
@given(
    st.lists(st.floats(-3.0, 3.0, width=32), min_size=2, max_size=12),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 10**6),
)
def test_sampled_frequencies_follow_the_softmax(logits: list[float], temperature: float, seed: int) -> None:
    """Pearson's statistic over 2,000 draws stays within ten standard deviations of its mean."""
    draws, tokens = 2000, len(logits)
    batch = torch.tensor(logits).expand(draws, tokens)
    counts = np.bincount(_drawn(batch, uniforms(seed, ID, 1, draws), temperature), minlength=tokens)
    expected = draws * torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).numpy()
    statistic = float(((counts - expected) ** 2 / np.maximum(expected, 1.0)).sum())
    assert statistic < tokens + 10 * (2 * tokens) ** 0.5


def _drawn(logits: torch.Tensor, noise: np.ndarray, temperature: float) -> np.ndarray:
    """One draw per row of ``logits`` [N, V], row i with the i-th number of ``noise``."""
    rows = [_new_row(Request(ID, (0,), Sampling(temperature, 1), ())) for _ in noise]
    for row, number in zip(rows, noise, strict=True):
        row.noise = [number]
    return _sample(logits, rows, 0).numpy()
