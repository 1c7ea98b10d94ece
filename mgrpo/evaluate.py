"""The same rollouts, graded, without learning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgrpo.agents.rollout import run_groups
from mgrpo.algorithm.rewards import rewards
from mgrpo.config.registry import load_object, settings
from mgrpo.report.metrics import rollout_metrics
from mgrpo.tasks.base import TaskSource
from mgrpo.team import Team
from mgrpo.types import Group, Reward, TrajectoryId


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was asked, what was answered, and what it was worth."""

    groups: tuple[Group, ...]
    rewards: Mapping[TrajectoryId, Reward]
    metrics: Mapping[str, float | None]


async def evaluate(
    team: Team,
    source: TaskSource,
    questions: int,
    k: int = 1,
    temperature: float | None = None,
    closed_book: bool = False,
    seed: int = 0,
) -> Evaluation:
    """``k`` rollouts of each of the first ``questions`` tasks of ``source``, all in lockstep.

    ``temperature`` None is the recipe's, 0 is greedy; ``closed_book`` takes the tools away.
    """
    acting = team.acting(seed, temperature, closed_book)
    tasks = [(i, source.task(i)) for i in range(min(questions, len(source)))]
    groups = await run_groups(tasks, acting, k, source.corpus, team.scheduler(), seed)
    worth = await reward(team, source, groups)
    return Evaluation(tuple(groups), worth, rollout_metrics(groups, worth))


async def reward(team: Team, source: TaskSource, groups: Sequence[Group]) -> dict[TrajectoryId, Reward]:
    """Grades of every trajectory, then equations (4) and (5), or the recipe's own reward function."""
    config = team.config
    function = load_object(config.reward, "reward") if config.reward else rewards
    weights = {name: agent.reward_weights or {} for name, agent in config.agents.items()}
    found: dict[TrajectoryId, Reward] = {}
    for group in groups:
        for rollout in group.rollouts:
            asked = (source.grade(group.task, trajectory) for trajectory in rollout.trajectories)
            graded = zip(rollout.trajectories, await asyncio.gather(*asked), strict=True)
            grades = {trajectory.id: grade for trajectory, grade in graded}
            found |= function(rollout, grades, weights, config.rollout.unknown_reward)
    return found


def evaluation_source(team: Team, split: str = "tasks") -> TaskSource:
    """The questions of [evaluation]: ``split`` "tasks" (test) or "dev_tasks"."""
    config = team.config
    table = config.tasks_with(getattr(config.evaluation, split))
    source: TaskSource = settings("tasks", table, f"evaluation.{split}").build(seed=config.seed)
    return source
