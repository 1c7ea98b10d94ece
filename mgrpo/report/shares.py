"""Who moves the weights: shares of gradient mass, the sum over tokens of |coefficient x advantage|.

By agent, an agent's mass over that of all agents of the step; by invocation index, the mass of an agent's i-th
invocations over that of all its invocations. Unlike gradient norms, masses add up, and a role that is called several
times for each question shows as what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

MASS = "gradient_mass"
Metrics = Mapping[str, Any]
K = TypeVar("K")


def agent_shares(learned: Mapping[str, Metrics]) -> dict[str, float]:
    """``learned`` holds one step's metrics by agent, of all agents that learn. Shares add up to 1.

    An agent without rows had no gradient: it counts 0, so that a planner that stops delegating shows. Empty where
    shares say nothing: fewer than two agents, a mass that is not known, or no gradient anywhere.
    """
    masses = {agent: _mass(metrics) for agent, metrics in learned.items()}
    known = {agent: mass for agent, mass in masses.items() if mass is not None}
    return _shares(known) if len(known) == len(masses) > 1 else {}


def invocation_shares(learned: Metrics) -> dict[int, float]:
    """One agent's shares by invocation index, adding up to 1; empty without gradient."""
    prefix = f"{MASS}/"
    masses = {int(key.removeprefix(prefix)): _finite(learned[key]) for key in learned if key.startswith(prefix)}
    return _shares({index: mass for index, mass in sorted(masses.items()) if mass is not None})


def shares_by_step(records: Iterable[Metrics]) -> dict[int, dict[str, float]]:
    """`agent_shares` of every step in which several agents took their rows, from learn records in any order."""
    steps: dict[int, dict[str, Metrics]] = {}
    for record in records:
        steps.setdefault(int(record["step"]), {})[str(record["agent"])] = record
    return {step: shares for step, learned in steps.items() if (shares := agent_shares(learned))}


def _mass(metrics: Metrics) -> float | None:
    return _finite(metrics.get(MASS)) if metrics.get("rows") else 0.0


def _finite(mass: float | None) -> float | None:
    return mass if mass is not None and math.isfinite(mass) else None


def _shares(masses: Mapping[K, float]) -> dict[K, float]:
    total = math.fsum(masses.values())
    return {key: mass / total for key, mass in masses.items()} if total > 0 else {}
