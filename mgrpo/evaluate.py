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
from mgrpo.tasks.expert import Expert
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


async def reward(
    team: Team, source: TaskSource, groups: Sequence[Group], may_be_lost: bool = False
) -> dict[TrajectoryId, Reward]:
    """Grades of every trajectory, then equations (4) and (5), or the recipe's own reward function.

    Raises InfrastructureError where broken engines, tools or graders left no rollout with a known reward, unless they
    ``may_be_lost``: going on would use up the tasks and teach nothing.
    """
    config, expert = team.config, team.expert(source)
    function = load_object(config.reward, "reward") if config.reward else rewards
    weights = {name: agent.reward_weights or {} for name, agent in config.agents.items()}
    grader = _Grader(source, expert, asyncio.Semaphore(expert.concurrency), config.rollout.grade_timeout_s)
    asked = [(group, rollout) for group in groups for rollout in group.rollouts]
    graded = await asyncio.gather(*(grader.grades(group.task, rollout) for group, rollout in asked))
    found: dict[TrajectoryId, Reward] = {}
    lost: list[Failure] = []
    for (_, rollout), (grades, failure) in zip(asked, graded, strict=True):
        found |= function(rollout, grades, weights, config.rollout.unknown_reward)
        failure = rollout.failure or (failure if found[rollout.root.id].value is None else None)
        lost += [failure] if failure is not None else []
    if lost and len(lost) == len(asked) and not may_be_lost:
        raise InfrastructureError(
            f"all {len(lost)} rollouts of groups {groups[0].id} to {groups[-1].id} were lost, first by {lost[0]}"
            f" (cut-off ones ran {1 + config.rollout.max_retries} times); mend what is broken and start again from here"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Grader:
    """Asks for all grades at once, and the expert's ``places`` at a time: waiting for one is not its time."""

    source: TaskSource
    expert: Expert
    places: asyncio.Semaphore
    seconds: float

    async def grades(self, task: Task, rollout: Rollout) -> tuple[dict[TrajectoryId, Grade], Failure | None]:
        """Of a rollout's trajectories, the root's by the source, the others' by the expert; and why the root has none
        where its grader broke."""
        got = await asyncio.gather(*(self._grade(task, trajectory) for trajectory in rollout.trajectories))
        grades = {
            trajectory.id: Grade(None, str(one)) if isinstance(one, Failure) else one
            for trajectory, one in zip(rollout.trajectories, got, strict=True)
        }
        return grades, got[0] if isinstance(got[0], Failure) else None

    async def _grade(self, task: Task, trajectory: Trajectory) -> Grade | Failure:
        try:
            async with self.places, asyncio.timeout(self.seconds):
                grader = self.source if trajectory.parent is None else self.expert
                return await grader.grade(task, trajectory)
        except GraderError as error:
            return error.as_failure()
        except TimeoutError:
            return GraderError(f"no grade of {trajectory.id} after {self.seconds:g} s").as_failure()
