"""The same rollouts, graded, without learning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgrpo.agents.rollout import Watcher, run_groups
from mgrpo.algorithm.rewards import rewards
from mgrpo.config.registry import load_object
from mgrpo.errors import GraderError, InfrastructureError
from mgrpo.report.metrics import rollout_metrics
from mgrpo.tasks.base import TaskSource
from mgrpo.team import Team
from mgrpo.types import Failure, Grade, Group, Reward, Rollout, Task, Trajectory, TrajectoryId


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
    watcher: Watcher | None = None,
) -> Evaluation:
    """``k`` rollouts of each of the first ``questions`` tasks of ``source``, all in lockstep.

    ``temperature`` None is the recipe's, 0 is greedy; ``closed_book`` takes the tools away. Raises
    InfrastructureError as `reward` does.
    """
    acting = team.acting(seed, temperature, closed_book)
    tasks = [(i, source.task(i)) for i in range(min(questions, len(source)))]
    groups = await run_groups(tasks, acting, k, source.corpus, team.scheduler(), seed, watcher)
    worth = await reward(team, source, groups)
    return Evaluation(tuple(groups), worth, rollout_metrics(groups, worth))


async def reward(team: Team, source: TaskSource, groups: Sequence[Group]) -> dict[TrajectoryId, Reward]:
    """Grades of every trajectory, then equations (4) and (5), or the recipe's own reward function.

    Raises InfrastructureError where broken engines, tools or graders left no rollout with a known reward: going on
    would use up the tasks and teach nothing.
    """
    config = team.config
    function = load_object(config.reward, "reward") if config.reward else rewards
    weights = {name: agent.reward_weights or {} for name, agent in config.agents.items()}
    found: dict[TrajectoryId, Reward] = {}
    lost: list[Failure] = []
    for group in groups:
        for rollout in group.rollouts:
            grades, failure = await _grades(source, group.task, rollout, config.rollout.grade_timeout_s)
            found |= function(rollout, grades, weights, config.rollout.unknown_reward)
            failure = rollout.failure or (failure if found[rollout.root.id].value is None else None)
            lost += [failure] if failure is not None else []
    if lost and len(lost) == sum(len(group.rollouts) for group in groups):
        raise InfrastructureError(
            f"all {len(lost)} rollouts of groups {groups[0].id} to {groups[-1].id} were lost, first by {lost[0]}"
            f" (cut-off ones ran {1 + config.rollout.max_retries} times); mend what is broken and start again from here"
        )
    return found


async def _grades(
    source: TaskSource, task: Task, rollout: Rollout, seconds: float
) -> tuple[dict[TrajectoryId, Grade], Failure | None]:
    """Grades of a rollout's trajectories, and why the root has none where its grader broke."""

    async def grade(trajectory: Trajectory) -> Grade | Failure:
        try:
            async with asyncio.timeout(seconds):
                return await source.grade(task, trajectory)
        except GraderError as error:
            return error.as_failure()
        except TimeoutError:
            return GraderError(f"no grade of {trajectory.id} after {seconds:g} s").as_failure()

    graded = await asyncio.gather(*(grade(trajectory) for trajectory in rollout.trajectories))
    grades = {
        trajectory.id: Grade(None, str(got)) if isinstance(got, Failure) else got
        for trajectory, got in zip(rollout.trajectories, graded, strict=True)
    }
    return grades, graded[0] if isinstance(graded[0], Failure) else None
