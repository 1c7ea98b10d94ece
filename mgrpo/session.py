"""What the two loops of train.py stand on: one run's store, team, policies and reporter, and how they are resumed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from mgrpo.agents.rollout import Team as ActingTeam
from mgrpo.agents.rollout import Watcher
from mgrpo.algorithm.advantages import Advantages, Comparison
from mgrpo.config import Config, StageConfig
from mgrpo.config.windows import Window, stage_start, total_groups, total_steps, windows
from mgrpo.engines.model import load_model
from mgrpo.evaluate import Evaluation, evaluate
from mgrpo.gather import Gathered, gather
from mgrpo.objective import comparison_of, needs_reference, step_plan
from mgrpo.policy import checkpoint
from mgrpo.policy.step import Step, StepPlan, penalised
from mgrpo.policy.update import Policy, Schedule
from mgrpo.report.reporter import Reporter
from mgrpo.report.summary import seconds_before
from mgrpo.run import RunFolder
from mgrpo.store.base import WeightVersion
from mgrpo.store.waiting import wait
from mgrpo.tasks.base import TaskSource
from mgrpo.team import Team, check_parts, task_source
from mgrpo.types import Row, Task

Metrics = dict[str, float]


class Session:
    """One process's hold on a run. A context manager: whatever happens, its parts are closed."""

    def __init__(self, config: Config, path: Path, resume: bool, reporter: Reporter | None = None) -> None:
        self.folder, self.started = RunFolder(path), time.perf_counter()
        check_parts(config)
        self.policies: dict[str, Policy] = {}
        self._references: dict[str, Any] = {}
        self._stages: dict[str, str] = {}  # agent -> the stage its optimiser belongs to
        self._source = lru_cache(None)(self._build_source)
        self._shown_stage = ""
        self._hold = self.folder.begin(config, resume)
        self.config, self.store = self._hold.config, self._hold.store
        self.reporter = reporter or Reporter(path, self.config)
        try:
            self._take_up(self.folder.models(self.config))
        except BaseException:
            self._hold.close()
            raise

    def _take_up(self, models: Mapping[str, Path]) -> None:
        self.team = Team(self.config, models)
        for name in self.config.learners:
            self.policies[name] = Policy(load_model(models[name]), self.config.agents[name].temperature)
            self._begin_agent(name)

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
            self.team.close()
        finally:
            self._hold.close()

    # ------------------------------------------------------------ what is next

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

    async def gather(self, window: Window, acting: ActingTeam) -> Gathered:
        source, watcher = self.source(window), self.watcher("collecting")
        task = partial(self.task, source)
        return await gather(self.team, acting, source, window.stage, window.groups, task, watcher)

    async def wait_for_learners(self, window: Window | None) -> None:
        """Until every learner has consumed all groups before ``window`` (None: every group there is).

        Demonstrations need no new weights: within their stage they are collected one window ahead.
        """
        first = self.store.committed() if window is None else window.first_group
        if window is not None and window.stage.collect == "teacher" and window.stage_step:
            first -= len(window.groups)

        def caught_up() -> bool | None:
            return all(self.store.trained(agent) >= first for agent in self.policies) or None

        what = f"the learners {', '.join(self.policies)} to have trained on all groups before {first}"
        await wait(caught_up, what, self.config.store_timeout_s, longest_sleep=0.02)

    async def serve(self, window: Window) -> ActingTeam:
        """Who acts in this window: the teacher, or the team with its newest weights."""
        self._show_stage(window)
        if window.stage.collect == "teacher":
            return self.team.acting(self.config.seed, teacher=self.source(window))
        await self._serve_newest()
        return self.team.acting(self.config.seed)

    async def evaluate_where_due(self, window: Window) -> None:
        """With what is served: before the first stage of the team's own, and every so many steps."""
        stage = window.stage
        if stage.collect == "teacher":
            return
        if window.stage_step == 0 and self._first_with_team(stage):
            await self._evaluate_fully("before", window.first_step)
        every = self.config.evaluation.every
        if every and window.stage_step and window.stage_step % every == 0:
            await self._evaluate("dev", window.first_step, "dev_tasks", self.config.evaluation.dev_questions)

    def _show_stage(self, window: Window) -> None:
        """Told by whichever loop comes first: after a resume a learner can be the one."""
        stage = window.stage
        if stage.name != self._shown_stage:
            self._shown_stage = stage.name
            first = window.first_step - window.stage_step
            self.reporter.stage(stage.name, stage.steps, first, total_steps(self.config))

    def _first_with_team(self, stage: StageConfig) -> bool:
        return stage is next((s for s in self.config.stages if s.collect == "team"), None)

    async def _serve_newest(self) -> None:
        for agent in self.policies:
            if (weights := self.store.latest(agent)) is not None:
                await self.team.serve(agent, weights, self.folder.path)

    # ------------------------------------------------------------ one agent's weights

    def learning(self, owner: str, window: Window) -> tuple[str, ...]:
        """The agents that move the weights of ``owner`` in this window."""
        return self._learning(owner, window.stage)

    def _learning(self, owner: str, stage: StageConfig) -> tuple[str, ...]:
        trained = self.config.trained(stage)
        return tuple(name for name in self.config.sharing(owner) if name in trained)

    def comparison(self, agent: str, window: Window) -> Comparison:
        return comparison_of(self.config.learner_for(agent, window.stage))

    def step_plan(self, owner: str, window: Window) -> StepPlan:
        return step_plan(self.config, owner, window.stage, self.pad_id(owner))

    def pad_id(self, owner: str) -> int:
        return int(self.policies[owner].model.config.pad_token_id or 0)

    def reference(self, owner: str, window: Window) -> Any:
        """The model as it was before reinforcement began, for a KL term; None where there is none."""
        return self._references[owner] if needs_reference(self.config, owner, window.stage) else None

    def _refer(self, owner: str, window: Window) -> None:
        """Keep a copy of the weights that reinforcement starts with, if any stage compares with it; and load it.

        Here and not where it is used, since transformers does not load two models at once in two threads.
        """
        first = next((s for s in self.config.stages if s.collect == "team" and self._learning(owner, s)), None)
        starts = window.stage_step == 0 and window.stage is first
        if starts and any(needs_reference(self.config, owner, stage) for stage in self.config.stages):
            newest = self.store.latest(owner)
            assert newest is not None
            checkpoint.keep(self.folder.path / newest.handle, self.folder.reference(owner))
        if owner not in self._references and needs_reference(self.config, owner, window.stage):
            self._references[owner] = load_model(self.folder.reference(owner)).requires_grad_(False)

    def penalised(self, agent: str, window: Window, rows: Sequence[Row]) -> list[Row]:
        """The rows with the KL to the reference taken off their rewards."""
        owner, plan = self.config.owner(agent), self.config.learner_for(agent, window.stage)
        return penalised(
            rows,
            self.reference(owner, window),
            self.policies[owner].temperature,
            plan.kl_coef,
            plan.kl_estimator,
            plan.max_tokens_per_microbatch,
            self.pad_id(owner),
        )

    def _begin_agent(self, agent: str) -> None:
        """Publish the initial weights as version 0, or take up the newest version."""
        newest = self.store.latest(agent)
        if newest is None:
            self._save(agent, 0, -1, "")
        else:
            folder = self.folder.path / newest.handle
            window = next(self.windows(self.store.trained(agent)), None)
            if window is not None and self.learning(agent, window):
                self._begin_schedule(agent, window.stage)
            checkpoint.load(self.policies[agent], folder, newest.checksum, self._stages.get(agent, ""))

    def begin_stage(self, agent: str, window: Window) -> None:
        self._show_stage(window)
        self._refer(agent, window)
        if self._stages.get(agent) != window.stage.name:
            self._begin_schedule(agent, window.stage)

    def _begin_schedule(self, agent: str, stage: StageConfig) -> None:
        plan = self.config.learner_for(agent, stage)
        names = set(Schedule.__dataclass_fields__) - {"steps"}
        self.policies[agent].begin(Schedule(steps=stage.steps, **{name: getattr(plan, name) for name in names}))
        self._stages[agent] = stage.name

    def publish(self, agent: str, window: Window, metrics: Mapping[str, float]) -> None:
        """New weights, or the old ones where nothing was learned; the window's groups are consumed either way."""
        newest = self.store.latest(agent)
        assert newest is not None
        step = window.first_step + window.stage.weight_sync_steps - 1
        if metrics:
            self._save(agent, newest.version + 1, step, window.stage.name, window.groups, metrics)
            checkpoint.prune(self.folder.weights(agent), self.config.keep_versions)
        else:
            kept = WeightVersion(agent, newest.version, newest.handle, newest.checksum, step, window.stage.name)
            self.store.publish(kept, window.groups, {})

    def _save(
        self,
        agent: str,
        version: int,
        step: int,
        stage: str,
        consumed: range = range(0),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        folder = self.folder.weights(agent) / f"v{version}"
        checksum = checkpoint.save(self.policies[agent], folder, stage)
        handle = str(folder.relative_to(self.folder.path))
        self.store.publish(WeightVersion(agent, version, handle, checksum, step, stage), consumed, metrics)

    # ------------------------------------------------------------ what is said about it

    def watcher(self, what: str) -> Watcher:
        return Watcher(partial(self.reporter.progress, what), self.reporter.retried)

    def collected(self, window: Window, gathered: Gathered, seconds: float) -> None:
        self.reporter.collected(window.first_step, gathered.groups, gathered.rewards, seconds, gathered.counts)

    def learned(self, step: int, owner: str, found: Mapping[str, Mapping[str, float]], seconds: float) -> None:
        newest = self.store.latest(owner)
        for agent, metrics in found.items():
            self.reporter.learned(step, agent, newest.version if newest else 0, metrics, seconds)

    async def _evaluate(self, name: str, step: int, split: str, questions: int, **options: Any) -> Evaluation:
        source = self.team.questions(split)
        watcher = self.watcher(f"evaluating {name}")
        result = await evaluate(self.team, source, questions, seed=self.config.seed, watcher=watcher, **options)
        self.reporter.evaluated(name, step, result.metrics)
        return result

    async def _evaluate_fully(self, when: str, step: int) -> None:
        """The same test questions sampled and greedy, and the first few rollouts shown."""
        plan = self.config.evaluation
        sampled = await self._evaluate(when, step, "tasks", plan.questions)
        await self._evaluate(f"{when}_greedy", step, "tasks", plan.questions, temperature=0.0)
        if when == "after" and plan.closed_book:
            await self._evaluate("closed_book", step, "tasks", plan.questions, closed_book=True)
        for group in sampled.groups[: plan.examples]:
            self.reporter.example(when, group, sampled.rewards)

    async def evaluate_last(self) -> None:
        if any(stage.collect == "team" for stage in self.config.stages):
            *_, last = self.windows(0)
            self._show_stage(last)
            await self._serve_newest()
            await self._evaluate_fully("after", total_steps(self.config))

    def finish(self) -> dict[str, Any]:
        """Write the summary. Where a finished run was only resumed, it keeps the time that the run took."""
        return self.reporter.finish(seconds_before(self.folder.path) or time.perf_counter() - self.started)


@lru_cache(4)
def _epoch_order(seed: int, epoch: int, length: int) -> list[int]:
    order = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


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
