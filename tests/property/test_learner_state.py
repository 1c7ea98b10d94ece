"""Optimiser state comes back from JSON and safetensors bit for bit, whatever is in it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mgrpo.policy.checkpoint import plain, whole
from mgrpo.policy.optimizers import Muon

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def restored(state: Any) -> Any:
    """``state`` as another process reads it from files."""
    tensors: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(plain(state, "", tensors), allow_nan=False)
        save_file(tensors, Path(folder) / "x")
        return whole(json.loads(text), load_file(Path(folder) / "x"))


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types, numbers and tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


# ---------------------------------------------------------------- any state


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(draw(DTYPES))
    return made.mT if made.ndim > 1 and draw(st.booleans()) else made  # not contiguous


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors()
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tensor", "tuple", "dict", "float"]), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(STATES)
def test_any_state_comes_back(state: Any) -> None:
    assert same(restored(state), state)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {(1, 2): 3}, {None: 1}, {"a": [lambda: 1]}])
def test_what_no_file_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="optimiser state"):
        plain(value, "", {})


@pytest.mark.parametrize("value", [{}, {"tensor": 1}, {"dict": {}}, {"a": 1, "b": 2}, {"tuple": "x"}])
def test_what_was_not_written_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no value of an optimiser's state"):
        whole(value, {})


# ---------------------------------------------------------------- both optimisers


def parameters(shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


@settings(max_examples=25)
@given(
    st.sampled_from(["adamw", "muon"]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    DTYPES,
    st.floats(1e-6, 1e-2),
    st.floats(0, 0.999),
    st.integers(0, 3),
)
def test_an_optimiser_goes_on_bit_for_bit(
    kind: str, shapes: list[tuple[int, int]], dtype: torch.dtype, rate: float, momentum: float, steps: int
) -> None:
    def make(own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups: Any = [{"params": own[:1]}, {"params": own[1:], "lr": rate / 3}]
        if kind == "muon":
            return Muon(groups, rate, momentum, weight_decay=rate)
        return torch.optim.AdamW(groups, rate, (momentum, 0.98), weight_decay=rate, amsgrad=steps == 2)

    ours = make(own := parameters(shapes, dtype))
    for number in range(steps):
        step(ours, number)
    theirs = make(copies := [torch.nn.Parameter(parameter.detach().clone()) for parameter in own])
    theirs.load_state_dict(restored(ours.state_dict()))
    assert same(theirs.state_dict(), ours.state_dict())
    for optimizer in (ours, theirs):
        step(optimizer, steps)
    assert all(same(copy.detach(), parameter.detach()) for copy, parameter in zip(copies, own, strict=True))
