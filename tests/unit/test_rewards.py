"""Equations (4) and (5), and what happens to terms that are not known."""

from __future__ import annotations

import pytest

from mgrpo.algorithm.rewards import rewards
from mgrpo.types import Failure, Findings, Grade, Parent, Reply, Rollout, Trajectory, TrajectoryId, Turn

WEIGHTS = {
    "planner": {"format": 0.1, "correct": 0.9},
    "searcher": {"format": 0.1, "correct_main": 0.4, "expert": 0.5},
    "reader": {"format": 0.2, "correct_main": 0.3, "expert": 0.5},
}
PLANNER = TrajectoryId(0, 0, "planner", 0)
CHILD = TrajectoryId(0, 0, "searcher", 0)
SECOND = TrajectoryId(0, 0, "searcher", 1)
GRANDCHILD = TrajectoryId(0, 0, "reader", 0)
OUTAGE = Failure("ToolTimeout", "search did not answer in 30 s")


def trajectory(id, *, parent=None, valid=True, failure=None):
    reply = Reply(answer=Findings("x")) if valid else Reply(error="unclosed tag")
    turn = Turn((1,), (2, 3), (-0.1, -0.2), 0, "stop", "x", reply)
    link = Parent(parent, 0, 0) if parent else None
    return Trajectory(id, "t", (turn,), "answer", reply.answer, link, failure=failure)


def tree(*, planner=None, child=None, failure=None):
    return Rollout(
        0,
        0,
        (
            trajectory(PLANNER, **(planner or {})),
            trajectory(CHILD, parent=PLANNER, **(child or {})),
            trajectory(SECOND, parent=PLANNER),
            trajectory(GRANDCHILD, parent=CHILD),
        ),
        failure,
    )


def grades(planner=1.0, child=0.8, second=0.2, grandchild=1.0):
    values = {PLANNER: planner, CHILD: child, SECOND: second, GRANDCHILD: grandchild}
    return {id: Grade(value, None if value is not None else "judge is down") for id, value in values.items()}


def values(rollout, graded, **options):
    return {id: reward.value for id, reward in rewards(rollout, graded, WEIGHTS, **options).items()}


def test_equations_4_and_5_over_three_generations():
    result = rewards(tree(), grades(), WEIGHTS)
    assert list(result) == [PLANNER, CHILD, SECOND, GRANDCHILD]
    assert {id: r.value for id, r in result.items()} == {PLANNER: 1.0, CHILD: 0.9, SECOND: 0.6, GRANDCHILD: 1.0}
    assert result[PLANNER].parts == {"format": 1.0, "correct": 1.0}
    assert result[CHILD].parts == {"format": 1.0, "correct_main": 1.0, "expert": 0.8}
    assert result[CHILD].cause is None


def test_a_wrong_planner_leaves_its_children_their_own_terms():
    assert values(tree(), grades(planner=0.0)) == {PLANNER: 0.1, CHILD: 0.5, SECOND: 0.2, GRANDCHILD: 0.7}


def test_an_invalid_format_is_worth_zero_whatever_else_and_even_if_ungraded():
    invalid = tree(child={"valid": False})
    assert values(invalid, grades())[CHILD] == 0.0
    result = rewards(invalid, grades(child=None), WEIGHTS)[CHILD]
    assert result.value == 0.0
    assert result.parts == {"format": 0.0, "correct_main": 1.0, "expert": None}


def test_an_invalid_planner_gives_its_children_no_correctness():
    result = rewards(tree(planner={"valid": False}), grades(planner=None), WEIGHTS)
    assert result[PLANNER].value == 0.0
    assert result[CHILD].value == pytest.approx(0.1 + 0.5 * 0.8)
    assert result[GRANDCHILD].parts["correct_main"] == 0.0


def test_unknown_expert_renormalises_b_over_the_known_terms():
    result = rewards(tree(), grades(child=None, planner=0.0), WEIGHTS)[CHILD]
    assert result.value == pytest.approx(0.1 * 1.0 / 0.5)
    assert result.parts["expert"] is None
    assert values(tree(), grades(child=None))[CHILD] == pytest.approx(1.0)


