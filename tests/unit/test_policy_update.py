from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_models import plain_logprobs, tiny_model
from tiny_rows import POLICY_LOSS, SFT_LOSS, batches, per_turn, random_rows
from torch import Tensor

from mgrpo.algorithm.coefficients import token_coefficients
from mgrpo.algorithm.loss import TokenSums
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.errors import NonFiniteGradients
from mgrpo.policy.update import LossFunction, Policy, Schedule, score

LOSS: LossFunction = POLICY_LOSS
OPTIMIZERS = ("adamw", "muon")


def policy_with(optimizer: str = "adamw", kind: str = "qwen3", **options: Any) -> Policy:
    policy = Policy(tiny_model(kind))
    policy.begin(Schedule(**{"learning_rate": 1e-3, "steps": 10, "optimizer": optimizer, **options}))
    return policy


def frozen_state(policy: Policy) -> list[Tensor]:
    """Copies of all weights and of every tensor of the optimisers' state."""
    weights = [p.detach().clone() for p in policy.model.parameters()]
    optimizers = [o.state_dict()["state"] for o in policy.optimizers]
    return weights + [t.clone() for states in optimizers for s in states.values() for t in s.values()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_logprobs_of_targets_are_those_of_each_row_alone(kind: str) -> None:
    policy, rows = Policy(tiny_model(kind), temperature=0.7), random_rows()
    (batch,) = batches(rows)
    with torch.no_grad():
        logprobs, entropy = score(policy.model, batch, policy.temperature)
    expected = []
    for i in batch.indices:
        plain = plain_logprobs(policy.model, rows[i].token_ids, 0.7)
        expected += [float(plain[t - 1]) for t, sampled in enumerate(rows[i].loss_mask) if sampled]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(policy.scored(batch), logprobs)
    assert (entropy > 0.0).all()


def test_entropy_is_the_mean_over_sampled_tokens_in_nats() -> None:
    policy, (row,) = policy_with(), random_rows(1)
    with torch.no_grad():
        logits = policy.model(torch.tensor([row.token_ids])).logits[0, :-1]
    distribution = torch.distributions.Categorical(logits=logits[torch.tensor(row.loss_mask[1:])])
    metrics = policy.update(batches([row]), LOSS, 0)
    assert metrics["entropy"] == pytest.approx(float(distribution.entropy().mean()), abs=1e-4)
    assert metrics["tokens"] == row.loss_mask.count(True)


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize("loss", [LOSS, SFT_LOSS], ids=["policy", "sft"])
def test_any_split_into_micro_batches_gives_the_same_step(loss: LossFunction) -> None:
    rows = random_rows(7)
    whole, split = policy_with(max_grad_norm=1e9), policy_with(max_grad_norm=1e9)
    one, many = whole.update(batches(rows), loss, 0), split.update(batches(rows, max_tokens=20), loss, 0)
    assert len(batches(rows)) == 1 < len(batches(rows, max_tokens=20))
    assert one == pytest.approx(many, rel=1e-4, abs=1e-6)
    moments = zip(frozen_state(whole), frozen_state(split), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in moments)


def test_the_step_is_adamw_of_torch_on_the_clipped_gradient() -> None:
    policy, rows = policy_with(max_grad_norm=0.1, weight_decay=0.1, warmup_steps=2), random_rows()
    model = deepcopy(policy.model)
    for batch in batches(rows):
        LOSS(*score(model, batch, 1.0), batch)[0].backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3 / 2, (0.9, 0.98), weight_decay=0.1)
    optimizer.step()
    metrics = policy.update(batches(rows), LOSS, 0)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert metrics["learning_rate"] == 1e-3 / 2
    assert_equal(list(model.parameters()), list(policy.model.parameters()))


