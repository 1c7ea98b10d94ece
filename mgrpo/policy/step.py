"""One step of one set of weights: rows with their advantages -> micro-batches -> optimiser steps.

::

    rows -> num_minibatches parts of whole groups, each an optimiser step with its own denominators
         -> what the loss compares with: behaviour (stored), old (before the first update), reference
         -> rejected tokens leave, coefficients are computed from what is left
         -> num_iterations passes over the parts
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from mgrpo.algorithm.coefficients import LossAggMode, gradient_mass, token_coefficients
from mgrpo.algorithm.correction import Level, kept, row_sums
from mgrpo.algorithm.loss import KlEstimator, Objective, kl_estimate, objective_loss
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.policy.update import Policy, score
from mgrpo.types import Row, TrajectoryId

Values = Sequence[tuple[float, ...]]  # an advantage per turn of each row


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The numbers of a step. ``loss_denominator`` "agent": every agent's loss has its own denominators, and those of
    agents that share the weights are added; "weights": all rows have one. ``scale_factors`` is by agent; with
    "weights" the largest counts."""

    objective: Objective
    max_tokens_per_microbatch: int
    pad_id: int
    loss_agg_mode: LossAggMode = "seq-mean-token-mean"
    loss_denominator: str = "agent"
    scale_factors: dict[str, float] | None = None
    rollout_rs: Level = "none"
    rollout_rs_threshold: tuple[float, float] = (0.5, 5.0)
    num_minibatches: int = 1
    num_iterations: int = 1

    @property
    def needs_old(self) -> bool:
        """Whether log-probabilities of before the first update must be computed; where the only update starts from
        the same weights, the loss has them anyway."""
        again = self.num_minibatches * self.num_iterations > 1 and self.objective.rollout_is != "none"
        return again or self.rollout_rs != "none"


@dataclass(frozen=True, slots=True)
class Step:
    """``metrics`` are means over the optimiser steps taken; without any they hold no "loss". ``mass`` is the sum of
    abs(coefficient x advantage) by (agent, invocation)."""

    metrics: dict[str, float]
    mass: dict[tuple[str, int], float]


def take_step(
    policy: Policy, rows: Sequence[Row], values: Values, plan: StepPlan, step: int, reference: Any = None
) -> Step:
    """All optimiser steps on ``rows``, which are those of one step's groups; ``step`` is the schedule's number.

    ``reference`` is the model of the KL term. A part of which nothing is left to learn from is skipped.
    """
    prepared, mass, rejected = [], defaultdict[tuple[str, int], float](float), [0, 0]
    for part in _parts(rows, plan.num_minibatches):
        own, credit = [rows[i] for i in part], [values[i] for i in part]
        batches, weights, gone = _prepared(policy, own, credit, plan, reference)
        prepared.append([batch for batch in batches if batch.row.numel()])
        rejected = [rejected[0] + gone, rejected[1] + sum(row.sampled for row in own)]
        for key, pull in gradient_mass(own, credit, weights).items():
            mass[key] += pull / plan.num_minibatches
    loss = partial(objective_loss, objective=plan.objective)
    wants_entropy = plan.objective.entropy_coef > 0.0
    taken = [
        policy.update(batches, loss, step, wants_entropy)
        for _ in range(plan.num_iterations)
        for batches in prepared
        if batches
    ]
    metrics = _mean(taken)
    if plan.rollout_rs != "none" and rejected[1]:
        metrics["rejected_fraction"] = rejected[0] / rejected[1]
    return Step(metrics, {} if plan.objective.policy_loss == "sft" else dict(mass))


