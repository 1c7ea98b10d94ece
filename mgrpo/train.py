"""The algorithm on one screen: two loops that meet at a store.

::

              tasks                                        rows of one agent
    collect ---------> K rollouts each -> grades -> rewards -> store -> align -> compare -> update   learn(agent)
       ^                                                         |                            |
       '------------------------ newest weights <----------------'<---------- publish --------'

    collect       consumes tasks and weights, produces groups;   waits until every learner has caught up (a teacher,
                                                                 who needs no weights, is one window ahead)
    learn(agent)  consumes groups, produces weights;             waits until its next groups are committed

Differences from textbook GRPO: sub-agents are compared with each other over all K rollouts of one question, each
weighted d / d_k; each agent has its own loss, optimiser and weights; a group is consumed in the same transaction that
publishes the weights trained on it. A warm-up is these same loops, with a scripted teacher acting and the sft loss.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mgrpo.agents.loop import together
from mgrpo.algorithm.advantages import compare
from mgrpo.algorithm.alignment import align
from mgrpo.algorithm.comparison import inherited, roots_of
from mgrpo.config import Config
from mgrpo.config.windows import Window
from mgrpo.policy.step import take_step
from mgrpo.policy.update import Policy
from mgrpo.report.reporter import Reporter
from mgrpo.session import Metrics, Session, row_metrics, with_step
from mgrpo.store.waiting import wait
from mgrpo.team import complete
from mgrpo.types import Row, Share


def train(
    config: Config, folder: str | Path | None = None, resume: bool = False, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Run every stage of ``config`` in ``folder`` (default: runs/NAME) and return the summary.

    ``resume`` goes on where a run stopped.
    """
    with Session(config, Path(folder or config.default_folder), resume, reporter) as session:
        gc.freeze()  # what lives as long as the run is not searched for garbage at every step
        try:
            complete(_both_loops(session))
        finally:
            gc.unfreeze()
        return session.finish()


async def _both_loops(session: Session) -> None:
    await together([collect(session), *(learn(session, owner) for owner in session.policies)])


async def collect(session: Session) -> None:
    store = session.store
    for window in session.windows(store.committed()):
        await session.wait_for_learners(window)
        team = await session.serve(window)
        await session.evaluate_where_due(window)
        started = time.perf_counter()
        gathered = await session.gather(window, team)
        store.commit(gathered.groups, gathered.rewards)
        session.collected(window, gathered, time.perf_counter() - started)
    await session.wait_for_learners(None)
    await session.evaluate_last()


async def learn(session: Session, owner: str) -> None:
    """Move the weights of ``owner`` by the trajectories of every agent that uses them."""
    store, policy = session.store, session.policies[owner]
    for window in session.windows(store.trained(owner)):
        agents = session.learning(owner, window)
        taken: dict[str, list[Share]] = {}
        for agent in agents or (owner,):
            take = partial(store.take, agent, window.first_group, len(window.groups))
            taken[agent] = await wait(take, f"groups {window.groups} of {agent}", session.config.store_timeout_s)
        metrics: Metrics = {}  # of the last step that moved the weights
        if agents:
            session.begin_stage(owner, window)
        for step, stage_step, ids in window.steps if agents else ():
            shares = {agent: [share for share in own if share.group in ids] for agent, own in taken.items()}
            started = time.perf_counter()
            found = await asyncio.to_thread(update, session, policy, owner, window, shares, step, stage_step)
            session.learned(step, owner, found, time.perf_counter() - started)
            metrics = next((own for own in found.values() if "loss" in own), metrics)
        session.publish(owner, window, metrics)


def update(
    session: Session,
    policy: Policy,
    owner: str,
    window: Window,
    taken: Mapping[str, Sequence[Share]],
    step: int,
    stage_step: int,
) -> dict[str, Metrics]:
    """One step of one set of weights, by every agent that uses them: align, compare, weigh, pack, descend.

    Without rows the step is skipped, and so it is where every group's rewards are equal: no "loss" in the metrics.
    """
    aligned = {agent: aligned_rows(session, agent, window, shares, step) for agent, shares in taken.items()}
    rows = [row for own in aligned.values() for row in own]
    if not rows:
        return {agent: {} for agent in taken}
    credit, compared = [(1.0,) * len(row.turns) for row in rows], {}
    if window.stage.collect == "team":
        how = {agent: session.comparison(agent, window) for agent in aligned}
        compared = compare(aligned, how, roots_of(next(iter(taken.values()))))
        credit = [values for agent in aligned for values in compared[agent].values]
    plan = session.step_plan(owner, window)
    moved = take_step(policy, rows, credit, plan, stage_step, session.reference(owner, window))
    found = {agent: row_metrics(own, compared.get(agent)) for agent, own in aligned.items()}
    return with_step(found, owner, moved)


def aligned_rows(session: Session, agent: str, window: Window, shares: Sequence[Share], step: int) -> list[Row]:
    """Rows of one agent with their weights, and the reward to compare: its own, its root's, or less a KL penalty."""
    mine, plan = session.config.agents[agent], session.config.learner_for(agent, window.stage)
    taught = window.stage.collect == "teacher"
    samples = [sample for share in shares for sample in share.samples]
    if plan.compare_with == "parent" and not taught:
        samples = [sample for share in shares for sample in inherited(share)]
    mode = "none" if taught or mine.align is None else mine.align
    rows = align(samples, mode, mine.trajectories_per_rollout, seed=session.config.seed, step=step)
    penalised = plan.kl_coef > 0.0 and plan.kl_in == "reward" and not taught
    return session.penalised(agent, window, rows) if penalised else rows
