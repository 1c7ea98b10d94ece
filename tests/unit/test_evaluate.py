"""Evaluation: the same rollouts, graded, without learning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from report_samples import failed, group_of, rollout
from tiny_recipe import table, tiny, token_reward

from mgrpo.agents.rollout import Watcher
from mgrpo.config import resolve
from mgrpo.errors import GraderError, InfrastructureError
from mgrpo.evaluate import Evaluation, evaluate, reward
from mgrpo.run import RunFolder
from mgrpo.team import Team
from mgrpo.types import Grade, Reward, Rollout, Task, Trajectory


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Team:
    config = tiny()
    return Team(config, RunFolder(tmp_path_factory.mktemp("run")).models(config))


def ask(team: Team, questions: int = 2, **options: object) -> Evaluation:
    return asyncio.run(evaluate(team, team.questions(), questions, **options))  # type: ignore[arg-type]


def test_k_rollouts_of_the_first_questions_with_a_reward_each(team: Team) -> None:
    result = ask(team, questions=3, k=2)
    assert [group.id for group in result.groups] == [0, 1, 2]
    assert [group.task for group in result.groups] == [team.questions().task(i) for i in range(3)]
    trajectories = [t for group in result.groups for r in group.rollouts for t in r.trajectories]
    assert sum(len(group.rollouts) for group in result.groups) == 6
    assert set(result.rewards) == {t.id for t in trajectories}
    assert result.metrics["rollouts"] == 6 and result.metrics["success"] is not None


def test_the_same_seed_gives_the_same_rollouts_whatever_was_asked_before(team: Team) -> None:
    first = ask(team, seed=3)
    ask(team, questions=4, k=2, temperature=0.3, seed=9)
    assert ask(team, seed=3).groups == first.groups
    assert ask(team, seed=4).groups != first.groups


def test_greedy_does_not_depend_on_the_seed(team: Team) -> None:
    assert ask(team, temperature=0.0, seed=1).groups == ask(team, temperature=0.0, seed=2).groups


def test_a_closed_book_takes_every_tool_away(team: Team) -> None:
    for group in ask(team, closed_book=True).groups:
        (trajectory,) = group.rollouts[0].trajectories
        (turn,) = trajectory.turns
        assert turn.forced and not turn.reply.calls


def test_test_and_dev_questions_are_other_worlds(team: Team) -> None:
    worlds = {split: team.questions(split).task(0).info["split"] for split in ("tasks", "dev_tasks")}
    assert worlds == {"tasks": "test", "dev_tasks": "dev"}


def test_the_recipes_own_reward_function_is_used(tmp_path: Path) -> None:
    config = tiny(reward="tiny_recipe:token_reward")
    result = ask(Team(config, RunFolder(tmp_path).models(config)))
    expected = {id: r for group in result.groups for ro in group.rollouts for id, r in token_reward(ro).items()}
    assert result.rewards == expected


def test_a_finite_source_has_no_more_questions_than_it_has(tmp_path: Path) -> None:
    for name in ("train", "test"):
        line = '{"question": "What is the capital of Zubora", "answer": "Merova"}\n'
        (tmp_path / f"{name}.jsonl").write_text(line * (2 if name == "train" else 1))
    (tmp_path / "pages.jsonl").write_text('{"url": "p1", "title": "Zubora", "text": "capital Merova ."}\n')
    plan = {
        "tasks": {
            "type": "jsonl",
            "path": str(tmp_path / "train.jsonl"),
            "corpus": str(tmp_path / "pages.jsonl"),
        },
        "evaluation": {"tasks": {"path": str(tmp_path / "test.jsonl")}},
    }
    world = table()
    models = RunFolder(tmp_path / "run").models(resolve(world))
    agents = {name: agent | {"model": str(models[name])} for name, agent in world["agents"].items()}
    team = Team(resolve(table(agents=agents, **plan)), models)
    assert len(ask(team, questions=5).groups) == 1


def test_progress_is_told(team: Team) -> None:
    told: list[tuple[int, int]] = []
    ask(team, questions=3, watcher=Watcher(on_rollout=lambda done, total: told.append((done, total))))
    assert told == [(1, 3), (2, 3), (3, 3)]


# ---------------------------------------------------------------- graders that break


class Judged:
    """Grades by a function of the trajectory."""

    def __init__(self, judge: Callable[[Trajectory], Grade]) -> None:
        self._judge = judge

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        return self._judge(trajectory)


def rewards_by(team: Team, judge: Callable[[Trajectory], Grade], *members: Rollout) -> dict[str, Reward]:
    found = asyncio.run(reward(team, Judged(judge), [group_of(*members)]))  # type: ignore[arg-type]
    return {str(id): worth for id, worth in found.items()}


def test_a_grade_that_could_not_be_had_is_unknown_with_its_cause(team: Team) -> None:
    def judge(trajectory: Trajectory) -> Grade:
        if trajectory.id.rollout == 1:
            raise GraderError("the judge is down")
        return Grade(1.0)

    found = rewards_by(team, judge, rollout(0, 1), rollout(1, 1))
    assert found["g0/r0/planner/0"].value == 1.0
    unknown = found["g0/r1/planner/0"]
    assert unknown.value is None and unknown.cause == "correct unknown: GraderError: the judge is down"


def broken_judge(trajectory: Trajectory) -> Grade:
    raise GraderError("the judge is down")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ((rollout(0, 1), rollout(1, 0)), "all 2 rollouts of groups 0 to 0 were lost, first by GraderError: the judge"),
        ((failed(0), rollout(1, 0)), "all 2 rollouts of groups 0 to 0 were lost, first by EngineTimeout: no answer"),
    ],
)
def test_nothing_known_at_all_is_an_error(team: Team, members: tuple[Rollout, ...], said: str) -> None:
    with pytest.raises(InfrastructureError, match=said):
        rewards_by(team, broken_judge, *members)


def test_a_question_without_a_gold_answer_is_no_broken_grader(team: Team) -> None:
    found = rewards_by(team, lambda trajectory: Grade(None, "no gold"), rollout(0, 1))
    assert found["g0/r0/planner/0"].value is None
