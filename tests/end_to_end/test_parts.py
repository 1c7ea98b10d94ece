"""A run whose parts are processes of their own is the run of one process, whoever comes, goes or dies meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parts_running import Parts
from tiny_recipe import REINFORCE, WARM_UP, table, warmed_team

from mgrpo.config import Config, resolve
from mgrpo.store.base import Store
from mgrpo.types import TrajectoryId

STEPS, GROUPS, K = 4, 2, 3
TAUGHT = WARM_UP | {"steps": 2, "weight_sync_steps": 2, "groups_per_step": 2}
STAGE = REINFORCE | {"steps": STEPS, "groups_per_step": GROUPS, "num_generations": K}
TAUGHT_GROUPS = 4
TOTAL = TAUGHT_GROUPS + STEPS * GROUPS
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
WAITING = {"store_timeout_s": 120.0, "outage_timeout_s": 120.0, "lease_s": 2.0}
AGENTS = ("planner", "searcher")


def recipe(**options: Any) -> Config:
    """Demonstrations, then reinforcement of a team that delegates and uses its tools; its rewards always vary."""
    made = table(stages=[TAUGHT, STAGE], evaluation=SHORT, reward="tiny_recipe:token_reward", **WAITING)
    for name, model in warmed_team().items():
        made["agents"][name] |= {"model": model}
    return resolve(made | options)


# ---------------------------------------------------------------- what is compared


def weights(store: Store) -> dict[str, list[tuple[int, str, int, int]]]:
    """Of each agent's publications the version, the sum over all its files, and the groups consumed."""
    return {
        agent: [
            (p.weights.version, p.weights.checksum, p.consumed.start, p.consumed.stop)
            for p in store.publications(agent)
        ]
        for agent in AGENTS
    }


def sampled(store: Store) -> dict[TrajectoryId, Any]:
    """Every token of every group with its probability, its version, and what it was worth."""
    found = {}
    for id in range(store.committed()):
        group, rewards = store.group(id)
        for trajectory in (t for rollout in group.rollouts for t in rollout.trajectories):
            turns = [(t.context_ids, t.token_ids, t.logprobs, t.version, t.reply) for t in trajectory.turns]
            found[trajectory.id] = (trajectory.parent, turns, trajectory.ending, rewards[trajectory.id])
    return found


def assert_same_run(one: Store, other: Store) -> None:
    assert sampled(one) == sampled(other)
    assert weights(one) == weights(other)


def assert_ledger(store: Store, groups: int = TOTAL) -> None:
    """Every group is there once, all were trained on once by each agent, and versions have no gaps."""
    assert store.committed() == store.counts().groups == groups
    for agent in AGENTS:
        published = store.publications(agent)
        assert [id for p in published for id in p.consumed] == list(range(groups))
        versions = [p.weights.version for p in published]
        assert sorted(set(versions)) == list(range(max(versions) + 1)) and versions == sorted(versions)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store of the run of one process."""
    with Parts(tmp_path_factory.mktemp("alone"), recipe()) as parts:
        parts.start("train")
        parts.complete()
        yield parts.store


def test_the_run_that_all_are_compared_with_delegates_searches_and_learns(alone: Store) -> None:
    assert_ledger(alone)
    found = [alone.group(id)[0] for id in range(TOTAL)]
    for groups in (found[:TAUGHT_GROUPS], found[TAUGHT_GROUPS:]):
        turns = [t for g in groups for r in g.rollouts for trajectory in r.trajectories for t in trajectory.turns]
        called = {call.name for turn in turns for call in turn.reply.calls}
        assert {"searcher", "search", "visit"} <= called
    assert all(len({checksum for _, checksum, *_ in weights(alone)[agent]}) == 2 + STEPS for agent in AGENTS)


# ---------------------------------------------------------------- one process, several, several that die


def test_launch_trains_what_one_process_trains(alone: Store, tmp_path: Path) -> None:
    with Parts(tmp_path, recipe()) as parts:
        parts.start("launch", fresh=True)
        parts.complete()
        assert_same_run(parts.store, alone)


def test_parts_that_die_once_each_train_what_one_process_trains(alone: Store, tmp_path: Path) -> None:
    with Parts(tmp_path, recipe()) as parts:
        running = parts.all()
        ends = {"tools-0": 2, "collect-0": 5, "serve-searcher-0": 7, "learn-planner": 9, "serve-planner-0": 10}
        for name, groups in ends.items():
            parts.committed(groups)
            running[name].kill()
            assert running[name].code == -signal.SIGKILL
            parts.start(*name.removesuffix("-0").split("-"), name=name)
        parts.complete()
        assert_same_run(parts.store, alone)
