"""Evaluation: the same rollouts, graded, without learning."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_recipe import table, tiny, token_reward

from mgrpo.config import resolve
from mgrpo.evaluate import Evaluation, evaluate, evaluation_source
from mgrpo.run import RunFolder
from mgrpo.team import Team


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Team:
    config = tiny()
    return Team(config, RunFolder(tmp_path_factory.mktemp("run")).models(config))


def ask(team: Team, questions: int = 2, **options: object) -> Evaluation:
    return asyncio.run(evaluate(team, evaluation_source(team), questions, **options))  # type: ignore[arg-type]


def test_k_rollouts_of_the_first_questions_with_a_reward_each(team: Team) -> None:
    result = ask(team, questions=3, k=2)
    assert [group.id for group in result.groups] == [0, 1, 2]
    assert [group.task for group in result.groups] == [evaluation_source(team).task(i) for i in range(3)]
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
    worlds = {split: evaluation_source(team, split).task(0).info["split"] for split in ("tasks", "dev_tasks")}
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
    plan = {
        "tasks": {"type": "jsonl", "path": str(tmp_path / "train.jsonl")},
        "evaluation": {"tasks": {"path": str(tmp_path / "test.jsonl")}},
    }
    world = table()
    models = RunFolder(tmp_path / "run").models(resolve(world))
    agents = {name: agent | {"model": str(models[name])} for name, agent in world["agents"].items()}
    team = Team(resolve(table(agents=agents, **plan)), models)
    assert len(ask(team, questions=5).groups) == 1
