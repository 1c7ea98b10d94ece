"""Sampling noise is a pure function of (seed, id, position), and turns it into the model's own distribution.

Truncation is held against the warpers of transformers, applied in their own order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mgrpo.engines.base import Request, Sampling
from mgrpo.engines.decode import _new_row, _sample, kept_set, uniforms
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


logits_of_a_few = st.lists(st.floats(-3.0, 3.0, width=32), min_size=2, max_size=12)
truncations = st.builds(
    Sampling,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    max_tokens=st.just(1),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 0, 1, 3, 8, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
)


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores [V] in float64, -inf where cut off."""
    scores = logits.double()[None] / sampling.temperature
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores[0]


@given(st.permutations(range(24)), st.floats(0.01, 1.0), truncations)
def test_the_kept_set_is_the_one_of_transformers(order: list[int], spread: float, sampling: Sampling) -> None:
    logits = torch.tensor(order, dtype=torch.float32) * spread  # no two alike: ties are not the warpers' to decide
    scores = warped(logits, sampling)
    nudged = [replace(sampling, top_p=sampling.top_p * f, min_p=sampling.min_p * f) for f in (1 - 1e-5, 1 + 1e-5)]
    assume(all(torch.equal(warped(logits, s).isfinite(), scores.isfinite()) for s in nudged))  # rounding decides these
    kept = kept_set(torch.log_softmax(logits / sampling.temperature, 0), sampling)
    expected = scores.isfinite().nonzero()[:, 0]
    assert kept.tolist() == sorted(expected.tolist(), key=lambda id: -order[id])


@settings(max_examples=12)
@given(logits_of_a_few, truncations, st.integers(0, 10**6))
def test_sampled_frequencies_follow_the_softmax_over_the_kept_set(
    logits: list[float], sampling: Sampling, seed: int
) -> None:
    """Pearson's statistic over 1,000 draws stays within ten standard deviations of its mean."""
    draws, tokens = 1000, len(logits)
    counts = np.bincount(_drawn(torch.tensor(logits), uniforms(seed, ID, 1, draws), sampling), minlength=tokens)
    at_temperature = torch.log_softmax(torch.tensor(logits) / sampling.temperature, 0)
    kept = kept_set(at_temperature, sampling).numpy()
    expected = np.zeros(tokens)
    expected[kept] = draws * torch.softmax(at_temperature[kept].double(), 0).numpy()
    assert not counts[expected == 0].any()
    statistic = float(((counts - expected) ** 2 / np.maximum(expected, 1.0)).sum())
    assert statistic < tokens + 10 * (2 * tokens) ** 0.5


def _drawn(logits: torch.Tensor, noise: np.ndarray, sampling: Sampling) -> np.ndarray:
    """One draw from ``logits`` [V] per number of ``noise``."""
    rows = [_new_row(Request(ID, (0,), sampling, ())) for _ in noise]
    for row, number in zip(rows, noise, strict=True):
        row.noise = [number]
    return _sample(logits.expand(len(noise), -1), rows, 0).numpy()
