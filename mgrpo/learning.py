"""The learning side of a run: one set of weights, what moves them, how they are taken up again and published."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgrpo.algorithm.advantages import Advantages, Comparison
from mgrpo.config import StageConfig
from mgrpo.config.windows import Window
from mgrpo.engines.model import load_model
from mgrpo.errors import CheckpointError
from mgrpo.objective import comparison_of, needs_reference, step_plan
from mgrpo.policy import checkpoint
from mgrpo.policy.step import Step, StepPlan, penalised
from mgrpo.policy.update import Policy, Schedule
from mgrpo.session import Metrics, Session
from mgrpo.store.base import Lease, WeightVersion
from mgrpo.store.waiting import wait
from mgrpo.store.weights import handle_of
from mgrpo.types import Row, Share


class Learner:
    """The weights of ``owner`` in training. No two processes have one of the same run: see `begin`."""

    def __init__(self, session: Session, owner: str) -> None:
        self.session, self.owner, self.config = session, owner, session.config
        torch.set_num_threads(self.config.threads or os.cpu_count() or 1)  # which sums depend on
        model = session.folder.models(self.config)[owner]
        self.policy = Policy(load_model(model), self.config.agents[owner].temperature)
        self._reference: Any = None
        self._stage = ""  # the one that the optimiser belongs to
        self._lease: Lease | None = None
        self._fell_back = False  # to an older version than the newest published

    async def begin(self) -> None:
        """Hold the lease on these weights; publish the initial ones as version 0, or take up the newest."""
        self.session.keep_alive()
        name = f"learn/{self.owner}"
        what = f"another learner of {self.owner!r} to give up its lease"
        self._lease = await wait(partial(self.session.lease, name), what, self.config.outage_timeout_s)
        newest = self.session.store.latest(self.owner)
        if newest is None:
            self._save(0, -1, "")
            return
        window = next(self.windows(), None)
        if window is not None and self.learning(window):
            self._begin_schedule(window.stage)
        checkpoint.load(self.policy, self._newest_whole(newest), self._stage)
        if self._fell_back:
            self._save(newest.version + 1, newest.step, newest.stage)

    def _newest_whole(self, newest: WeightVersion) -> Path:
        """The newest version whose files are as they were written.

        Where that is not the newest there is, what later ones learned is lost: the groups they were trained on stay
        consumed, so that none is trained on twice, and the older weights are published again under a new number.
        """
        published = {p.weights.version: p.weights for p in self.session.store.publications(self.owner)}
        faults: list[CheckpointError] = []
        for version in sorted(published, reverse=True):
            weights = published[version]
            try:
                folder = self.session.weights.get(weights.handle, weights.checksum, learner=True)
            except CheckpointError as error:
                faults.append(error)
                continue
            if faults:
                self._fell_back = True
                self.session.reporter.warn(
                    f"{self.owner} goes on with version {version}, since {faults[0]}; what versions {version + 1} to"
                    f" {newest.version} learned is lost"
                )
            return folder
        raise faults[0]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """However it ends, another process need not wait for the lease to run out."""
        try:
            yield
        finally:
            if self._lease is not None:
                self.session.release(self._lease)

    # ------------------------------------------------------------ what is next

    def windows(self) -> Iterator[Window]:
        return self.session.windows(self.session.store.trained(self.owner))

    def learning(self, window: Window) -> tuple[str, ...]:
        """The agents that move these weights in ``window``."""
        return self._learning(window.stage)

    def _learning(self, stage: StageConfig) -> tuple[str, ...]:
        trained = self.config.trained(stage)
        return tuple(name for name in self.config.sharing(self.owner) if name in trained)

    async def take(self, window: Window) -> dict[str, list[Share]]:
        """Each agent's shares of the window's groups, once all are committed; of demonstrations, and of rollouts that
        are new enough. Where nobody learns, the groups are waited for all the same: they are consumed."""
        taken = {}
        for agent in self.learning(window) or (self.owner,):
            poll = partial(self.session.store.take, agent, window.first_group, len(window.groups))
            what = f"groups {window.first_group} to {window.end_group - 1} of {agent}"
            taken[agent] = await wait(poll, what, self.config.store_timeout_s)
        return taken

    def fresh(self, window: Window, shares: Sequence[Share]) -> tuple[list[Share], Metrics]:
        """The shares, without the samples of those whose oldest sampled token is more than ``max_staleness`` versions
        old; and how old they are. A group that is left out counts as seen."""
        metrics: Metrics = {"store_bytes": float(sum(share.bytes for share in shares))}
        if window.stage.collect == "teacher":
            return list(shares), metrics
        newest = self.session.store.latest(self.owner)
        assert newest is not None
        ages = [newest.version - oldest for share in shares if (oldest := oldest_version(share)) is not None]
        metrics |= {"staleness": float(max(ages))} if ages else {}
        if self.config.stale_policy == "wait":  # engines were waited for
            return list(shares), metrics
        limit = newest.version - self.config.max_staleness
        stale = {s.group for s in shares if (oldest := oldest_version(s)) is not None and oldest < limit}
        kept = [replace(share, samples=()) if share.group in stale else share for share in shares]
        return kept, metrics | ({"stale_groups": float(len(stale))} if self.config.max_staleness else {})

    # ------------------------------------------------------------ how it moves

    def comparison(self, agent: str, window: Window) -> Comparison:
        return comparison_of(self.config.learner_for(agent, window.stage))

    def step_plan(self, window: Window) -> StepPlan:
        return step_plan(self.config, self.owner, window.stage, self._pad_id)

    @property
    def _pad_id(self) -> int:
        return int(self.policy.model.config.pad_token_id or 0)

    def reference(self, window: Window) -> Any:
        """The model as it was before reinforcement began, for a KL term; None where there is none."""
        return self._reference if needs_reference(self.config, self.owner, window.stage) else None

    def penalised(self, agent: str, window: Window, rows: Sequence[Row]) -> list[Row]:
        """The rows with the KL to the reference taken off their rewards."""
        plan = self.config.learner_for(agent, window.stage)
        return penalised(
            rows,
            self.reference(window),
            self.policy.temperature,
            plan.kl_coef,
            plan.kl_estimator,
            plan.max_tokens_per_microbatch,
            self._pad_id,
        )

    def begin_stage(self, window: Window) -> None:
        self.session.show_stage(window)
        self._refer(window)
        if self._stage != window.stage.name:
            self._begin_schedule(window.stage)

    def _begin_schedule(self, stage: StageConfig) -> None:
        plan = self.config.learner_for(self.owner, stage)
        names = set(Schedule.__dataclass_fields__) - {"steps"}
        self.policy.begin(Schedule(steps=stage.steps, **{name: getattr(plan, name) for name in names}))
        self._stage = stage.name

    def _refer(self, window: Window) -> None:
        """Keep a copy of the weights that reinforcement starts with, if any stage compares with it; and load it.

        Here and not where it is used, since transformers does not load two models at once in two threads.
        """
        kept, weights = f"reference/{self.owner}", self.session.weights
        first = next((s for s in self.config.stages if s.collect == "team" and self._learning(s)), None)
        starts = window.stage_step == 0 and window.stage is first
        if starts and any(needs_reference(self.config, self.owner, stage) for stage in self.config.stages):
            newest = self.session.store.latest(self.owner)
            assert newest is not None
            weights.keep(newest.handle, kept)
        if self._reference is None and needs_reference(self.config, self.owner, window.stage):
            self._reference = load_model(weights.get(kept, None)).requires_grad_(False)

    # ------------------------------------------------------------ what is published

    def publish(self, window: Window, metrics: Mapping[str, float]) -> None:
        """New weights, or the old ones where nothing was learned; the window's groups are consumed either way."""
        newest = self.session.store.latest(self.owner)
        assert newest is not None
        step = window.first_step + window.stage.weight_sync_steps - 1
        if metrics:
            self._save(newest.version + 1, step, window.stage.name, window.groups, metrics)
            in_use = {part.version for part in self.session.store.parts("engine", self.owner)}
            self.session.weights.prune(self.owner, self.config.keep_versions, in_use)
        else:
            kept = replace(newest, step=step, stage=window.stage.name)
            self.session.store.publish(kept, window.groups, {}, self._lease)

    def _save(
        self,
        version: int,
        step: int,
        stage: str,
        consumed: range = range(0),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        assert self._lease is not None
        handle = handle_of(self.owner, version, self._lease.fence)
        checksum = self.session.weights.write(handle, partial(checkpoint.save, self.policy, stage=stage))
        weights = WeightVersion(self.owner, version, handle, checksum, step, stage)
        self.session.store.publish(weights, consumed, metrics, self._lease)

    def learned(self, step: int, found: Mapping[str, Mapping[str, float]], seconds: float) -> None:
        newest = self.session.store.latest(self.owner)
        for agent, metrics in found.items():
            self.session.reporter.learned(step, agent, newest.version if newest else 0, metrics, seconds)


def oldest_version(share: Share) -> int | None:
    """Of the weights that sampled any token of the share's samples; None where there is none."""
    return min((turn.version for s in share.samples for turn in s.trajectory.turns if turn.token_ids), default=None)


def row_metrics(rows: Sequence[Row], compared: Advantages | None) -> Metrics:
    """How many rows an agent had and how they compared; those of demonstrations (None) did not."""
    metrics = {"rows": float(len(rows)), "row_weight": sum(row.weight for row in rows)} if rows else {}
    stats = {} if compared is None or not rows else asdict(compared.stats)
    return metrics | {name: float(value) for name, value in stats.items() if value is not None}


def with_step(found: Mapping[str, Metrics], owner: str, moved: Step) -> dict[str, Metrics]:
    """Each agent's metrics with its gradient mass; those of the weights go to their owner, or to the first agent."""
    leader = owner if owner in found else next(iter(found))
    result = {agent: dict(metrics) for agent, metrics in found.items()}
    for (agent, invocation), pull in sorted(moved.mass.items()):
        result[agent]["gradient_mass"] = result[agent].get("gradient_mass", 0.0) + pull
        result[agent][f"gradient_mass/{invocation}"] = pull
    result[leader] |= moved.metrics
    return result
