"""What the algorithm can be given, drawn by Hypothesis: samples, rows, comparisons, objectives, whole steps; and how a
drawn step is taken by a small float64 model. Structure and options are drawn; token ids come from a drawn seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from mgrpo.algorithm.advantages import Comparison, advantages
from mgrpo.algorithm.alignment import rows_of
from mgrpo.algorithm.loss import Objective
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.policy.step import StepPlan, Values, take_step
from mgrpo.policy.update import LossFunction, Policy, Schedule, score
from mgrpo.types import Parent, Reply, Reward, Row, Sample, Trajectory, TrajectoryId, Turn

MEAN_MODES = ("seq-mean-token-mean", "token-mean", "rollout-mean")
MODES = (*MEAN_MODES, "seq-mean-token-sum", "seq-mean-token-sum-norm")
COMPARED = ("query", "agent", "agent_turn", "batch", "parent")
VOCABULARY, MAX_SAMPLED = 8, 9
# Sampled tokens of each turn; "|" starts a new row.
SHAPES = ("1", "2", "3", "12", "1|1", "11", "203", "03", "0|3", "13|2", "1|02|3", "333", "0", "21|1", "3|0", "2|2|2")

# Log-ratios of learner and behaviour policy are multiples of GRID, so a row's mean is one of GRID * m / n. No threshold
# is near any of these: a comparison of two gradients never hangs on which side of a kink the last bit falls.
GRID = 0.1
CLIPS = (0.1, 0.2, 0.28, 0.4)
DUAL_CLIPS = (1.5, 3.0)
REJECTIONS = ((0.5, 2.0), (0.75, 1.25), (0.9, 5.0))
CAPS = (1.5, 2.0, 5.0)

# Dyadic, so that equal mixes tie exactly and unequal ones are at least 1/16 apart.
REWARDS = st.sampled_from([0.0, 1.0, 0.5, *(n / 16 for n in range(17))])
WEIGHTS = st.sampled_from([1.0, 2.0, 0.5, 2 / 3, 8.0, 0.1, 3.7])


# ---------------------------------------------------------------- trajectories and rows


def turn(draw: random.Random, context: int, sampled: int, new_row: bool = False) -> Turn:
    """A turn whose ``logprobs`` are log-ratios on the grid, until `sampled_by` gives them to a model."""
    ids = [tuple(draw.randrange(VOCABULARY) for _ in range(n)) for n in (context, sampled)]
    ratios = tuple(GRID * draw.choice((0, 0, *range(-12, 13))) for _ in range(sampled))
    return Turn(*ids, ratios, 0, "stop", "", Reply(), new_row=new_row)


@st.composite
def trajectory(draw: Any, id: TrajectoryId, child: bool = True) -> Trajectory:
    """Of a drawn shape, words from a drawn seed."""
    words = random.Random(draw(st.integers(0, 2**16)))
    turns = tuple(
        turn(words, words.randint(1, 2), int(sampled), new_row=i > 0 and t == 0)
        for i, row in enumerate(draw(st.sampled_from(SHAPES)).split("|"))
        for t, sampled in enumerate(row)
    )
    parent = Parent(replace(id, agent="main", invocation=0), 0, 0) if child else None
    return Trajectory(id, "t", turns, "answer", parent=parent)


@st.composite
def ids(draw: Any, agents: Sequence[str], groups: int = 3, rollouts: int = 3, calls: int = 2) -> list[TrajectoryId]:
    """In order; any number of calls by each rollout, 0 included."""
    return [
        TrajectoryId(group, rollout, agent, i)
        for group in range(draw(st.integers(1, groups)))
        for rollout in range(draw(st.integers(1, rollouts)))
        for agent in agents
        for i in range(draw(st.integers(0, calls)))
    ]


@st.composite
def samples(draw: Any) -> list[Sample]:
    """One agent's, of up to 3 groups of up to 4 rollouts of 0 to 6 calls, some unknown, in any order."""
    every = draw(ids(("sub",), rollouts=4, calls=6))
    known = [Sample(draw(trajectory(id)), Reward(draw(REWARDS | st.none()))) for id in every]
    return draw(st.permutations(known))


