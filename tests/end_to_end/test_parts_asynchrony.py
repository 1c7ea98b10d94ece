"""Collecting and learning at once: how far apart, with which weights, and what becomes of groups that are too old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from parts_running import Parts, assert_ledger, assert_same_run, trajectories, weights
from tiny_models import plain_logprobs
from tiny_recipe import REINFORCE, WARM_UP, table

from mgrpo.collecting import Collector, Work
from mgrpo.config import Config, resolve
from mgrpo.config.windows import total_groups
from mgrpo.engines.base import Completion, Request
from mgrpo.engines.model import load_model
from mgrpo.learning import Learner, oldest_version
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session
from mgrpo.store.base import Store, WeightVersion
from mgrpo.types import Group, Reward, Rollout, Task, Trajectory, TrajectoryId

GROUPS, K = 2, 3
STAGE = REINFORCE | {"steps": 6, "groups_per_step": GROUPS, "num_generations": K}
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
WAITING = {"store_timeout_s": 120.0, "outage_timeout_s": 120.0, "lease_s": 5.0}


def recipe(**options: Any) -> Config:
    """An untrained planner, which delegates nothing; its rewards always vary, so that it moves at every step."""
    made = table(stages=[STAGE], evaluation=SHORT, reward="tiny_recipe:token_reward", **WAITING)
    return resolve(made | options)


def ages(store: Store) -> list[int]:
    """Of every group of the planner: how many versions its oldest token lay behind when it was trained on."""
    found, version = [], 0
    for publication in store.publications("planner"):
        for share in store.take("planner", publication.consumed.start, len(publication.consumed)) or ():
            oldest = oldest_version(share)
            assert oldest is not None
            found.append(version - oldest)
        version = publication.weights.version
    return found


# ---------------------------------------------------------------- how far apart


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_collectors_go_ahead_by_max_staleness_steps_and_no_token_is_older_when_trained(
    staleness: int, tmp_path: Path
) -> None:
    config = recipe(max_staleness=staleness, stale_policy="wait")
    with Parts(tmp_path, config) as parts:
        running = parts.all()
        parts.trained("planner", GROUPS)
        running["learn-planner"].pause()
        trained = parts.store.trained("planner")
        ahead = trained + (1 + staleness) * GROUPS
        parts.committed(ahead)
        time.sleep(0.5)
        assert parts.store.committed() == ahead and parts.store.trained("planner") == trained
        running["learn-planner"].go_on()
        parts.complete()
        assert_ledger(parts.store, config)
        assert max(ages(parts.store)) == staleness
        told = [record["staleness"] for record in parts.records("learn") if record["agent"] == "planner"]
        assert max(told) == staleness and len(told) == STAGE["steps"]
        assert len({checksum for _, checksum, *_ in weights(parts.store)["planner"]}) == 1 + STAGE["steps"]


def open_session(path: Path, config: Config, name: str) -> Session:
    return Session(config, path, reporter=Reporter(path / name, config, quiet=True), name=name, part=True)


def empty(group: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
    id = TrajectoryId(group, 0, "planner", 0)
    rollout = Rollout(group, 0, (Trajectory(id, "q", (), "max_turns"),))
    return Group(group, Task(str(group), "q"), (rollout,)), {id: Reward(0.0)}


def test_what_may_be_collected_ahead_is_counted_once_for_all_collectors_also_after_a_recovery(tmp_path: Path) -> None:
    """R-53: of steps of 8 groups, (2 + 1) x 8 from version 5 on, whoever collects them."""
    stage = STAGE | {"steps": 20, "groups_per_step": 8}
    config = recipe(max_staleness=2, stages=[stage], rollout={"groups_per_lease": 2})

    def train(store: Store, versions: Sequence[int]) -> None:
        for version in versions:
            for owner in config.learners:
                consumed = range(8 * version - 8, 8 * version) if version else range(0)
                store.publish(WeightVersion(owner, version, f"w{version}", f"{version}", version, "reinforce"), consumed)

    def commit(store: Store, groups: Sequence[int]) -> None:
        made = [empty(group) for group in groups]
        store.commit([group for group, _ in made], {id: own for _, rewards in made for id, own in rewards.items()})

    def leased(*collectors: Collector) -> list[int]:
        """All that they are given, in turns, until there is nothing for either."""
        found: list[Work] = []
        while work := [w for collector in collectors if isinstance(w := collector._next(), Work)]:
            found += work
        return [group for work in found for group in work.groups]

    with open_session(tmp_path, config, "before") as session:
        commit(session.store, range(40))
        train(session.store, range(6))
    with open_session(tmp_path, config, "a") as a, open_session(tmp_path, config, "b") as b:
        one, other = (Collector(session, None) for session in (a, b))  # type: ignore[arg-type]
        assert leased(one, other) == list(range(40, 40 + 24))
        commit(a.store, range(44, 64))  # while 40 to 43 are still being collected
        assert leased(one, other) == []
        commit(b.store, range(40, 44))
        assert leased(one, other) == []
        train(a.store, [6])
        assert leased(other, one) == list(range(64, 72))


# ---------------------------------------------------------------- which weights


class Between:
    """An engine between two turns of which something happens, once."""

    def __init__(self, engine: Any, happens: Any) -> None:
        self._engine, self._happens = engine, happens
        self.max_batch, self.max_calls = engine.max_batch, engine.max_calls
        self.asked: list[Request] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        if len(self.asked) > len(requests) and self._happens is not None:
            happens, self._happens = self._happens, None
            await happens()
        found: list[Completion] = await self._engine.generate(requests)
        return found

    async def load(self, version: int, handle: str) -> None:
        await self._engine.load(version, handle)

    def release(self, id: TrajectoryId) -> None:
        self._engine.release(id)

    async def close(self) -> None:
        await self._engine.close()
