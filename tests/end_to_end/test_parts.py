"""A run whose parts are processes of their own is the run of one process, whoever comes, goes or dies meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parts_running import Parts, assert_ledger, assert_same_run, trajectories, weights
from tiny_recipe import REINFORCE, WARM_UP, table, warmed_team

from mgrpo.config import Config, resolve
from mgrpo.store.base import Store

STEPS, GROUPS, K = 4, 2, 3
TAUGHT = WARM_UP | {"steps": 2, "weight_sync_steps": 2, "groups_per_step": 2}
STAGE = REINFORCE | {"steps": STEPS, "groups_per_step": GROUPS, "num_generations": K}
TAUGHT_GROUPS = 4
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
WAITING = {"store_timeout_s": 120.0, "outage_timeout_s": 120.0, "lease_s": 2.0}


def recipe(**options: Any) -> Config:
    """Demonstrations, then reinforcement of a team that delegates and uses its tools; its rewards always vary."""
    made = table(stages=[TAUGHT, STAGE], evaluation=SHORT, reward="tiny_recipe:token_reward", **WAITING)
    for name, model in warmed_team().items():
        made["agents"][name] |= {"model": model}
    return resolve(made | options)


def trained_alone(home: Path, config: Config) -> Iterator[Store]:
    with Parts(home, config) as parts:
        parts.start("train")
        parts.complete()
        yield parts.store


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store of the run of one process."""
    yield from trained_alone(tmp_path_factory.mktemp("alone"), recipe())


def test_the_run_that_all_are_compared_with_delegates_searches_and_learns(alone: Store) -> None:
    config = recipe()
    assert_ledger(alone, config)
    groups = [alone.group(id)[0] for id in range(alone.committed())]
    for stage in (groups[:TAUGHT_GROUPS], groups[TAUGHT_GROUPS:]):
        turns = [turn for group in stage for trajectory in trajectories(group) for turn in trajectory.turns]
        called = {call.name for turn in turns for call in turn.reply.calls}
        assert {"searcher", "search", "visit"} <= called
    assert all(len({checksum for _, checksum, *_ in weights(alone)[agent]}) == 2 + STEPS for agent in config.learners)


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


# ---------------------------------------------------------------- who comes late and who leaves early


def test_a_collector_comes_late_and_another_leaves_early(tmp_path: Path) -> None:
    config = recipe(rollout={"groups_per_lease": 1})
    with Parts(tmp_path / "parts", config) as parts:
        running = parts.all()
        parts.committed(TAUGHT_GROUPS + GROUPS)
        running["learn-planner"].pause()  # no window begins without it
        late = parts.start("collect", name="collect-1")
        parts.until(lambda: parts.part("collect-1"), "collect-1 to be there")
        running["learn-planner"].go_on()
        parts.until(lambda: parts.records("collect", "collect-1"), "collect-1 to commit a group")
        assert running["collect-0"].stop() == 130
        parts.complete()
        assert late.code == 0 and parts.part("collect-0") is None
        assert_ledger(parts.store, config)
        who = [sum(record["rollouts"] for record in parts.records("collect", f"collect-{i}")) for i in range(2)]
        assert min(who) > 0 and sum(who) == TAUGHT_GROUPS + STEPS * GROUPS * K
        for store in trained_alone(tmp_path / "alone", config):
            assert_same_run(parts.store, store)


def test_a_replica_of_an_engine_comes_and_another_leaves_whether_it_says_so_or_not(tmp_path: Path) -> None:
    config = recipe(max_staleness=1, stages=[STAGE | {"steps": 6}])
    with Parts(tmp_path, config) as parts:
        running = parts.all()
        parts.committed(GROUPS)
        for owner in config.learners:
            running[f"learn-{owner}"].pause()
        for owner in config.learners:
            parts.start("serve", owner, name=f"serve-{owner}-1")
            parts.serves(f"serve-{owner}-1", 0)
        for owner in config.learners:
            running[f"learn-{owner}"].go_on()
        there = parts.store.committed()
        parts.committed(there + GROUPS)  # by all four
        assert running["serve-planner-0"].stop() == 130
        running["serve-searcher-0"].kill()
        parts.complete()
        assert_ledger(parts.store, config)
        last = trajectories(parts.store.group(6 * GROUPS - 1)[0])
        assert {trajectory.id.agent for trajectory in last} == set(config.agents)