@st.composite
def rows(draw: Any, agents: Sequence[str] = ("sub",), rollouts: int = 3, rewards: Any = REWARDS) -> list[Row]:
    """Aligned rows of ``agents``, at least one, with weights of their own."""
    every = draw(ids(agents, rollouts=rollouts))
    made = [row for id in every for row in rows_of(Sample(draw(trajectory(id)), Reward(draw(rewards))), draw(WEIGHTS))]
    return made or [plain_row(TrajectoryId(0, 0, agents[0], 0), 1.0)]


def plain_row(id: TrajectoryId, reward: float, weight: float = 1.0, turns: int = 1) -> Row:
    return Row(id, 0, tuple(turn(random.Random(t), 1, 2) for t in range(turns)), reward, weight)


# ---------------------------------------------------------------- options


def comparisons(compare_with: Sequence[str] = COMPARED, scales: Sequence[str] = ("group", "batch", "none")) -> Any:
    return st.builds(
        Comparison,
        compare_with=st.sampled_from(compare_with),
        scale_rewards=st.sampled_from(scales),
        std_unbiased=st.booleans(),
        leave_one_out=st.booleans(),
        whiten_advantages=st.booleans(),
    )


def objectives() -> Any:
    """Every combination of what a loss can be made of."""
    return st.builds(
        Objective,
        policy_loss=st.sampled_from(["ppo", "cispo", "reinforce", "sft"]),
        clip_ratio_low=st.sampled_from(CLIPS),
        clip_ratio_high=st.sampled_from(CLIPS),
        clip_ratio_c=st.none() | st.sampled_from(DUAL_CLIPS),
        importance_sampling_level=st.sampled_from(["token", "sequence"]),
        kl_coef=st.sampled_from([0.0, 0.3]),
        kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
        entropy_coef=st.sampled_from([0.0, 0.2]),
        rollout_is=st.sampled_from(["none", "token", "sequence"]),
        rollout_is_threshold=st.sampled_from(CAPS),
    )


def plans(modes: Sequence[str] = MODES, rejections: Sequence[str] = ("none", "token", "sequence")) -> Any:
    """A whole step's numbers, with any objective."""
    return st.builds(
        StepPlan,
        objective=objectives(),
        max_tokens_per_microbatch=st.integers(8, 80),
        pad_id=st.integers(0, VOCABULARY - 1),
        loss_agg_mode=st.sampled_from(modes),
        loss_denominator=st.sampled_from(["agent", "weights"]),
        scale_factors=st.just({"sub": 5.0, "other": 3.0}),
        rollout_rs=st.sampled_from(rejections),
        rollout_rs_threshold=st.sampled_from(REJECTIONS),
        num_minibatches=st.integers(1, 3),
        num_iterations=st.integers(1, 2),
    )


# ---------------------------------------------------------------- a small model


