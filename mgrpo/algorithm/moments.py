"""Weighted statistics of groups: arrays hold one number per member, ``group`` numbers its group from 0. Torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def moments(values: Floats, weights: Floats, group: Integers, unbiased: bool = False) -> tuple[Floats, Floats]:
    """Weighted mean and standard deviation of every group; 0 where the unbiased one has a single member."""
    total = np.bincount(group, weights).astype(np.float64)
    mean = np.bincount(group, weights * values) / total
    squares = np.bincount(group, weights * (values - mean[group]) ** 2)
    freedom = total - np.bincount(group, weights**2) / total if unbiased else total
    return mean, np.sqrt(np.where(freedom > 0.0, squares / or_one(freedom), 0.0))


def low_of(values: Floats, group: Integers) -> Floats:
    """Minimum of every group."""
    low = np.full(int(group.max()) + 1, np.inf)
    np.minimum.at(low, group, values)
    return low


def span_of(values: Floats, group: Integers) -> Floats:
    """max - min of every group."""
    high = np.full(int(group.max()) + 1, -np.inf)
    np.maximum.at(high, group, values)
    span: Floats = high - low_of(values, group)
    return span


def or_one(values: Floats) -> Floats:
    """The positive ``values``, and 1 in place of the others: what can be divided by."""
    return np.where(values > 0.0, values, 1.0)
