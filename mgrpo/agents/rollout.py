"""One task, K rollouts -> a Group; many tasks at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgrpo.agents.loop import Agent, Episode, run, together
from mgrpo.agents.scheduler import Scheduler
from mgrpo.errors import InfrastructureError
from mgrpo.types import Corpus, Group, Rollout, Task


@dataclass(frozen=True)
class Team:
    """The root agent, which reaches the others through its tools, and what one rollout may use.

    ``max_depth`` counts levels below the root (0: no delegation), ``max_calls`` sub-agent calls in the whole tree.
    """

    root: Agent
    max_depth: int = 4
    max_calls: int = 64
    rollout_timeout_s: float = 1800.0


async def run_groups(
    tasks: Sequence[tuple[int, Task]],
    team: Team,
    k: int,
    corpus_of: Callable[[Task], Corpus | None],
    scheduler: Scheduler,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Group]:
    """K rollouts of each (group id, task), all at once; groups in the order of ``tasks``.

    Failures of engines and tools are values in the result; other exceptions end every rollout and are raised.
    """
    episodes = [
        Episode(task, group, index, scheduler, corpus, seed, team.max_depth, team.max_calls, clock)
        for group, task in tasks
        for corpus in (corpus_of(task),)
        for index in range(k)
    ]
    for episode in episodes:  # all of them before the first asks for a turn
        scheduler.join(episode.member)
    try:
        rollouts = await together([_rollout(episode, team) for episode in episodes])
    finally:
        for episode in episodes:  # one whose task never started has not left by itself
            scheduler.leave(episode.member)
    return [
        Group(group, task, tuple(rollouts[first : first + k]))
        for first, (group, task) in zip(range(0, len(rollouts), max(k, 1)), tasks, strict=True)
    ]


async def _rollout(episode: Episode, team: Team) -> Rollout:
    root = episode.root(team.root.name)
    failure = None
    try:
        async with asyncio.timeout(team.rollout_timeout_s) as deadline:
            failure = (await run(team.root, root, episode.task.question, "", None, episode)).failure
    except TimeoutError:
        if not deadline.expired():
            raise
        late = InfrastructureError(f"rollout g{root.group}/r{root.rollout} not over after {team.rollout_timeout_s:g} s")
        failure = late.as_failure()
    finally:
        episode.scheduler.leave(episode.member)
    trajectories = sorted(episode.trajectories, key=lambda t: (t.id != root, t.id))
    return Rollout(episode.group, episode.index, tuple(trajectories), failure)
