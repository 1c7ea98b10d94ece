"""What the two loops of train.py stand on: one process's hold on a run, its store, leases, tasks and reporter.

::

    Session       recipe, store, weights' place, reporter; leases that are kept alive while their work is done
    |-- Collector (collecting.py)    what is collected next, the team that acts, evaluations
    `-- Learner   (learning.py)      one set of weights: what it takes, how it is resumed and published
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from mgrpo.agents.rollout import Watcher
from mgrpo.config import Config, StageConfig
from mgrpo.config.windows import Window, stage_start, total_groups, total_steps, windows
from mgrpo.errors import LeaseLost, StoreUnavailable
from mgrpo.report.reporter import Reporter
from mgrpo.report.summary import seconds_before
from mgrpo.run import RunFolder
from mgrpo.store.base import Lease
from mgrpo.tasks.base import TaskSource
from mgrpo.team import check_parts, task_source
from mgrpo.types import Task

Metrics = dict[str, float]
LAUNCHED_VARIABLE = "MGRPO_LAUNCHED"  # in the environment of parts that `mgrpo launch` started
RENEWALS = 3  # in the time that a lease is granted for


class Session:
    """A context manager: whatever happens, what is held is let go.

    ``name`` says who writes: leases are granted to it, and again to a process of the same name that comes after it.
    The process of `mgrpo train` holds its run alone; parts (``part``) hold it together with others.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        resume: bool = False,
        reporter: Reporter | None = None,
        name: str = "train",
        part: bool = False,
    ) -> None:
        self.folder, self.name, self.started = RunFolder(path), name, time.perf_counter()
        check_parts(config)
        self._source = lru_cache(None)(self._build_source)
        self._shown_stage = ""
        self._hold = self.folder.join(config) if part else self.folder.begin(config, resume)
        self.config, self.store, self.weights = self._hold.config, self._hold.store, self._hold.weights
        self.reporter = reporter or self._own_reporter()
        self._leases: set[Lease] = set()
        self._renewing: asyncio.Task[None] | None = None

    def _own_reporter(self) -> Reporter:
        """Of a part: with a log of its own. Where `mgrpo launch` started it, that tells trackers of all parts."""
        if self._hold.alone:
            return Reporter(self.folder.path, self.config)
        told = {"trackers": ()} if LAUNCHED_VARIABLE in os.environ else {}
        return Reporter(self.folder.part(self.name), self.config.model_copy(update=told))

    def __enter__(self) -> Session:
        try:
            self.reporter.__enter__()
        except BaseException:
            self._hold.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.reporter.__exit__(kind, error, tb)
        finally:
            self._hold.close()

    # ------------------------------------------------------------ leases

    def lease(self, name: str) -> Lease | None:
        """The lease, kept alive from now on until `release`; None while another process holds it."""
        lease = self.store.lease(name, self.name, self.config.lease_s)
        if lease is not None:
            self._leases.add(lease)
        return lease

    def keep_alive(self) -> None:
        """Renew what is leased for as long as the running event loop runs."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def release(self, lease: Lease, done: bool = False) -> None:
        self._leases.discard(lease)
        self.store.release(lease, done)

    async def _renew(self) -> None:
        """A lease that was lost is forgotten: what is written under it will be refused."""
        while True:
            await asyncio.sleep(self.config.lease_s / RENEWALS)
            for lease in tuple(self._leases):
                try:
                    await asyncio.to_thread(self.store.renew, lease, self.config.lease_s)
                except LeaseLost:
                    self._leases.discard(lease)
                except StoreUnavailable:  # it may come back before another takes the lease
                    continue

    # ------------------------------------------------------------ what there is to do

    def windows(self, from_group: int) -> Iterator[Window]:
        return windows(self.config, from_group)

    def source(self, window: Window) -> TaskSource:
        return self._source(window.stage_index)

    def _build_source(self, stage_index: int) -> TaskSource:
        return task_source(self.config, self.config.stages[stage_index].tasks, f"stages.{stage_index}.tasks")

    def task(self, source: TaskSource, group: int, batch: int = 0) -> Task:
        """The task of a group: endless sources in order; finite ones shuffled anew in every epoch of the stage.

        ``batch`` > 0 is a replacement of one that taught nothing: what would come so many whole runs later.
        """
        later = batch * total_groups(self.config)
        if len(source) > 1_000_000:
            return source.task((group + later) % len(source))
        epoch, position = divmod(group - stage_start(self.config, group) + later, len(source))
        return source.task(_epoch_order(self.config.seed, epoch, len(source))[position])

    def first_with_team(self, stage: StageConfig) -> bool:
        return stage is next((s for s in self.config.stages if s.collect == "team"), None)

    # ------------------------------------------------------------ what is said about it

    def show_stage(self, window: Window) -> None:
        """Told by whichever loop comes first: after a resume a learner can be the one."""
        stage = window.stage
        if stage.name != self._shown_stage:
            self._shown_stage = stage.name
            first = window.first_step - window.stage_step
            self.reporter.stage(stage.name, stage.steps, first, total_steps(self.config))

    def watcher(self, what: str) -> Watcher:
        def on_rollout(done: int, total: int) -> None:
            self.reporter.progress(what, done, total)

        return Watcher(on_rollout, self.reporter.retried)

    def finish(self) -> dict[str, Any]:
        """Write the summary. Where a finished run was only resumed, it keeps the time that the run took."""
        return self.reporter.finish(seconds_before(self.folder.path) or time.perf_counter() - self.started)


@lru_cache(4)
def _epoch_order(seed: int, epoch: int, length: int) -> list[int]:
    order = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
