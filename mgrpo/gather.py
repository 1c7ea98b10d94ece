"""The groups of a window with the rewards to learn from: rollouts, grades, dynamic sampling, shaping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgrpo.agents.rollout import Team as ActingTeam
from mgrpo.agents.rollout import Watcher, cut_off, run_groups
from mgrpo.algorithm.shaping import informative, shaped
from mgrpo.config import StageConfig
from mgrpo.evaluate import reward
from mgrpo.objective import shapings
from mgrpo.tasks.base import TaskSource
from mgrpo.team import Team
from mgrpo.types import Group, Reward, Task, TrajectoryId

Rewards = Mapping[TrajectoryId, Reward]


@dataclass(frozen=True, slots=True)
class Gathered:
    """``counts`` are metrics of how the groups came about, such as replaced questions and what a judge cost."""

    groups: Sequence[Group]
    rewards: Rewards
    counts: Mapping[str, float]


async def gather(
    team: Team,
    acting: ActingTeam,
    source: TaskSource,
    stage: StageConfig,
    ids: Sequence[int],
    task: Callable[[int, int], Task],
    watcher: Watcher,
    may_be_lost: bool = False,
) -> Gathered:
    """Groups with these ``ids``; ``task(id, batch)`` is what is asked, with ``batch`` > 0 a replacement.

    With `filter_groups` (dynamic sampling, DAPO), a question whose K rollouts are all worth the same before shaping is
    replaced by another, in at most ``max_num_gen_batches`` batches; what is dull after that is kept as it is. A group
    of which broken infrastructure left fewer than ``rollout.min_rollouts``, after all retries, is accepted with unknown
    rewards. Raises InfrastructureError as `reward` does.
    """
    plan, k = team.config.filter_groups, team.config.num_generations(stage)
    filters = plan.enable and stage.collect == "team"
    groups: dict[int, Group] = {}
    raw: dict[TrajectoryId, Reward] = {}
    due, replaced = list(ids), 0
    for batch in range(plan.max_num_gen_batches if filters else 1):
        asked = [(id, task(id, batch)) for id in due]
        found = await run_groups(asked, acting, k, source.corpus, team.scheduler(), team.config.seed, watcher)
        raw = {id: own for id, own in raw.items() if id.group not in due} | await reward(
            team, source, found, may_be_lost
        )
        groups |= {group.id: group for group in found}
        replaced += len(due) if batch else 0
        due = [group.id for group in found if filters and not informative(root_metrics(group, raw, plan.metric))]
        if not due:
            break
    ready = [groups[id] for id in ids]
    short = [
        group for group in ready if len(group.rollouts) - len(cut_off(group)) < min(k, team.config.rollout.min_rollouts)
    ]
    for group in short:
        raw |= unknown(group, f"fewer than {team.config.rollout.min_rollouts} of {k} rollouts were not cut off")
    plans = shapings(team.config)
    rewards = {id: own for group in ready for r in group.rollouts for id, own in shaped(r, raw, plans).items()}
    counts = {"replaced_groups": float(replaced), "dull_groups": float(len(due))} if filters else {}
    counts |= {"short_groups": float(len(short))} if short else {}
    return Gathered(ready, rewards, counts | team.expert(source).take_metrics())


def unknown(group: Group, cause: str) -> dict[TrajectoryId, Reward]:
    """No reward for anybody in ``group``: it counts as seen and teaches nothing."""
    return {t.id: Reward(None, cause=cause) for rollout in group.rollouts for t in rollout.trajectories}


def root_metrics(group: Group, rewards: Rewards, metric: str) -> list[float | None]:
    """Of every rollout's root: its reward, or the part of it called ``metric``; None where unknown."""
    roots = [rewards[rollout.root.id] for rollout in group.rollouts]
    return [own.value if metric == "reward" or own.value is None else own.parts.get(metric) for own in roots]
