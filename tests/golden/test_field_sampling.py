"""Faults that other trainers have had in dynamic sampling and length shaping, with the right values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_recipe import REINFORCE, table
from tiny_team import agent

from mgrpo.agents.rollout import Team, Watcher
from mgrpo.agents.scheduler import Lockstep
from mgrpo.algorithm.shaping import overlong_penalty
from mgrpo.config import resolve
from mgrpo.gather import Gathered, gather
from mgrpo.tasks.expert import Gold
from mgrpo.types import Grade, Task, Trajectory


class Questions:
    """Tasks t0, t1, ...: the gold answer is the task's, and any trajectory is graded against it."""

    def corpus(self, task: Task) -> None:
        return None

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        return Grade(float(trajectory.answer is not None and trajectory.answer.answer == task.answer))


def gathered(answers: Sequence[Sequence[str]], **filters: Any) -> Gathered:
    """One group of two rollouts; ``answers[batch][rollout]`` is said to the question of that batch, "Tarn" is right."""
    asked: list[int] = []

    def task(id: int, batch: int) -> Task:
        asked.append(batch)
        return Task(f"t{batch}", "what is the capital of Zubora ?", "Tarn")

    planner = agent(lambda request: f"<answer> {answers[asked[-1]][request.id.rollout]} </answer>")
    recipe = table(filter_groups={"enable": True, **filters}, stages=[REINFORCE | {"num_generations": 2}])
    # "<answer> Tarn </answer>" has four tokens with its end; one more is the first in the buffer of the last ten.
    recipe["agents"]["planner"] |= {"max_tokens_per_turn": 14, "overlong_buffer_len": 10}
    config = resolve(recipe)
    team: Any = SimpleNamespace(
        config=config, scheduler=lambda: Lockstep(5.0), expert=lambda source: Gold().build(source=source)
    )
    source: Any = Questions()
    return asyncio.run(gather(team, Team(planner), source, config.stages[0], [0], task, Watcher()))


LONG = "Tarn <evidence> p12"  # two tokens more, so shaped down by .2; as right as "Tarn"


def test_dynamic_sampling_looks_at_the_raw_metric() -> None:
    """R-42: both right, raw [1, 1], shaped [1, .8]: replaced; the next question's raw rewards differ: kept."""
    found = gathered([("Tarn", LONG), ("Merova", LONG)])
    assert [group.task.id for group in found.groups] == ["t1"]
    assert (found.counts["replaced_groups"], found.counts["dull_groups"]) == (1.0, 0.0)
    worths = {id.rollout: reward.value for id, reward in found.rewards.items()}
    assert worths == pytest.approx({0: 0.1, 1: 0.8})


@pytest.mark.parametrize("batches", [1, 2])
def test_dynamic_sampling_is_bounded(batches: int) -> None:
    """R-42, R-58: what is still dull after so many batches is kept and counted, whatever shaping made of it."""
    found = gathered([("Tarn", LONG)] * 3, max_num_gen_batches=batches)
    assert [group.task.id for group in found.groups] == [f"t{batches - 1}"]
    assert (found.counts["replaced_groups"], found.counts["dull_groups"]) == (batches - 1.0, 1.0)
    assert sorted(reward.value or 0.0 for reward in found.rewards.values()) == pytest.approx([0.8, 1.0])


def test_nothing_is_replaced_unless_asked_for() -> None:
    """R-42: the default trains on what there is."""
    found = gathered([("Tarn", "Tarn")], enable=False)
    assert ([group.task.id for group in found.groups], found.counts) == (["t0"], {})


@pytest.mark.parametrize(("length", "expected"), [(3072, 0.0), (3584, -0.5), (4096, -1.0), (5000, -1.0), (10, 0.0)])
def test_the_overlong_penalty_is_a_ramp(length: int, expected: float) -> None:
    """R-43: at most 4096 tokens, a buffer of the last 1024: 0 up to 3072, then linear to -1 at the limit."""
    assert overlong_penalty(length, 4096, 1024) == expected
    assert overlong_penalty(length, 4096, 1024, factor=0.25) == 0.25 * expected