def test_dropout_is_off_while_learning() -> None:
    """Log-probabilities of the learner are those of the engine; and a resumed step must not depend on a generator."""
    made = []
    for seed in (1, 2):
        policy = Policy(tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
        policy.begin(Schedule(1e-3, 10))
        torch.manual_seed(seed)
        policy.update(batches(random_rows()), LOSS, 0)
        made.append(frozen_state(policy))
    assert_equal(*made)


def test_no_batches_move_nothing() -> None:
    policy = policy_with(weight_decay=0.1)
    before = frozen_state(policy)
    metrics = policy.update([], LOSS, 0)
    assert_equal(frozen_state(policy), before)
    assert (metrics["tokens"], metrics["grad_norm"], metrics["skipped_steps"]) == (0.0, 0.0, 0.0)
    assert metrics.keys().isdisjoint({"loss", "entropy", "clip_fraction", "approx_kl"})  # unknown is not zero


def test_means_are_over_the_rows_that_were_trained_on() -> None:
    """Rows of a tied group never reach the model, and the metrics are those of the others alone."""
    tied, other = random_rows(2)
    both = pack(
        [tied, other], per_turn([tied, other], [0.0, 1.0]), token_coefficients([tied, other]), 999, 0, drop_zero=True
    )
    alone = pack([other], per_turn([other], [1.0]), token_coefficients([other]), 999, 0)
    one, two = policy_with().update(both, LOSS, 0), policy_with().update(alone, LOSS, 0)
    assert one["tokens"] == other.loss_mask.count(True)
    for name in ("tokens", "entropy", "approx_kl", "logprob_abs_diff", "clip_fraction", "ratio_max"):
        assert one[name] == two[name]


# ---------------------------------------------------------------- gradients that are none


def spoiled(value: float) -> Callable[[Tensor, Batch], tuple[Tensor, TokenSums]]:
    def loss(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, TokenSums]:
        good, sums = LOSS(logprobs, entropy, batch)
        return good + (logprobs * value).sum(), sums

    return loss


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_non_finite_gradient_skips_the_step(optimizer: str, value: float) -> None:
    """R-62: bit-identical weights and state, a counter of one, and the next good step is the one it would have been."""
    policy, twin, rows = policy_with(optimizer), policy_with(optimizer), random_rows()
    for one in (policy, twin):
        one.update(batches(rows), LOSS, 0)
    before = frozen_state(policy)
    assert len(before) > len(list(policy.model.parameters()))
    metrics = policy.update(batches(rows), spoiled(value), 1)
    assert metrics["skipped_steps"] == 1.0 and metrics["learning_rate"] == 0.0
    assert_equal(frozen_state(policy), before)
    assert policy.update(batches(rows), LOSS, 2)["skipped_steps"] == 0.0
    twin.update(batches(rows), LOSS, 2)
    assert_equal(frozen_state(policy), frozen_state(twin))


def test_only_skipped_steps_in_a_row_end_the_run() -> None:
    policy, rows = policy_with(max_skipped_steps=2), random_rows()
    for loss in (spoiled(float("nan")), LOSS, spoiled(float("nan"))):
        policy.update(batches(rows), loss, 0)
    with pytest.raises(NonFiniteGradients, match="2 optimiser steps in a row .* Lower learning_rate"):
        policy.update(batches(rows), spoiled(float("nan")), 0)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_policy_goes_on_as_the_first_would_have(optimizer: str) -> None:
    policy, rows = policy_with(optimizer), random_rows()
    policy.update(batches(rows), LOSS, 0)
    policy.update(batches(rows), spoiled(float("nan")), 1)
    restored = policy_with(optimizer)
    restored.model.load_state_dict(policy.model.state_dict())
    restored.restore(deepcopy(policy.state()))
    assert restored.state()["skipped"] == 1
    for one in (policy, restored):
        one.update(batches(rows), LOSS, 2)
    assert_equal(frozen_state(policy), frozen_state(restored))


def test_a_new_stage_begins_with_a_fresh_optimiser() -> None:
    policy = policy_with()
    policy.update(batches(random_rows()), LOSS, 0)
    policy.begin(Schedule(1e-3, 10, optimizer="muon"))
    assert [type(o).__name__ for o in policy.optimizers] == ["Muon", "AdamW"]
    assert not any(o.state for o in policy.optimizers)
