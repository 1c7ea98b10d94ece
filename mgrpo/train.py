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
from functools import partial
from pathlib import Path
from typing import Any

from mgrpo.agents.loop import together
from mgrpo.agents.rollout import run_groups
from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.alignment import align
from mgrpo.algorithm.loss import policy_loss, sft_loss, token_coefficients
from mgrpo.algorithm.packing import pack
from mgrpo.config import Config
from mgrpo.config.windows import Window
from mgrpo.evaluate import reward
from mgrpo.policy.update import LossFunction, Policy
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session, row_metrics
from mgrpo.store.waiting import wait
from mgrpo.team import complete
from mgrpo.types import Sample


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
    await together([collect(session), *(learn(session, agent) for agent in session.policies)])


async def collect(session: Session) -> None:
    store, config = session.store, session.config
    for window in session.windows(store.committed()):
        await session.wait_for_learners(window)
        team = await session.serve(window)
        await session.evaluate_where_due(window)
        source = session.source(window)
        started = time.perf_counter()
        tasks = [(group, session.task(source, group)) for group in window.groups]
        k = config.num_generations(window.stage)
        watcher = session.watcher("collecting")
        groups = await run_groups(tasks, team, k, source.corpus, session.team.scheduler(), config.seed, watcher)
        rewards = await reward(session.team, source, groups)
        store.commit(groups, rewards)
        session.collected(window, groups, rewards, time.perf_counter() - started)
    await session.wait_for_learners(None)
    await session.evaluate_last()


async def learn(session: Session, agent: str) -> None:
    store, policy = session.store, session.policies[agent]
    for window in session.windows(store.trained(agent)):
        learns = agent in session.config.trained(window.stage)
        take = partial(store.take, agent, window.first_group, len(window.groups))
        groups = await wait(take, f"groups {window.groups} of {agent}", session.config.store_timeout_s)
        metrics: dict[str, float] = {}  # of the last step that moved the weights
        if learns:
            session.begin_stage(agent, window)
        for step, stage_step, ids in window.steps if learns else ():
            samples = [sample for id in ids for sample in groups[id - window.first_group]]
            started = time.perf_counter()
            found = await asyncio.to_thread(update, session, policy, agent, window, samples, step, stage_step)
            session.learned(step, agent, found, time.perf_counter() - started)
            metrics = found if "loss" in found else metrics
        session.publish(agent, window, metrics)


def update(
    session: Session, policy: Policy, agent: str, window: Window, samples: list[Sample], step: int, stage_step: int
) -> dict[str, float]:
    """One optimiser step of one agent: align, compare, weigh, pack, descend.

    Without rows the step is skipped ({}), and so it is where every group's rewards are equal: no "loss" in the metrics.
    """
    mine = session.config.agents[agent]
    plan = session.config.learner_for(agent, window.stage)
    teach = window.stage.policy_loss == "sft"
    mode = "none" if teach or mine.align is None else mine.align
    rows = align(samples, mode, mine.trajectories_per_rollout, seed=session.config.seed, step=step)
    if not rows:
        return {}
    compared = None if teach else advantages(rows, plan.scale_rewards)
    values = [1.0] * len(rows) if compared is None else list(compared.values)
    coefficients = token_coefficients(rows, plan.loss_agg_mode)
    batches = pack(rows, values, coefficients, plan.max_tokens_per_microbatch, session.pad_id(agent), not teach)
    loss: LossFunction = sft_loss if teach else _clipped(plan.clip_ratio_low, plan.clip_ratio_high)
    moved = policy.update(batches, loss, stage_step) if batches else {}
    return row_metrics(rows, compared) | moved


def _clipped(low: float, high: float) -> LossFunction:
    return partial(policy_loss, clip_ratio_low=low, clip_ratio_high=high)
