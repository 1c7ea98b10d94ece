"""A planner, a searcher and a comparer learn side by side: versions, rows and statistics of each are its own."""

from __future__ import annotations

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

from mgrpo.config import Config, resolve
from mgrpo.config.windows import windows
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.store.base import Store
from mgrpo.tasks.grading import gaia_score
from mgrpo.train import train
from mgrpo.types import Reward, Trajectory

RECIPE = ROOT / "recipes" / "three_agents.toml"
AGENTS = ("planner", "searcher", "comparer")
D = {"searcher": 2, "comparer": 1}
SMALL = {"type": "tiny", "hidden_size": 96, "intermediate_size": 128, "num_layers": 2, "num_heads": 2}
TAUGHT = 120  # steps of demonstrations
# Enough demonstrations for the grammar of calls, so that the team calls both of its sub-agents; not for right answers.
STAGES: tuple[dict[str, Any], ...] = (
    {"steps": TAUGHT, "weight_sync_steps": TAUGHT, "groups_per_step": 8},
    {"steps": 1, "weight_sync_steps": 1, "groups_per_step": 8, "tasks": {"noise": {"compare": 1.0}}},
    {"steps": 3, "groups_per_step": 3},
)


@cache
def recipe() -> Config:
    """The recipe with smaller models, one family, fewer and shorter steps."""
    table = tomllib.loads(RECIPE.read_text())
    for agent in table["agents"].values():
        agent["model"] = SMALL
    for stage, cut in zip(table["stages"], STAGES, strict=True):
        stage |= cut
    table["tasks"] |= {"families": {"compare": 1}, "countries": 8}
    table["evaluation"] |= {"questions": 2, "examples": 0}
    return resolve(table)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("runs") / "three", recipe()
    train(config, folder, False, Reporter(folder, config, quiet=True))
    return folder


@pytest.fixture
def store(finished: Path) -> Iterator[Store]:
    _, opened = RunFolder(finished).open()
    yield opened
    opened.close()


Worth = tuple[Trajectory, Reward]


def steps_of(store: Store, stage: str) -> dict[int, list[Worth]]:
    """Step -> every trajectory of a stage with its reward, in order of id."""
    found: dict[int, list[Worth]] = defaultdict(list)
    for window in windows(recipe()):
        for step, _, ids in window.steps if window.stage.name == stage else ():
            for group, rewards in map(store.group, ids):
                found[step] += [(t, rewards[t.id]) for rollout in group.rollouts for t in rollout.trajectories]
    return found


def of(agent: str, worth: list[Worth]) -> list[Worth]:
    return [(t, reward) for t, reward in worth if t.id.agent == agent]


def learned(folder: Path, agent: str) -> dict[int, dict[str, Any]]:
    return {r["step"]: r for r in read_metrics(folder) if r["kind"] == "learn" and r["agent"] == agent}


# ---------------------------------------------------------------- weights


def test_each_agent_publishes_versions_of_its_own(finished: Path, store: Store) -> None:
    checksums = set()
    for agent in AGENTS:
        first, *rest = store.publications(agent)
        assert [p.weights.step for p in (first, *rest)] == [-1, *range(TAUGHT - 1, TAUGHT + 4)]
        moved = [bool(p.metrics) for p in rest]
        assert [p.weights.version for p in rest] == [sum(moved[: i + 1]) for i in range(len(rest))]
        assert sum(moved[2:]) >= 1  # by reward, not by demonstrations alone
        versions = {p.weights.checksum for p in (first, *rest)}
        assert len(versions) == 1 + sum(moved)
        assert not versions & checksums
        checksums |= versions


# ---------------------------------------------------------------- rows and statistics


@pytest.mark.parametrize("agent", D)
def test_rows_are_aligned_to_the_agents_own_d(finished: Path, store: Store, agent: str) -> None:
    """The rows of an agent weigh d for every rollout that called it: equation 13 with its own d, not another's."""
    records, several = learned(finished, agent), 0
    for step, worth in steps_of(store, "reinforce").items():
        mine = of(agent, worth)
        calls = {(t.id.group, t.id.rollout) for t, _ in mine}
        assert mine, f"step {step} has no call of {agent}: the cut recipe teaches too little"
        assert records[step]["rows"] == len(mine)
        assert records[step]["row_weight"] == pytest.approx(D[agent] * len(calls))
        several += len(mine) > len(calls)
    assert several or agent == "comparer"  # else d / d_k was the same for every row


@pytest.mark.parametrize("agent", AGENTS)
def test_statistics_are_over_the_agents_own_rewards(finished: Path, store: Store, agent: str) -> None:
    """Mean reward and groups without spread, recomputed from the stored rewards of that agent alone."""
    records = learned(finished, agent)
    for step, worth in steps_of(store, "reinforce").items():
        groups: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for trajectory, reward in of(agent, worth):
            if reward.value is not None:
                groups[trajectory.id.group][trajectory.id.rollout].append(reward.value)
        means = [math.fsum(own) / len(own) for group in groups.values() for own in group.values()]
        flat = [{value for own in group.values() for value in own} for group in groups.values()]
        assert records[step]["groups"] == len(groups)
        assert records[step]["reward_mean"] == pytest.approx(math.fsum(means) / len(means))
        assert records[step]["zero_variance_groups"] == sum(
            len(values) == 1 and sum(map(len, group.values())) > 1
            for values, group in zip(flat, groups.values(), strict=True)
        )


def test_no_two_agents_tell_the_same_numbers(finished: Path) -> None:
    told = [learned(finished, agent) for agent in AGENTS]
    for step in range(TAUGHT + 1, TAUGHT + 4):
        assert len({(r[step]["rows"], r[step]["reward_mean"], r[step].get("grad_norm")) for r in told}) == 3


# ---------------------------------------------------------------- grades


def test_the_teachers_sub_answers_are_all_right_by_gold(store: Store) -> None:
    children = [w for worth in steps_of(store, "mechanics").values() for w in worth if w[0].parent is not None]
    assert {reward.parts["expert"] for _, reward in children} == {1.0}
    for worth in steps_of(store, "mechanics").values():
        assert len(of("searcher", worth)) == 2 * len(of("comparer", worth)) == 2 * len(of("planner", worth))


def test_a_comparer_that_errs_costs_itself_and_not_the_searcher(store: Store) -> None:
    (worth,) = steps_of(store, "habits").values()
    assert {reward.parts["expert"] for _, reward in of("searcher", worth)} == {1.0}
    assert {reward.parts["expert"] for _, reward in of("comparer", worth)} == {0.0}
    assert {reward.parts["correct"] for _, reward in of("planner", worth)} == {0.0}


def test_the_teams_own_comparisons_are_graded_by_their_text(store: Store) -> None:
    """Whatever numbers the planner passes on, the larger of them is right; no number, and nobody knows."""
    graded = 0
    for worth in steps_of(store, "reinforce").values():
        for trajectory, reward in of("comparer", worth):
            numbers = re.fullmatch(r"(?:larger|greater) of (\d+) and (\d+)", trajectory.task)
            if numbers is None:
                continue
            right = str(max(map(int, numbers.groups())))
            said = trajectory.answer.answer if trajectory.answer else ""
            assert reward.parts["expert"] == float(gaia_score(right, said))
            graded += 1
    assert graded, "the cut recipe teaches too little: no comparison of two numbers"