class TinyModel(nn.Module):
    """Next-token logits from a token, its place and the mean of what came before: 384 parameters, float64."""

    def __init__(self, seed: int, width: int = 8, places: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(places, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.6, generator=generator)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        embedded = self.embed(input_ids) * attention_mask[..., None]
        before = embedded.cumsum(1) / (position_ids + 1)[..., None]
        return SimpleNamespace(logits=self.head(torch.tanh(embedded + 2.0 * before + self.place(position_ids))))


@cache
def reference_model(seed: int) -> TinyModel:
    return TinyModel(seed + 100)


def sampled_by(model: TinyModel, rows: Sequence[Row], temperature: float) -> list[Row]:
    """The rows as a behaviour policy would have sampled them whose log-ratio to ``model`` is what they held before."""
    nothing, made = [(0.0,) * len(row.turns) for row in rows], list(rows)
    for batch in pack(rows, nothing, [1.0] * len(rows), 1000, 0, dtype=torch.float64):
        with torch.no_grad():
            ratios, there = iter(batch.behaviour_logprobs.tolist()), iter(score(model, batch, temperature)[0].tolist())
        for i in batch.indices:
            turns = [
                replace(own, logprobs=tuple(next(there) - next(ratios) for _ in own.token_ids)) for own in rows[i].turns
            ]
            made[i] = replace(rows[i], turns=tuple(turns))
    return made


# ---------------------------------------------------------------- a whole step


@dataclass(frozen=True)
class Case:
    """All that the gradient of a step depends on. ``roots`` holds every rollout's root, known."""

    rows: tuple[Row, ...]
    roots: Mapping[tuple[int, int], float]
    comparison: Comparison
    plan: StepPlan
    model_seed: int
    temperature: float
    learning_rate: float = 0.0

    @property
    def values(self) -> Values:
        return advantages(self.rows, self.comparison, self.roots).values

    def planned(self, **changes: Any) -> Case:
        return replace(self, plan=replace(self.plan, **changes))


@st.composite
def cases(draw: Any, planned: Any = None, rates: Sequence[float] = (0.0, 0.1)) -> Case:
    """Rows of two agents that share weights, and a step with them by one of the ``planned``, any plan by default."""
    seed, temperature = draw(st.integers(0, 3)), draw(st.sampled_from([1.0, 0.7]))
    made = sampled_by(TinyModel(seed), draw(rows(("sub", "other"), rollouts=2)), temperature)
    roots = {key: draw(REWARDS) for key in sorted({(row.id.group, row.id.rollout) for row in made})}
    plan = draw(plans() if planned is None else planned)
    return Case(tuple(made), roots, draw(comparisons()), plan, seed, temperature, draw(st.sampled_from(rates)))


class Descent:
    """Plain gradient descent in the shape of a torch optimiser, whose import costs seconds. It keeps every gradient;
    ``exchange`` is where processes add up theirs."""

    def __init__(self, model: nn.Module, learning_rate: float, exchange: Callable[[Tensor], None]) -> None:
        self.parameters, self.exchange = list(model.parameters()), exchange
        self.param_groups = [{"lr": learning_rate}]
        self.gradients: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = nn.utils.parameters_to_vector(own)
        self.exchange(gradient)
        self.gradients.append(gradient)
        moved = nn.utils.parameters_to_vector(self.parameters) - self.param_groups[0]["lr"] * gradient
        nn.utils.vector_to_parameters(moved, self.parameters)

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Recorder(Policy):
    """Learns by `Descent` and keeps the micro-batches of every optimiser step.

    ``share`` = (rank, size) leaves it every size-th micro-batch; ``view`` is how it sees a micro-batch.
    """

    def __init__(
        self,
        case: Case,
        share: tuple[int, int] = (0, 1),
        view: Callable[[Batch], Batch] = lambda batch: batch,
        exchange: Callable[[Tensor], None] = lambda gradient: None,
    ) -> None:
        super().__init__(TinyModel(case.model_seed), case.temperature)
        self.share, self.view = share, view
        self.descent = Descent(self.model, case.learning_rate, exchange)
        self.optimizers = [self.descent]  # type: ignore[list-item]
        self.schedule = Schedule(case.learning_rate, steps=1, max_grad_norm=math.inf)
        self.batches: list[Sequence[Batch]] = []

    @property
    def gradients(self) -> list[Tensor]:
        return self.descent.gradients

    def scored(self, batch: Batch) -> Tensor:
        return super().scored(self.view(batch))

    def update(
        self, batches: Sequence[Batch], loss_function: LossFunction, step: int, entropy_grad: bool = False
    ) -> dict[str, float]:
        self.batches.append(batches)
        rank, size = self.share
        return super().update([self.view(batch) for batch in batches[rank::size]], loss_function, step, entropy_grad)


def stepped(case: Case, values: Values | None = None, policy: Recorder | None = None) -> Recorder:
    """A policy after it took the step, packed in float64."""
    policy = policy or Recorder(case)
    reference = reference_model(case.model_seed) if case.plan.objective.kl_coef else None
    with patch("mgrpo.policy.step.pack", partial(pack, dtype=torch.float64)):
        take_step(policy, case.rows, case.values if values is None else values, case.plan, 0, reference)
    return policy


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of two sequences of gradients, as a part of the largest entry or of 1."""
    assert len(one) == len(other)
    pairs = list(zip(one, other, strict=True))
    return max((float((a - b).abs().max()) / max(1.0, float(a.abs().max())) for a, b in pairs), default=0.0)
