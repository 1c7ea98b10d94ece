"""A team of one is plain GRPO: the same rewards, advantages, loss, gradient and weights, computed here once more."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from tiny_models import plain_logprobs
from tiny_recipe import REINFORCE, WARM_UP, team_of_one

from mgrpo.config import resolve
from mgrpo.engines.model import load_model
from mgrpo.policy.update import Policy
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.store.base import Publication, Store
from mgrpo.train import train
from mgrpo.types import Trajectory

TEMPERATURE, LOW, HIGH, RATE, NORM = 0.9, 0.2, 0.28, 1e-3, 0.25
LEARNER = {
    "learning_rate": RATE,
    "clip_ratio_low": LOW,
    "clip_ratio_high": HIGH,
    "max_grad_norm": NORM,
    "weight_decay": 0.1,
    "max_tokens_per_microbatch": 256,
}
STAGE = REINFORCE | {"steps": 1, "groups_per_step": 3, "num_generations": 4}


@dataclass(frozen=True)
class Step:
    """One optimiser step of the product: what it read and what it did."""

    store: Store
    published: Publication
    before: Any
    gradient: list[torch.Tensor]
    after: Any


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Step]:
    folder = tmp_path_factory.mktemp("runs") / "one"
    config = resolve(
        team_of_one(
            agent={"temperature": TEMPERATURE},
            stages=[STAGE],
            learner=LEARNER,
            reward="tiny_recipe:token_reward",
            evaluation={"questions": 1, "tasks": {"split": "test"}, "examples": 0},
        )
    )
    gradients: list[list[torch.Tensor]] = []
    apply = Policy._apply

    def recording(policy: Policy, step: int) -> float:
        gradients.append([p.grad.clone() for p in policy.model.parameters()])
        return apply(policy, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "_apply", recording)
        train(config, folder, reporter=Reporter(folder, config, quiet=True))
    _, store = RunFolder(folder).open()
    (gradient,), (first, published) = gradients, store.publications("planner")
    before, after = (load_model(folder / p.weights.handle) for p in (first, published))
    yield Step(store, published, before, gradient, after)
    store.close()


def plain_grpo(step: Step, model: Any) -> torch.Tensor:
    """Minus the mean over all rollouts of the mean over sampled tokens of the clipped surrogate, from stored turns."""
    terms = []
    for id in range(STAGE["groups_per_step"]):
        group, rewards = step.store.group(id)
        worth = [rewards[rollout.root.id].value for rollout in group.rollouts]
        mean, deviation = fmean(worth), pstdev(worth)
        assert deviation > 0
        for rollout, value in zip(group.rollouts, worth, strict=True):
            advantage = (value - mean) / deviation
            ids, mask, old = _sequence(rollout.root)
            row = torch.tensor([ids])
            logits = model(input_ids=row, use_cache=False).logits[0, :-1] / TEMPERATURE
            new = torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[:, 0][torch.tensor(mask[1:])]
            ratio = (new - torch.tensor(old)).exp()
            terms.append(torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage).mean())
    return -torch.stack(terms).mean()


def _sequence(trajectory: Trajectory) -> tuple[list[int], list[bool], list[float]]:
    ids: list[int] = []
    mask: list[bool] = []
    for turn in trajectory.turns:
        ids += [*turn.context_ids, *turn.token_ids]
        mask += [False] * len(turn.context_ids) + [True] * len(turn.token_ids)
    return ids, mask, [value for turn in trajectory.turns for value in turn.logprobs]


def test_rollouts_are_one_trajectory_of_several_turns(step: Step) -> None:
    rollouts = [r for id in range(3) for r in step.store.group(id)[0].rollouts]
    assert {len(rollout.trajectories) for rollout in rollouts} == {1}
    assert max(len(rollout.root.turns) for rollout in rollouts) > 1


def test_stored_logprobs_are_the_models_own(step: Step) -> None:
    for rollout in step.store.group(0)[0].rollouts:
        ids, mask, old = _sequence(rollout.root)
        plain = plain_logprobs(step.before, tuple(ids), TEMPERATURE)[torch.tensor(mask[1:])]
        assert torch.allclose(plain, torch.tensor(old), atol=1e-5)


def test_loss_and_gradient_are_those_of_plain_grpo(step: Step) -> None:
    model = deepcopy(step.before)
    loss = plain_grpo(step, model)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM))
    assert norm > NORM  # so that clipping is part of what is compared
    metrics = step.published.metrics
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["rows"] == metrics["row_weight"] == 12.0
    for parameter, found in zip(model.parameters(), step.gradient, strict=True):
        assert torch.allclose(found, parameter.grad, atol=1e-6, rtol=1e-5)


def test_the_weights_after_the_step_are_those_of_torchs_adamw(step: Step) -> None:
    model = deepcopy(step.before)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.98), weight_decay=0.1)
    for parameter, gradient in zip(model.parameters(), step.gradient, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    for expected, found in zip(model.parameters(), step.after.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_rewards_are_format_and_correctness(tmp_path: Path) -> None:
    """Equation (4) on a teacher that opens wrong pages: a few right answers, a few wrong ones."""
    warm_up = WARM_UP | {"steps": 2, "groups_per_step": 6, "tasks": {"noise": {"hit": 0.5}}}
    config = resolve(team_of_one(stages=[warm_up]))
    train(config, tmp_path / "run", reporter=Reporter(tmp_path / "run", config, quiet=True))
    _, store = RunFolder(tmp_path / "run").open()
    seen = set()
    for id in range(12):
        group, rewards = store.group(id)
        root = group.rollouts[0].root
        assert root.answer is not None
        right = root.answer.answer.lower() == str(group.task.answer).lower()
        assert rewards[root.id].value == pytest.approx(0.1 + 0.9 * right)
        seen.add(right)
    assert seen == {True, False}
    store.close()
