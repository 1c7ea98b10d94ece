"""One task, K rollouts -> a Group; many tasks at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from mgrpo.agents.loop import Agent, Episode, run, together
from mgrpo.agents.scheduler import Scheduler
from mgrpo.errors import InfrastructureError
from mgrpo.types import Corpus, Failure, Group, Rollout, Task

FIRST_PAUSE_S = 1.0  # before failed groups run again; doubled each time, since what broke is often being restarted


@dataclass(frozen=True)
class Team:
    """The root agent, which reaches the others through its tools, and what one rollout may use.

    ``max_depth`` counts levels below the root (0: no delegation), ``max_calls`` sub-agent calls in the whole tree;
    ``max_retries`` is how often rollouts run again in which trajectories were cut off, see `cut_off`.
    """

    root: Agent
    max_depth: int = 4
    max_calls: int = 64
    rollout_timeout_s: float = 1800.0
    max_retries: int = 0


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told while rollouts run."""

    on_rollout: Callable[[int, int], None] = lambda done, total: None
    on_retry: Callable[[int, Failure], None] = lambda groups, first: None  # how many groups, and the first cause


async def run_groups(
    tasks: Sequence[tuple[int, Task]],
    team: Team,
    k: int,
    corpus_of: Callable[[Task], Corpus | None],
    scheduler: Scheduler,
    seed: int = 0,
    watcher: Watcher | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Group]:
    """K rollouts of each (group id, task), all at once; groups in the order of ``tasks``.

    Rollouts with trajectories that were cut off run again, at most ``team.max_retries`` times; where batches are to
    repeat, their whole groups do. Failures that are left are values in the result; other exceptions end every rollout
    and are raised.
    """
    watcher = watcher or Watcher()
    run_once = partial(_run_once, team=team, corpus_of=corpus_of, scheduler=scheduler, seed=seed, clock=clock)
    found = {group.id: group for group in await run_once([(id, task, range(k)) for id, task in tasks], watcher)}
    for attempt in range(team.max_retries):
        failed = {group.id: cut for group in found.values() if (cut := cut_off(group))}
        if not failed:
            break
        watcher.on_retry(len(failed), next(iter(next(iter(failed.values())).values())))
        await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        again = [(id, task, range(k) if scheduler.whole else list(failed[id])) for id, task in tasks if id in failed]
        for group in await run_once(again, watcher):
            kept = [r for r in found[group.id].rollouts if r.index not in {new.index for new in group.rollouts}]
            rollouts = sorted([*kept, *group.rollouts], key=lambda rollout: rollout.index)
            found[group.id] = replace(group, rollouts=tuple(rollouts))
    return list(found.values())


def cut_off(group: Group) -> dict[int, Failure]:
    """Rollout index -> why a trajectory of it was cut off: by an engine or by the rollout's deadline, not by a broken
    tool, of which the agent reads and goes on."""
    cut = [(r.index, r.failure or t.failure) for r in group.rollouts for t in r.trajectories if t.ending == "failure"]
    return {index: failure for index, failure in reversed(cut) if failure is not None}


async def _run_once(
    asked: Sequence[tuple[int, Task, Sequence[int]]],
    watcher: Watcher,
    team: Team,
    corpus_of: Callable[[Task], Corpus | None],
    scheduler: Scheduler,
    seed: int,
    clock: Callable[[], float],
) -> list[Group]:
    episodes = [
        [Episode(task, group, i, scheduler, corpus, seed, team.max_depth, team.max_calls, clock) for i in indices]
        for group, task, indices in asked
        for corpus in (corpus_of(task),)
    ]
    every = [episode for group in episodes for episode in group]
    for episode in every:  # all of them before the first asks for a turn
        scheduler.join(episode.member)
    done = count(1)

    async def reported(episode: Episode) -> Rollout:
        rollout = await _rollout(episode, team)
        watcher.on_rollout(next(done), len(every))
        return rollout

    try:
        rollouts = iter(await together([reported(episode) for episode in every]))
    finally:
        for episode in every:  # one whose task never started has not left by itself
            scheduler.leave(episode.member)
    return [Group(id, task, tuple(next(rollouts) for _ in indices)) for id, task, indices in asked]


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
