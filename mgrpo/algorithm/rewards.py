"""Grades -> a Reward for every trajectory of a rollout's tree (equations 4 and 5 of M-GRPO, arXiv 2511.13288).

    planner      R_M = a1 * format + a2 * correct                           if its format is valid, else 0     (4)
    sub-agent    R_S = b1 * format + b2 * correct_main + b3 * expert        if its format is valid, else 0     (5)

``format`` is 0 or 1; the other terms lie in [0, 1]. ``correct_main`` is the planner's correctness, copied to every
descendant. A term that nobody could grade is unknown, which is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from mgrpo.types import Grade, Reward, Rollout, Trajectory, TrajectoryId

OnUnknown = Literal["renormalise", "exclude"]

VALID, INVALID, NOT_GRADED = Grade(1.0), Grade(0.0), Grade(None, "not graded")


def rewards(
    rollout: Rollout,
    grades: Mapping[TrajectoryId, Grade],
    weights: Mapping[str, Mapping[str, float]],
    unknown: OnUnknown = "renormalise",
) -> dict[TrajectoryId, Reward]:
    """One Reward per trajectory of ``rollout``, in the rollout's order.

    ``grades`` holds the root's answer accuracy and each child's expert grade; an absent grade is unknown.
    ``weights[agent]`` names every term of its equation: format, correct for the root's agent; format, correct_main,
    expert for the others. A weight of 0 leaves the term out, known or not. Parts are raw, before weights.

    A rollout or trajectory that failed by infrastructure is worth None, with the cause. So is a valid trajectory all
    of whose weighted outcome terms are unknown: a format point alone must not pass for a full reward. For one that
    has some, ``unknown`` decides: "renormalise" rescales the known terms to the weights' sum, "exclude" gives None.
    Raises ValueError for weights that do not fit the equation and for a grade outside [0, 1].
    """
    correct_main = _correct_main(rollout, grades)
    result = {}
    for trajectory in rollout.trajectories:
        terms = _terms(trajectory, grades, correct_main)
        failure = rollout.failure or trajectory.failure
        if failure is not None:
            parts = {name: term.value for name, term in terms.items()} | {"format": None}
            result[trajectory.id] = Reward(None, parts, str(failure))
        else:
            result[trajectory.id] = combine(terms, _weights_of(trajectory.id, terms, weights), unknown)
    return result


def combine(terms: Mapping[str, Grade], weights: Mapping[str, float], unknown: OnUnknown) -> Reward:
    """The weighted sum of equations (4) and (5) over ``terms``, of which "format" is the gate and always known."""
    parts = {name: term.value for name, term in terms.items()}
    if not parts["format"]:
        return Reward(0.0, parts)
    counted = [name for name in terms if weights[name] != 0.0]
    known = {name: value for name in counted if (value := parts[name]) is not None}
    missing = [name for name in counted if name not in known]
    outcomes = [name for name in counted if name != "format"]
    if missing and (unknown == "exclude" or not any(name in known for name in outcomes)):
        return Reward(None, parts, "; ".join(f"{name} unknown: {terms[name].cause}" for name in missing))
    value = math.fsum(weights[name] * term for name, term in known.items())
    if missing:
        value *= math.fsum(weights[name] for name in counted) / math.fsum(weights[name] for name in known)
    # Two mixes of terms that are equal on paper (.1 + .4 and .1 + .5 * .8) must tie, or their last bit would be
    # standardised into advantages of +-1.
    return Reward(round(value, 12), parts)


def _terms(trajectory: Trajectory, grades: Mapping[TrajectoryId, Grade], correct_main: Grade) -> dict[str, Grade]:
    own = _grade(trajectory.id, grades)
    format = VALID if trajectory.valid_format else INVALID
    if trajectory.parent is None:
        return {"format": format, "correct": own}
    return {"format": format, "correct_main": correct_main, "expert": own}


def _correct_main(rollout: Rollout, grades: Mapping[TrajectoryId, Grade]) -> Grade:
    """What every descendant inherits: an answer in an invalid format is no correct answer, a failed root is unknown."""
    root = rollout.root
    if root.failure is not None:
        return Grade(None, f"{root.id} failed by {root.failure}")
    return _grade(root.id, grades) if root.valid_format else INVALID


def _grade(id: TrajectoryId, grades: Mapping[TrajectoryId, Grade]) -> Grade:
    grade = grades.get(id, NOT_GRADED)
    if grade.value is not None and not 0.0 <= grade.value <= 1.0:
        raise ValueError(f"{id}: grade {grade.value} of grader {grade.grader!r} is outside [0, 1]; rescale it there")
    return grade


def _weights_of(
    id: TrajectoryId, terms: Mapping[str, Grade], weights: Mapping[str, Mapping[str, float]]
) -> Mapping[str, float]:
    own = weights.get(id.agent)
    if own is None:
        raise ValueError(f"{id}: no reward weights for agent {id.agent!r}; known agents: {sorted(weights)}")
    if own.keys() != terms.keys():
        raise ValueError(f"{id}: reward weights of {id.agent!r} name {sorted(own)}; they must name {sorted(terms)}")
    return own
