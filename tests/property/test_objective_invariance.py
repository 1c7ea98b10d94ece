"""The gradient of a step, with respect to the parameters of a small float64 model, does not depend on how its rows are
stored, ordered, cut, padded or spread; for every combination of the objective's options."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    CLIPS,
    DUAL_CLIPS,
    GRID,
    MAX_SAMPLED,
    MEAN_MODES,
    REJECTIONS,
    Case,
    Recorder,
    TinyModel,
    cases,
    distance,
    plans,
    stepped,
)

from mgrpo.algorithm.correction import Level
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.policy.step import Values
from mgrpo.policy.update import score
from mgrpo.types import Row

SOME = settings(max_examples=25)
EXACT = 1e-10


def ones(rows: Sequence[Row]) -> Values:
    return [(1.0,) * len(row.turns) for row in rows]


def of_rows(case: Case, chosen: Sequence[int]) -> Case:
    return replace(case, rows=tuple(case.rows[i] for i in chosen))


def as_trajectories(case: Case) -> Case:
    """The same rows, each of them a trajectory of its own."""
    alone = [replace(row, id=replace(row.id, invocation=i), segment=0) for i, row in enumerate(case.rows)]
    return replace(case, rows=tuple(alone))


def test_no_drawn_ratio_is_near_a_threshold() -> None:
    edges = [1.0 - low for low in CLIPS] + [1.0 + high for high in CLIPS]
    thresholds = [*edges, *DUAL_CLIPS, *(bound for bounds in REJECTIONS for bound in bounds)]
    for threshold in thresholds:
        for n in range(1, MAX_SAMPLED + 1):
            steps = math.log(threshold) / GRID * n
            assert abs(steps - round(steps)) * GRID / n > 1e-6


# ---------------------------------------------------------------- the same step, given differently


@SOME
@given(cases(), st.data())
def test_rows_that_stand_twice_with_half_the_weight_are_one_trajectory(case: Case, data: st.DataObject) -> None:
    twice = data.draw(st.sets(st.integers(0, len(case.rows) - 1), min_size=1))
    halves = [replace(row, weight=row.weight / 2) if i in twice else row for i, row in enumerate(case.rows)]
    doubled = data.draw(st.permutations([*halves, *(halves[i] for i in twice)]))
    assert distance(stepped(case).gradients, stepped(replace(case, rows=tuple(doubled))).gradients) <= EXACT


@SOME
@given(cases(), st.data())
def test_the_order_of_rows_changes_nothing(case: Case, data: st.DataObject) -> None:
    shuffled = replace(case, rows=tuple(data.draw(st.permutations(case.rows))))
    assert distance(stepped(case).gradients, stepped(shuffled).gradients) <= EXACT


@SOME
@given(cases(), st.integers(1, 80))
def test_any_split_into_micro_batches_gives_the_same_gradient(case: Case, budget: int) -> None:
    one, other = case.planned(max_tokens_per_microbatch=10_000), case.planned(max_tokens_per_microbatch=budget)
    assert distance(stepped(one).gradients, stepped(other).gradients) <= EXACT


@SOME
@given(cases(), st.integers(0, 7), st.integers(0, 7), st.integers(1, 6))
def test_padding_changes_nothing(case: Case, pad_id: int, filler: int, columns: int) -> None:
    def wider(batch: Batch) -> Batch:
        def padded(values: torch.Tensor, value: int) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, columns), value=value)

        return replace(
            batch,
            input_ids=padded(batch.input_ids, filler),
            attention_mask=padded(batch.attention_mask, 0),
            position_ids=padded(batch.position_ids, 0),
            targets=padded(batch.targets, 0),
        )

    other = case.planned(pad_id=pad_id)
    assert distance(stepped(case).gradients, stepped(other, policy=Recorder(other, view=wider)).gradients) <= EXACT


@SOME
@given(cases(rates=(0.0,)))
def test_gradients_of_two_processes_add_up_to_that_of_one(case: Case) -> None:
    first, second = (stepped(case, policy=Recorder(case, share=(rank, 2))).gradients for rank in (0, 1))
    total = [a + b for a, b in zip(first, second, strict=True)]
    assert distance(stepped(case).gradients, total) <= EXACT


# ---------------------------------------------------------------- denominators


@SOME
@given(cases(plans(modes=MEAN_MODES)))
def test_coefficients_of_what_is_left_sum_to_one_for_every_denominator(case: Case) -> None:
    for batches in stepped(case, ones(case.rows)).batches:
        sums: dict[str, float] = defaultdict(float)
        for batch in batches:
            for r, c in zip(batch.row.tolist(), batch.coefficients.tolist(), strict=True):
                sums[batch.ids[r].agent if case.plan.loss_denominator == "agent" else "all"] += c
        assert sums == pytest.approx(dict.fromkeys(sums, 1.0), rel=1e-12)


@SOME
@given(cases(rates=(0.0,)))
def test_losses_of_agents_with_their_own_denominators_are_added(case: Case) -> None:
    case, values = case.planned(loss_denominator="agent", num_minibatches=1), case.values
    total: list[torch.Tensor] = []
    for agent in ("sub", "other"):
        mine = [i for i, row in enumerate(case.rows) if row.id.agent == agent]
        own = stepped(of_rows(case, mine), [values[i] for i in mine]).gradients
        total = [a + b for a, b in zip(total, own, strict=True)] if total and own else total or own
    assert distance(stepped(case, values).gradients, total) <= EXACT


@SOME
@given(cases(plans(rejections=("sequence",)), rates=(0.0,)))
def test_a_rejected_sequence_is_as_if_it_had_never_been_sampled(case: Case) -> None:
    case = as_trajectories(case).planned(num_minibatches=1)
    model, (low, high) = TinyModel(case.model_seed), case.plan.rollout_rs_threshold
    left = []
    for i, row in enumerate(case.rows):
        (batch,) = pack([row], ones([row]), [1.0], 1, 0, dtype=torch.float64)
        ratio = math.exp(float((score(model, batch, case.temperature)[0] - batch.behaviour_logprobs).sum().detach()))
        left += [i] if low <= ratio <= high else []
    values = case.values
    absent = of_rows(case, left).planned(rollout_rs="none")
    assert distance(stepped(case, values).gradients, stepped(absent, [values[i] for i in left]).gradients) <= EXACT


@settings(max_examples=50)
@given(cases(rates=(0.0,)), st.booleans())
def test_what_is_left_out_for_an_advantage_of_zero_had_no_gradient(case: Case, only_advantages: bool) -> None:
    """Compared by turn, a row can have turns with and without an advantage."""
    objective = replace(case.plan.objective, kl_coef=0.0, entropy_coef=0.0) if only_advantages else case.plan.objective
    case = case.planned(objective=objective, num_minibatches=1, num_iterations=1)
    values = replace(case, comparison=replace(case.comparison, compare_with="agent_turn")).values
    kept = [tuple(value or 1e-300 for value in own) for own in values]
    (whole,) = stepped(case, kept).gradients or [torch.zeros(1)]
    (gradient,) = stepped(case, values).gradients or [torch.zeros_like(whole)]
    assert distance([whole], [gradient]) <= EXACT


@SOME
@given(cases(rates=(0.1,)), st.sampled_from(["token", "sequence"]))
def test_every_update_compares_with_the_policy_before_the_first(case: Case, level: Level) -> None:
    case = case.planned(objective=replace(case.plan.objective, rollout_is=level), num_iterations=2)
    before = TinyModel(case.model_seed)
    for batch in (batch for batches in stepped(case).batches for batch in batches):
        assert batch.old_logprobs is not None
        assert distance([batch.old_logprobs], [score(before, batch, case.temperature)[0].detach()]) <= EXACT


@SOME
@given(cases(plans(rejections=("none",)), rates=(0.0,)))
def test_parts_of_a_step_are_whole_groups_each_with_its_own_denominators(case: Case) -> None:
    policy = stepped(case, ones(case.rows))
    groups = [{id.group for batch in batches for id in batch.ids} for batches in policy.batches]
    parts = groups[: len(groups) // case.plan.num_iterations]
    assert groups == parts * case.plan.num_iterations
    assert sorted(group for part in parts for group in part) == sorted({row.id.group for row in case.rows})
    assert len(parts) == min(case.plan.num_minibatches, len(set().union(*parts)))
    for part, batches, gradient in zip(groups, policy.batches, policy.gradients, strict=True):
        own = of_rows(case, [i for i, row in enumerate(case.rows) if row.id.group in part])
        assert sorted(id for batch in batches for id in batch.ids) == sorted(row.id for row in own.rows)
        alone = stepped(own.planned(num_minibatches=1, num_iterations=1), ones(own.rows))
        assert distance(alone.gradients, [gradient]) <= EXACT


# ---------------------------------------------------------------- the unit of the loss


@SOME
@given(cases(plans(modes=("rollout-mean",), rejections=("none", "token"))), st.randoms(use_true_random=False))
def test_under_rollout_mean_it_does_not_matter_into_how_many_invocations_a_rollout_was_cut(
    case: Case, dice: Random
) -> None:
    """Every row is cut between some of its turns; a piece begins with all that came before as context, so its tokens
    have the probabilities they had. Every invocation of a rollout counts d / d_k; or 1, where agents share a
    denominator and d / d_k would weigh them against each other."""
    objective = replace(case.plan.objective, importance_sampling_level="token")
    objective = replace(objective, rollout_is=objective.rollout_is.replace("sequence", "token"))
    case = as_trajectories(case).planned(objective=objective)
    whole = list(zip(case.rows, case.values, strict=True))
    pieces = [cut(row, own, dice.choices((True, False), k=len(row.turns))) for row, own in whole]
    gradients = []
    for made in (whole, [piece for own in pieces for piece in own]):
        flat = (
            weighed(made) if case.plan.loss_denominator == "agent" else [(replace(r, weight=1.0), v) for r, v in made]
        )
        gradients.append(stepped(replace(case, rows=tuple(r for r, _ in flat)), [v for _, v in flat]).gradients)
    assert distance(*gradients) <= EXACT


Credited = tuple[Row, tuple[float, ...]]  # a row and the advantages of its turns


def cut(row: Row, values: tuple[float, ...], before: Sequence[bool]) -> list[Credited]:
    """The row as several invocations, cut before the turns that ``before`` names; without those of no sampled token."""
    starts = [0, *(t for t in range(1, len(row.turns)) if before[t])]
    pieces = []
    for n, (a, b) in enumerate(zip(starts, [*starts[1:], len(row.turns)], strict=True)):
        past = [token for turn in row.turns[:a] for token in (*turn.context_ids, *turn.token_ids)]
        first = replace(row.turns[a], context_ids=(*past, *row.turns[a].context_ids))
        id = replace(row.id, invocation=10 * row.id.invocation + n)
        pieces.append((replace(row, id=id, turns=(first, *row.turns[a + 1 : b])), values[a:b]))
    return [piece for piece in pieces if piece[0].sampled]


def weighed(pieces: Sequence[Credited], d: int = 4) -> list[Credited]:
    calls: dict[tuple[int, int, str], int] = defaultdict(int)
    for row, _ in pieces:
        calls[row.id.group, row.id.rollout, row.id.agent] += 1
    return [
        (replace(row, weight=d / calls[row.id.group, row.id.rollout, row.id.agent]), values) for row, values in pieces
    ]
