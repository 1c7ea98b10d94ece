"""Shares of gradient mass."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.report.shares import agent_shares, invocation_shares, shares_by_step


def told(mass: float | None) -> dict[str, Any]:
    return {"rows": 4.0, "gradient_mass": mass}


def test_shares_are_of_the_sum_over_all_agents() -> None:
    assert agent_shares({"planner": told(0.6), "searcher": told(0.2)}) == pytest.approx(
        {"planner": 0.75, "searcher": 0.25}
    )
    assert agent_shares({"planner": told(0.6), "searcher": {}}) == {"planner": 1.0, "searcher": 0.0}  # without rows


@pytest.mark.parametrize(
    "learned",
    [
        {},
        {"planner": told(0.6)},
        {"planner": told(0.0), "searcher": told(0.0)},
        {"planner": told(0.6), "searcher": told(None)},
        {"planner": told(0.6), "searcher": told(float("nan"))},
        {"planner": told(0.6), "searcher": {"rows": 4.0}},  # demonstrations: nothing is compared
    ],
)
def test_where_shares_say_nothing_there_are_none(learned: dict[str, Any]) -> None:
    assert agent_shares(learned) == {}


def test_shares_by_step_take_records_in_any_order() -> None:
    masses = {(0, "a"): 1.0, (0, "b"): 3.0, (1, "b"): 1.0, (1, "a"): 1.0, (2, "a"): 5.0}
    records = [{"step": step, "agent": agent, **told(mass)} for (step, agent), mass in masses.items()]
    expected = {0: {"a": 0.25, "b": 0.75}, 1: {"a": 0.5, "b": 0.5}}  # the other agent has not told of step 2 yet
    assert shares_by_step(records) == shares_by_step(records[::-1]) == expected


@settings(max_examples=50)
@given(st.dictionaries(st.integers(0, 20), st.floats(0, 1e3), max_size=8))
def test_shares_of_invocations_are_their_agent_s_whole(masses: dict[int, float]) -> None:
    metrics = {"gradient_mass": sum(masses.values()), **{f"gradient_mass/{i}": mass for i, mass in masses.items()}}
    shares = invocation_shares(metrics)
    assert (sum(shares.values()) == pytest.approx(1.0)) if sum(masses.values()) > 1e-300 else True
    assert shares == {} or list(shares) == sorted(masses)