def _parts(rows: Sequence[Row], count: int) -> list[list[int]]:
    """Indices of the rows, split by whole groups in order of id."""
    groups = sorted({row.id.group for row in rows})
    part = {group: i * count // len(groups) for i, group in enumerate(groups)}
    return [own for p in range(count) if (own := [i for i, row in enumerate(rows) if part[row.id.group] == p])]


def _prepared(
    policy: Policy, rows: Sequence[Row], values: Values, plan: StepPlan, reference: Any
) -> tuple[list[Batch], list[float], int]:
    """Micro-batches with all that the loss needs, the coefficients of the rows, and how many tokens were rejected."""
    coefficients = _coefficients(rows, plan)
    drop_zero = plan.objective.only_advantages and plan.rollout_rs == "none"
    batches = pack(rows, values, coefficients, plan.max_tokens_per_microbatch, plan.pad_id, drop_zero)
    if plan.needs_old:
        old = [policy.scored(batch) for batch in batches]
        batches = [replace(batch, old_logprobs=logprobs) for batch, logprobs in zip(batches, old, strict=True)]
    gone = 0
    if plan.rollout_rs != "none":
        batches, counts, gone = _rejected(rows, batches, plan)
        coefficients = _coefficients(rows, plan, counts)
        batches = [batch.weighed(coefficients) for batch in batches]
        if plan.objective.only_advantages:
            batches = [batch.keeping(row_sums(batch.advantages.abs(), batch.row) > 0.0) for batch in batches]
    if reference is not None:
        batches = [replace(b, ref_logprobs=_reference_logprobs(reference, b, policy.temperature)) for b in batches]
    return batches, coefficients, gone


def _coefficients(rows: Sequence[Row], plan: StepPlan, counts: Sequence[int] | None = None) -> list[float]:
    every = range(len(rows))
    parts: dict[str, list[int]] = defaultdict(list)
    for i in every:
        parts[rows[i].id.agent if plan.loss_denominator == "agent" else ""].append(i)
    result = [0.0] * len(rows)
    factors = plan.scale_factors or {}
    for agent, own in parts.items():
        factor = factors.get(agent, 1.0) if agent else max(factors.values(), default=1.0)
        left = None if counts is None else [counts[i] for i in own]
        for i, c in zip(own, token_coefficients([rows[i] for i in own], plan.loss_agg_mode, factor, left), strict=True):
            result[i] = c
    return result


def _rejected(rows: Sequence[Row], batches: Sequence[Batch], plan: StepPlan) -> tuple[list[Batch], list[int], int]:
    """The batches without rejected targets, how many targets each row has left, and how many went."""
    counts, gone, left = [0] * len(rows), 0, []
    for batch in batches:
        assert batch.old_logprobs is not None
        stay = kept(batch.old_logprobs, batch.behaviour_logprobs, batch.row, plan.rollout_rs, plan.rollout_rs_threshold)
        remaining = torch.bincount(batch.row[stay], minlength=len(batch.indices)).tolist()
        for i, n in zip(batch.indices, remaining, strict=True):
            counts[i] = n
        gone += int((~stay).sum())
        left.append(batch.keeping(stay))
    return left, counts, gone


def penalised(
    rows: Sequence[Row],
    reference: Any,
    temperature: float,
    kl_coef: float,
    kl_estimator: KlEstimator,
    max_tokens_per_microbatch: int,
    pad_id: int,
) -> list[Row]:
    """The rows with kl_coef x KL(behaviour || reference) taken off their rewards, summed over the sampled tokens of
    each trajectory, with the log-probabilities stored when they were sampled."""
    nothing = [(0.0,) * len(row.turns) for row in rows]
    penalties: dict[TrajectoryId, float] = defaultdict(float)
    for batch in pack(rows, nothing, [1.0] * len(rows), max_tokens_per_microbatch, pad_id):
        there = _reference_logprobs(reference, batch, temperature)
        kl = kl_estimate(batch.behaviour_logprobs, there, kl_estimator)
        sums = torch.zeros(len(batch.ids), dtype=torch.float64).index_add(0, batch.row, kl.double())
        for id, total in zip(batch.ids, sums.tolist(), strict=True):
            penalties[id] += total
    return [replace(row, reward=row.reward - kl_coef * penalties[row.id]) for row in rows]


def _reference_logprobs(reference: Any, batch: Batch, temperature: float) -> Tensor:
    with torch.no_grad():
        return score(reference, batch.to(reference.device), temperature)[0].to(batch.row.device)


def _mean(taken: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over optimiser steps, but sums of what is counted; of what a step lacks, over the others."""
    counted = {"tokens", "skipped_steps"}
    names = {name for metrics in taken for name in metrics}
    known = {name: [metrics[name] for metrics in taken if name in metrics] for name in sorted(names)}
    return {name: sum(own) if name in counted else fmean(own) for name, own in known.items()}