def test_renormalising_keeps_the_weights_sum():
    weights = WEIGHTS | {"searcher": {"format": 0.2, "correct_main": 0.8, "expert": 1.0}}
    assert rewards(tree(), grades(child=None), weights)[CHILD].value == pytest.approx(2.0)


def test_unknown_expert_can_exclude_the_trajectory():
    result = rewards(tree(), grades(child=None), WEIGHTS, unknown="exclude")
    assert result[CHILD].value is None
    assert result[CHILD].cause == "expert unknown: judge is down"
    assert result[SECOND].value == 0.6


def test_an_ungraded_planner_is_unknown_and_so_is_what_its_children_copy():
    result = rewards(tree(), grades(planner=None), WEIGHTS)
    assert result[PLANNER].value is None
    assert result[PLANNER].cause == "correct unknown: judge is down"
    assert result[CHILD].value == pytest.approx((0.1 + 0.5 * 0.8) / 0.6)
    assert result[CHILD].parts["correct_main"] is None


def test_a_format_point_alone_is_no_reward():
    result = rewards(tree(), grades(planner=None, child=None), WEIGHTS)[CHILD]
    assert result.value is None
    assert "correct_main unknown" in str(result.cause) and "expert unknown" in str(result.cause)


def test_a_missing_grade_is_unknown_not_zero():
    result = rewards(tree(), {}, WEIGHTS)
    assert {r.value for r in result.values()} == {None}
    assert result[PLANNER].cause == "correct unknown: not graded"


def test_a_weight_of_zero_leaves_an_unknown_term_out():
    weights = WEIGHTS | {"searcher": {"format": 0.1, "correct_main": 0.9, "expert": 0.0}}
    result = rewards(tree(), grades(child=None), weights, unknown="exclude")[CHILD]
    assert result.value == 1.0
    assert result.parts["expert"] is None


def test_a_failed_trajectory_is_unknown_even_in_an_invalid_format():
    result = rewards(tree(child={"failure": OUTAGE, "valid": False}), grades(), WEIGHTS)
    assert result[CHILD].value is None
    assert result[CHILD].cause == "ToolTimeout: search did not answer in 30 s"
    assert result[CHILD].parts == {"format": None, "correct_main": 1.0, "expert": 0.8}
    assert result[PLANNER].value == 1.0


def test_a_failed_planner_gives_its_children_an_unknown_correctness():
    result = rewards(tree(planner={"failure": OUTAGE}), grades(), WEIGHTS)
    assert result[PLANNER].value is None
    assert result[CHILD].value == pytest.approx((0.1 + 0.5 * 0.8) / 0.6)
    assert rewards(tree(planner={"failure": OUTAGE}), grades(), WEIGHTS, "exclude")[CHILD].value is None


def test_a_failed_rollout_makes_every_trajectory_unknown():
    result = rewards(tree(failure=OUTAGE), grades(), WEIGHTS)
    assert [r.value for r in result.values()] == [None] * 4
    assert {r.cause for r in result.values()} == {"ToolTimeout: search did not answer in 30 s"}


def test_a_grade_of_zero_is_a_grade():
    assert values(tree(), grades(planner=0.0, child=0.0), unknown="exclude")[CHILD] == 0.1


def test_mixes_of_terms_that_are_equal_on_paper_tie_exactly():
    right = values(tree(), grades(planner=1.0, child=0.0))[CHILD]
    wrong = values(tree(), grades(planner=0.0, child=0.8))[CHILD]
    assert right == wrong == 0.5


def test_weights_that_do_not_fit_are_refused_with_the_names():
    with pytest.raises(ValueError, match=r"g0/r0/reader/0: no reward weights for agent 'reader'.*planner.*searcher"):
        rewards(tree(), grades(), {name: WEIGHTS[name] for name in ("planner", "searcher")})
    with pytest.raises(ValueError, match=r"'searcher' name \['correct', 'format'\].*correct_main"):
        rewards(tree(), grades(), WEIGHTS | {"searcher": {"format": 0.1, "correct": 0.9}})


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan")])
def test_a_grade_outside_its_range_names_the_trajectory(value):
    with pytest.raises(ValueError, match=r"g0/r0/searcher/0: grade .* is outside \[0, 1\]"):
        rewards(tree(), grades(child=value), WEIGHTS)
