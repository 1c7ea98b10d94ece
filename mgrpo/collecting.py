"""The collecting side of a run: which groups come next, the team that acts in them, and evaluations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mgrpo.agents.rollout import Team as ActingTeam
from mgrpo.config.windows import Window, cohorts, total_groups, total_steps
from mgrpo.errors import EngineLost, EngineTimeout, LeaseLost
from mgrpo.evaluate import Evaluation, evaluate
from mgrpo.gather import Gathered, gather
from mgrpo.session import Session
from mgrpo.store.base import Lease, WeightVersion
from mgrpo.store.waiting import wait
from mgrpo.team import Team

LOST_PAUSE_S = 0.5  # before what lost its engines begins again
LOST_IN_A_ROW = 2  # cohorts smaller than a step of which broken infrastructure may leave nothing


@dataclass(frozen=True, slots=True)
class Work:
    """Groups of one window that are collected together, by whoever holds ``lease``."""

    window: Window
    groups: range
    lease: Lease

    @property
    def opens(self) -> bool:
        """Whether the window's first groups are among them."""
        return self.groups.start == self.window.first_group


class Collector:
    """One of any number of processes that collect the groups of a run, in order of their ids."""

    def __init__(self, session: Session, team: Team) -> None:
        self.session, self.team, self.config = session, team, session.config
        self._windows = tuple(session.windows(0))
        self._total = total_groups(self.config)
        self._lost_in_a_row = 0  # cohorts in which nothing was left
        self._lost: tuple[float, float] | None = None  # since the last commit: when engines were lost first, and last

    # ------------------------------------------------------------ what is next

    async def work(self) -> AsyncIterator[Work]:
        """What this process is to collect, until every group of the run is committed."""
        self.session.keep_alive()
        while True:
            if self._lost is not None:
                await asyncio.sleep(LOST_PAUSE_S)
            found = await wait(self._next, self._waiting_for, self.config.store_timeout_s)
            if found == "none left":
                return
            assert isinstance(found, Work)
            yield found

    def _next(self) -> Work | str | None:
        """The first groups that nobody collects and that no learner is too far from; None where there are none now."""
        committed = self.session.store.committed()
        if committed >= self._total:
            return "none left"
        trained = min((self.session.store.trained(owner) for owner in self.config.learners), default=committed)
        for window in self._from(committed):
            if trained < self._needed(window):
                return None
            for groups in cohorts(window, self.config.rollout.groups_per_lease):
                if groups.stop <= committed or self._there(groups):
                    continue
                if (lease := self.session.lease(f"collect/{groups.start}")) is not None:
                    if not self._there(groups):  # committed by another between the two questions
                        return Work(window, groups, lease)
                    self.session.release(lease)
        return None

    def _from(self, group: int) -> Iterator[Window]:
        return (window for window in self._windows if window.end_group > group)

    def _there(self, groups: range) -> bool:
        return self.session.store.missing(groups) == []

    def _needed(self, window: Window) -> int:
        """Groups that every learner must have trained on before ``window`` is collected.

        At most ``max_staleness`` windows lie between, and none between two stages. Demonstrations need no new weights:
        within their stage they are collected one window ahead.
        """
        ahead = 1 if window.stage.collect == "teacher" else self.config.max_staleness
        return max(window.stage_group, window.first_group - ahead * len(window.groups))

    def _waiting_for(self) -> str:
        committed = self.session.store.committed()
        window = next(self._from(committed), self._windows[-1])
        needed = self._needed(window)
        behind = [name for name in self.config.learners if self.session.store.trained(name) < needed]
        if behind:
            return f"the learners {', '.join(behind)} to have trained on all groups before {needed}"
        return f"other collectors to commit groups {committed} to {window.end_group - 1}"

    @contextmanager
    def surviving(self, work: Work) -> Iterator[None]:
        """Work whose lease or engine is lost goes back, to be collected again; its lease ends with it.

        Raises EngineTimeout where engines are there and are lost again and again.
        """
        try:
            yield
        except (LeaseLost, EngineLost) as error:
            self._again(f"groups {work.groups.start} to {work.groups.stop - 1} go back", error)
        finally:
            self.session.release(work.lease)

    def _again(self, what: str, error: LeaseLost | EngineLost) -> None:
        seconds, now = self.config.outage_timeout_s, time.monotonic()
        if isinstance(error, EngineLost):
            first, last = self._lost or (now, now)
            self._lost = (first if now - last < seconds else now), now
            if now - self._lost[0] >= seconds:
                raise EngineTimeout(f"engines were lost again and again for {seconds:g} s, the last time: {error}")
        self.session.reporter.warn(f"{what}: {error}")

    # ------------------------------------------------------------ who acts

    async def serve(self, work: Work) -> ActingTeam:
        """Who acts in these groups: the teacher, or the team with weights that are new enough."""
        self.session.show_stage(work.window)
        if work.window.stage.collect == "teacher":
            return self.team.acting(self.config.seed, teacher=self.session.source(work.window))
        await self._serve_newest(work.window)
        return self.team.acting(self.config.seed)

    async def _serve_newest(self, window: Window | None) -> None:
        """Load the newest weights; engines of their own processes need only be as new as ``max_staleness`` asks."""
        for owner in self.config.learners:
            trained = self.session.store.trained(owner)  # before `latest`: a version in between only asks for more
            weights = self.session.store.latest(owner)
            oldest = 0 if weights is None else self._oldest(trained, weights, window)
            await self.team.serve(owner, weights, self.session.weights, oldest)
        await self.team.wait_for_frozen()

    def _oldest(self, trained: int, weights: WeightVersion, window: Window | None) -> int:
        """The oldest version that may sample in ``window`` so as not to be stale when its turn to train comes."""
        slack = self.config.max_staleness
        if window is None or not slack:
            return weights.version
        if self.config.stale_policy == "drop":
            return 0
        pending = (window.first_group - trained) // len(window.groups)
        return max(0, weights.version + pending - slack)

    async def gather(self, work: Work, acting: ActingTeam) -> Gathered:
        session = self.session
        source, watcher = session.source(work.window), session.watcher("collecting")
        task = partial(session.task, source)
        # A question on which every rollout breaks must not hold up the run for ever; several in a row are no accident.
        part_of_a_step = len(work.groups) < len(work.window.groups)
        may_be_lost = part_of_a_step and self._lost_in_a_row < LOST_IN_A_ROW
        gathered = await gather(self.team, acting, source, work.window.stage, work.groups, task, watcher, may_be_lost)
        known = any(reward.value is not None for reward in gathered.rewards.values())
        self._lost_in_a_row = 0 if known else self._lost_in_a_row + 1
        return gathered

    async def commit(self, work: Work, gathered: Gathered, seconds: float) -> None:
        """Write the groups, unless the lease was lost, and say what they were like."""
        await asyncio.to_thread(self.session.store.commit, gathered.groups, gathered.rewards, work.lease)
        self._lost = None
        whole = len(work.groups) == len(work.window.groups)
        name = None if whole else f"g{work.groups.start}"
        self.session.reporter.collected(
            work.window.first_step, gathered.groups, gathered.rewards, seconds, gathered.counts, name
        )

    # ------------------------------------------------------------ evaluations

    async def evaluate_where_due(self, work: Work) -> None:
        """With what is served: before the first stage of the team's own, and every so many steps."""
        window, stage = work.window, work.window.stage
        if stage.collect == "teacher" or not work.opens:
            return
        if window.stage_step == 0 and self.session.first_with_team(stage):
            await self.evaluate_fully("before", window.first_step)
        every = self.config.evaluation.every
        if every and window.stage_step and window.stage_step % every == 0:
            await self._evaluate("dev", window.first_step, "dev_tasks", self.config.evaluation.dev_questions)

    async def evaluate_last(self) -> None:
        """When every learner has finished; by one of the collectors."""
        store = self.session.store

        def finished() -> bool | None:
            return all(store.trained(owner) >= self._total for owner in self.config.learners) or None

        def mine() -> Lease | str | None:
            return "done" if store.done("evaluate/after") else self.session.lease("evaluate/after")

        await wait(finished, f"the learners {', '.join(self.config.learners)} to finish", self.config.store_timeout_s)
        if not any(stage.collect == "team" for stage in self.config.stages):
            return
        lease = await wait(mine, "another collector to evaluate the last weights", self.config.store_timeout_s)
        if isinstance(lease, Lease):
            self.session.show_stage(self._windows[-1])
            while not await self._evaluated_after():
                await asyncio.sleep(LOST_PAUSE_S)
            self.session.release(lease, done=True)

    async def _evaluated_after(self) -> bool:
        """Whether the engines lasted."""
        try:
            await self._serve_newest(None)
            await self.evaluate_fully("after", total_steps(self.config))
        except EngineLost as error:
            self._again("the last evaluation begins again", error)
            return False
        return True

    async def evaluate_fully(self, when: str, step: int) -> None:
        """The same test questions sampled and greedy, and the first few rollouts shown."""
        plan = self.config.evaluation
        sampled = await self._evaluate(when, step, "tasks", plan.questions)
        await self._evaluate(f"{when}_greedy", step, "tasks", plan.questions, temperature=0.0)
        if when == "after" and plan.closed_book:
            await self._evaluate("closed_book", step, "tasks", plan.questions, closed_book=True)
        for group in sampled.groups[: plan.examples]:
            self.session.reporter.example(when, group, sampled.rewards)

    async def _evaluate(self, name: str, step: int, split: str, questions: int, **options: Any) -> Evaluation:
        source = self.team.questions(split)
        watcher = self.session.watcher(f"evaluating {name}")
        result = await evaluate(self.team, source, questions, seed=self.config.seed, watcher=watcher, **options)
        self.session.reporter.evaluated(name, step, result.metrics)
        return result
