"""The algorithm on one screen: two loops that meet at a store.

::

              tasks                                        rows of one agent
    collect ---------> K rollouts each -> grades -> rewards -> store -> align -> compare -> update   learn(agent)
       ^                                                         |                            |
       '------------------------ newest weights <----------------'<---------- publish --------'

    collect       consumes tasks and weights, produces groups;   waits until every learner is near enough, by
                                                                 max_staleness (a teacher is one window ahead)
    learn(agent)  consumes groups, produces weights;             waits until its next groups are committed

Both in one process is `train`; each in a process of its own, any number of collectors among them, is parts.py.

Differences from textbook GRPO: sub-agents are compared with each other over all K rollouts of one question, each
weighted d / d_k; each agent has its own loss, optimiser and weights; a group is consumed in the same transaction that
publishes the weights trained on it. A warm-up is these same loops, with a scripted teacher acting and the sft loss.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.agents.loop import together
from mgrpo.algorithm.advantages import compare
from mgrpo.algorithm.alignment import align
from mgrpo.algorithm.comparison import inherited, roots_of
from mgrpo.collecting import Collector
from mgrpo.config import Config
from mgrpo.config.windows import Window
from mgrpo.learning import Learner, row_metrics, with_step
from mgrpo.policy.step import take_step
from mgrpo.report.reporter import Reporter
from mgrpo.session import Metrics, Session
from mgrpo.team import Team, complete
from mgrpo.types import Row, Share


def train(
    config: Config, folder: str | Path | None = None, resume: bool = False, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Run every stage of ``config`` in ``folder`` (default: runs/NAME) and return the summary.

    ``resume`` goes on where a run stopped.
    """
    with Session(config, Path(folder or config.default_folder), resume, reporter) as session:
        with Team(session.config, session.folder.models(session.config)) as team:
            learners = [Learner(session, owner) for owner in session.config.learners]
            gc.freeze()  # what lives as long as the run is not searched for garbage at every step
            try:
                complete(both_loops(Collector(session, team), learners))
            finally:
                gc.unfreeze()
        return session.finish()


async def both_loops(collector: Collector, learners: Sequence[Learner]) -> None:
    for learner in learners:
        await learner.begin()
    await together([collect(collector), *map(learn, learners)])


async def collect(collector: Collector) -> None:
    async for work in collector.work():
        with collector.surviving(work):
            team = await collector.serve(work)
            await collector.evaluate_where_due(work)
            started = time.perf_counter()
            gathered = await collector.gather(work, team)
            await collector.commit(work, gathered, time.perf_counter() - started)
    await collector.evaluate_last()


async def learn(learner: Learner) -> None:
    """Move one set of weights by the trajectories of every agent that uses them."""
    with learner.holding():
        await _learn(learner)


async def _learn(learner: Learner) -> None:
    for window in learner.windows():
        taken = await learner.take(window)
        metrics: Metrics = {}  # of the last step that moved the weights
        agents = learner.learning(window)
        if agents:
            learner.begin_stage(window)
        for step, stage_step, ids in window.steps if agents else ():
            shares = {agent: [share for share in own if share.group in ids] for agent, own in taken.items()}
            started = time.perf_counter()
            found = await asyncio.to_thread(update, learner, window, shares, step, stage_step)
            learner.learned(step, found, time.perf_counter() - started)
            metrics = next((own for own in found.values() if "loss" in own), metrics)
        learner.publish(window, metrics)


def update(
    learner: Learner, window: Window, taken: Mapping[str, Sequence[Share]], step: int, stage_step: int
) -> dict[str, Metrics]:
    """One step of one set of weights, by every agent that uses them: align, compare, weigh, pack, descend.

    Without rows the step is skipped, and so it is where every group's rewards are equal: no "loss" in the metrics.
    """
    told = {agent: learner.fresh(window, shares) for agent, shares in taken.items()}
    aligned = {agent: aligned_rows(learner, agent, window, shares, step) for agent, (shares, _) in told.items()}
    found = {agent: metrics for agent, (_, metrics) in told.items()}
    rows = [row for own in aligned.values() for row in own]
    if not rows:
        return found
    credit, compared = [(1.0,) * len(row.turns) for row in rows], {}
    if window.stage.collect == "team":
        how = {agent: learner.comparison(agent, window) for agent in aligned}
        compared = compare(aligned, how, roots_of(next(iter(taken.values()))))
        credit = [values for agent in aligned for values in compared[agent].values]
    plan = learner.step_plan(window)
    moved = take_step(learner.policy, rows, credit, plan, stage_step, learner.reference(window))
    found = {agent: found[agent] | row_metrics(own, compared.get(agent)) for agent, own in aligned.items()}
    return with_step(found, learner.owner, moved)


def aligned_rows(learner: Learner, agent: str, window: Window, shares: Sequence[Share], step: int) -> list[Row]:
    """Rows of one agent with their weights, and the reward to compare: its own, its root's, or less a KL penalty."""
    config = learner.config
    mine, plan = config.agents[agent], config.learner_for(agent, window.stage)
    taught = window.stage.collect == "teacher"
    samples = [sample for share in shares for sample in share.samples]
    if plan.compare_with == "parent" and not taught:
        samples = [sample for share in shares for sample in inherited(share)]
    mode = "none" if taught or mine.align is None else mine.align
    rows = align(samples, mode, mine.trajectories_per_rollout, seed=config.seed, step=step)
    penalised = plan.kl_coef > 0.0 and plan.kl_in == "reward" and not taught
    return learner.penalised(agent, window, rows) if penalised else rows
