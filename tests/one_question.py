"""One question with K = 4 rollouts, and what a recipe makes of it: what every sampled token counts in the update.

::

    rollout   planner's turns (sampled tokens)   searcher's calls: expert's grade, turns
    0 right   1, 1                               .6 in 3, 1
    1 wrong   2, 1, 1                            1.0 in 1, but in an invalid format; .2 in 2, 1
    2 wrong   4                                  none
    3 right   1, 9                               .2 in 1, 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from linear_policy import Bigram
from tiny_recipe import REINFORCE, table, team_of_one

from mgrpo.algorithm.packing import Batch
from mgrpo.algorithm.rewards import rewards
from mgrpo.algorithm.shaping import shaped
from mgrpo.config import Config, StageConfig
from mgrpo.config.windows import Window, windows
from mgrpo.objective import comparison_of, needs_reference, shapings, step_plan
from mgrpo.policy.update import Policy
from mgrpo.train import update
from mgrpo.types import (
    Ending,
    Findings,
    Grade,
    Group,
    Parent,
    Reply,
    Reward,
    Rollout,
    Sample,
    Share,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)


@dataclass(frozen=True)
class Call:
    expert: float | None  # None: an outage
    turns: tuple[int, ...]
    valid: bool = True
    cut: bool = False  # at its last turn, by the limit of turns


@dataclass(frozen=True)
class Attempt:
    right: bool
    turns: tuple[int, ...]
    calls: tuple[Call, ...] = ()


QUESTION = (
    Attempt(True, (1, 1), (Call(0.6, (3, 1)),)),
    Attempt(False, (2, 1, 1), (Call(1.0, (1,), valid=False), Call(0.2, (2, 1)))),
    Attempt(False, (4,)),
    Attempt(True, (1, 9), (Call(0.2, (1, 1)),)),
)


def alone(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """The same of an agent that calls no one."""
    return tuple(Attempt(attempt.right, attempt.turns) for attempt in attempts)


def group_of(attempts: Sequence[Attempt], id: int = 0) -> tuple[Group, dict[TrajectoryId, Grade]]:
    grades: dict[TrajectoryId, Grade] = {}
    rollouts = []
    for k, attempt in enumerate(attempts):
        root = TrajectoryId(id, k, "planner", 0)
        grades[root] = Grade(float(attempt.right))
        found = [_trajectory(root, attempt.turns)]
        for i, call in enumerate(attempt.calls):
            name = TrajectoryId(id, k, "searcher", i)
            grades[name] = Grade(call.expert, None if call.expert is not None else "outage")
            found.append(
                _trajectory(name, call.turns, call.valid, Parent(root, i, 0), "max_turns" if call.cut else "answer")
            )
        rollouts.append(Rollout(id, k, tuple(found)))
    return Group(id, Task(f"t{id}", "q"), tuple(rollouts)), grades


def _trajectory(
    id: TrajectoryId,
    lengths: Sequence[int],
    valid: bool = True,
    parent: Parent | None = None,
    ending: Ending = "answer",
) -> Trajectory:
    """Turns of one token of context each. An invalid one ends in a malformed turn."""
    reply = Reply() if valid else Reply(error="unclosed tag")
    turns = tuple(Turn((1,), (2,) * n, (-1.0,) * n, 0, "stop", "", reply) for n in lengths)
    return Trajectory(id, "q", turns, ending, Findings("x"), parent)


STAGE = {key: value for key, value in REINFORCE.items() if key != "num_generations"}


def recipe(preset: str, **options: Any) -> dict[str, Any]:
    """A planner and a searcher that say nothing that a preset says but the number of rollouts."""
    if preset == "single_agent":
        return team_of_one(preset=preset, agent={"num_generations": 4}, stages=[STAGE], **options)
    result = table(preset=preset, stages=[STAGE], **options)
    result["agents"]["planner"]["num_generations"] = 4
    del result["agents"]["searcher"]["trajectories_per_rollout"]
    if preset == "matpo":
        del result["agents"]["searcher"]["model"]
    return result


# ---------------------------------------------------------------- from the recipe to the update


def raw_rewards(config: Config, group: Group, grades: Mapping[TrajectoryId, Grade]) -> dict[TrajectoryId, Reward]:
    weights = {name: agent.reward_weights or {} for name, agent in config.agents.items()}
    return {id: own for rollout in group.rollouts for id, own in rewards(rollout, grades, weights).items()}


def shaped_rewards(config: Config, group: Group, grades: Mapping[TrajectoryId, Grade]) -> dict[TrajectoryId, Reward]:
    raw, plans = raw_rewards(config, group, grades), shapings(config)
    return {id: own for rollout in group.rollouts for id, own in shaped(rollout, raw, plans).items()}


@dataclass(frozen=True)
class Token:
    advantage: float
    coefficient: float


class NotingPolicy(Policy):
    """Keeps the micro-batches of every optimiser step instead of learning from them."""

    def __init__(self, seen: list[Batch]) -> None:
        super().__init__(Bigram(torch.zeros(4, 4)))
        self.seen = seen

    def update(self, batches: Sequence[Batch], *_: Any) -> dict[str, float]:
        self.seen += batches
        return {"loss": 0.0}


@dataclass
class Desk:
    """What a step asks its learner for, without a run folder."""

    config: Config
    owner: str
    policy: Policy

    def fresh(self, window: Window, shares: Sequence[Share]) -> tuple[Sequence[Share], dict[str, float]]:
        return shares, {}

    def comparison(self, agent: str, window: Window) -> Any:
        return comparison_of(self.config.learner_for(agent, window.stage))

    def step_plan(self, window: Window) -> Any:
        return step_plan(self.config, self.owner, window.stage, pad_id=0)

    def reference(self, window: Window) -> Any:
        return Bigram(torch.zeros(4, 4)) if needs_reference(self.config, self.owner, window.stage) else None


def stage_of(config: Config) -> StageConfig:
    return config.stages[-1]


def tokens_of(config: Config, *questions: Sequence[Attempt]) -> dict[TrajectoryId, list[Token]]:
    """Of every trajectory that moves some weights in one step on ``questions``, each of its sampled tokens."""
    window = next(window for window in windows(config) if window.stage == stage_of(config))
    groups = [group_of(attempts, id) for id, attempts in enumerate(questions)]
    worths = {id: own for group, grades in groups for id, own in shaped_rewards(config, group, grades).items()}
    seen: list[Batch] = []
    trained = config.trained(window.stage)
    for owner in config.learners:
        taken = {
            agent: [_share(group, agent, worths) for group, _ in groups]
            for agent in config.sharing(owner)
            if agent in trained
        }
        desk: Any = Desk(config, owner, NotingPolicy(seen))
        update(desk, window, taken, 0, 0)
    tokens: dict[TrajectoryId, list[Token]] = {}
    for batch in seen:
        for row, *numbers in zip(*(v.tolist() for v in (batch.row, batch.advantages, batch.coefficients)), strict=True):
            tokens.setdefault(batch.ids[row], []).append(Token(*numbers))
    return tokens


def _share(group: Group, agent: str, worths: Mapping[TrajectoryId, Reward]) -> Share:
    own = [t for rollout in group.rollouts for t in rollout.trajectories if t.id.agent == agent]
    roots = {rollout.index: worths[rollout.root.id].value for rollout in group.rollouts}
    return Share(group.id, tuple(Sample(t, worths[t.id]) for t in own), roots)
