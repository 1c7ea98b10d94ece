"""Collecting and learning at once: how far apart, with which weights, and what becomes of groups that are too old."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import version_folder
from parts_running import Parts, assert_ledger, assert_same_run, trajectories, weights
from tiny_models import plain_logprobs
from tiny_recipe import REINFORCE, WARM_UP, table

from mgrpo.collecting import Collector
from mgrpo.config import Config, resolve
from mgrpo.config.windows import total_groups
from mgrpo.engines.base import Completion, Request
from mgrpo.engines.model import load_model
from mgrpo.learning import Learner, oldest_version
from mgrpo.parts import _remote_team as remote_team
from mgrpo.session import Session
from mgrpo.store.base import Part, Store
from mgrpo.team import Team
from mgrpo.types import Group, Reward, Rollout, Task, Trajectory, TrajectoryId

GROUPS, K = 2, 3
STAGE = REINFORCE | {"steps": 6, "groups_per_step": GROUPS, "num_generations": K}
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
WAITING = {"store_timeout_s": 120.0, "outage_timeout_s": 120.0, "lease_s": 5.0}


def recipe(**options: Any) -> Config:
    """An untrained planner, which delegates nothing; its rewards always vary, so that it moves at every step."""
    made = table(stages=[STAGE], evaluation=SHORT, reward="tiny_recipe:token_reward", **WAITING)
    return resolve(made | {"launch": {"tool_server": False}} | options)


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
    config = recipe(max_staleness=staleness, stale_policy="wait" if staleness else "drop")
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


# ---------------------------------------------------------------- which weights


class Between:
    """An engine that waits for ``happens`` before it decodes a second batch."""

    def __init__(self, engine: Any, happens: Callable[[], Awaitable[None]]) -> None:
        self._engine, self._happens, self._batches = engine, happens, 0
        self.max_batch, self.max_calls = engine.max_batch, engine.max_calls

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self._batches += 1
        if self._batches == 2:
            await self._happens()
        found: list[Completion] = await self._engine.generate(requests)
        return found

    def release(self, id: TrajectoryId) -> None:
        self._engine.release(id)


def commit_empty(store: Store, ids: range) -> None:
    roots = {id: Trajectory(TrajectoryId(id, 0, "planner", 0), "q", (), "max_turns") for id in ids}
    groups = [Group(id, Task(str(id), "q"), (Rollout(id, 0, (root,)),)) for id, root in roots.items()]
    store.commit(groups, {root.id: Reward(0.0) for root in roots.values()})


def test_tokens_keep_the_version_that_sampled_them_when_weights_change_between_two_turns(tmp_path: Path) -> None:
    """R-54: published and loaded by an engine's process while trajectories are under way."""
    config = recipe(max_staleness=1)
    with Parts(tmp_path, config) as parts:
        for owner in config.learners:
            parts.start("serve", owner)
        with Session(config, parts.folder, name="test", part=True) as session, remote_team(session) as team:
            groups = asyncio.run(_collect_while_weights_change(parts, session, team))
            first, second = (
                load_model(session.weights.get(p.weights.handle, p.weights.checksum))
                for p in session.store.publications("planner")
            )
        assert any(len(trajectory.turns) > 1 for group in groups for trajectory in trajectories(group))
        for trajectory in (trajectory for group in groups for trajectory in trajectories(group)):
            assert [turn.version for turn in trajectory.turns] == [0, 1, 1, 1][: len(trajectory.turns)]
            read: tuple[int, ...] = ()
            for turn in trajectory.turns:
                read = (turn.context_ids if turn.new_row else read + turn.context_ids) + turn.token_ids
                told, expected = turn.logprobs, (first, second)[turn.version]
                assert told == pytest.approx(plain_logprobs(expected, read)[-len(told) :].tolist(), abs=1e-4)


async def _collect_while_weights_change(parts: Parts, session: Session, team: Team) -> Sequence[Group]:
    """The groups of the second step, between whose first turns the planner learns from the first step."""
    learners = {owner: Learner(session, owner) for owner in session.config.learners}
    for owner, learner in learners.items():
        await learner.begin()
        await asyncio.to_thread(parts.serves, f"serve-{owner}-0", 0)
    window = next(session.windows(0))
    commit_empty(session.store, window.groups)

    async def publish() -> None:
        planner = learners["planner"]
        planner.begin_stage(window)
        with torch.no_grad():
            for weight in planner.policy.model.parameters():
                weight.mul_(1.2)
        planner.publish(window, {"loss": 1.0})
        await asyncio.to_thread(parts.serves, "serve-planner-0", 1)

    collector = Collector(session, team)
    async for work in collector.work():
        assert work.groups == range(window.end_group, window.end_group + GROUPS)
        acting = await collector.serve(work)
        root = replace(acting.root, engine=Between(acting.root.engine, publish))
        gathered = await collector.gather(work, replace(acting, root=root))
        session.release(work.lease)
        return gathered.groups
    raise AssertionError("nothing was left to collect")


# ---------------------------------------------------------------- engines that cannot load what is published


def stuck(parts: Parts, name: str) -> Part:
    """Wait until the engine of that name says that it cannot load something newer."""
    found: Part = parts.until(lambda: (part := parts.part(name)) is not None and part.state and part, f"{name} to say")
    newer = re.match(r"version (\d+) could not be loaded: ", found.state)
    assert newer is not None and int(newer[1]) > found.version, found
    return found


def test_an_engine_that_cannot_load_says_so_keeps_what_it_has_and_goes_on_once_it_can(tmp_path: Path) -> None:
    taught = WARM_UP | {"steps": 2, "groups_per_step": GROUPS}
    config = recipe(stages=[taught, STAGE | {"steps": 2}])
    with Parts(tmp_path / "parts", config) as parts, Parts(tmp_path / "alone", config) as alone:
        engine = parts.start("serve", "planner")
        parts.serves("serve-planner-0", 0)
        engine.pause()
        parts.all("tools", "serve")
        parts.start("serve", "searcher")
        parts.trained("planner", 2 * GROUPS)
        file = version_folder(parts.folder, "planner", 1) / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        engine.go_on()
        part = stuck(parts, "serve-planner-0")
        assert part.version == 0 and f"{file}: damaged" in part.state
        time.sleep(0.5)
        assert parts.store.committed() == 2 * GROUPS and engine.code is None
        file.write_bytes(content)
        parts.complete()
        newest = parts.serves("serve-planner-0", 3)
        assert newest.state == "" and newest.instance == part.instance
        alone.start("train")
        alone.complete()
        assert_same_run(parts.store, alone.store)


@contextmanager
def replica_elsewhere(parts: Parts, home: Path, name: str) -> Iterator[Path]:
    """An engine of the planner with a run folder of its own; without the link that is returned it finds no weights."""
    link = home / "place" / f"{parts.config.name}-{parts.store.run.created:.0f}"
    link.parent.mkdir(parents=True)
    link.symlink_to(parts.folder)
    store = f"sqlite:///{parts.folder / 'store.db'}"
    with Parts(home, parts.config, "--store", store, "--weights", str(link.parent)) as elsewhere:
        elsewhere.start("serve", "planner", name=name)
        parts.serves(name, 0)
        yield link


def test_a_replica_that_fell_behind_is_left_out_until_it_has_caught_up(tmp_path: Path) -> None:
    config = recipe(max_staleness=1, stale_policy="wait", stages=[STAGE | {"steps": 12}])
    with Parts(tmp_path / "parts", config) as parts:
        running = parts.all("learn")
        parts.serves("serve-planner-0", 0)
        with replica_elsewhere(parts, tmp_path / "elsewhere", "serve-planner-1") as link:
            for owner in config.learners:
                running[owner] = parts.start("learn", owner)
            parts.serves("serve-planner-1", 1)
            link.unlink()
            part = stuck(parts, "serve-planner-1")
            seen = parts.store.committed()
            parts.committed(seen + 3 * GROUPS)
            for id in range(seen + 2 * GROUPS, seen + 3 * GROUPS):
                turns = [t for trajectory in trajectories(parts.store.group(id)[0]) for t in trajectory.turns]
                assert turns and min(turn.version for turn in turns) > part.version
            link.symlink_to(parts.folder)
            parts.complete()
            assert parts.serves("serve-planner-1", 12).state == ""
        assert_ledger(parts.store, config)


def test_groups_of_an_engine_that_stays_behind_are_left_out_and_count_as_seen(tmp_path: Path) -> None:
    config = recipe(max_staleness=1, stale_policy="drop")
    with Parts(tmp_path / "parts", config) as parts:
        parts.start("serve", "searcher")
        with replica_elsewhere(parts, tmp_path / "elsewhere", "serve-planner-0") as link:
            link.unlink()
            parts.all("tools", "serve")
            for owner in config.learners:
                parts.trained(owner, total_groups(config))
            assert stuck(parts, "serve-planner-0").version == 0
            link.symlink_to(parts.folder)
            parts.complete()
        assert_ledger(parts.store, config)
        assert [version for version, *_ in weights(parts.store)["planner"]] == [0, 1, 2, 2, 2, 2, 2]
        told = [record for record in parts.records("learn") if record["agent"] == "planner"]
        assert [record["stale_groups"] for record in told] == [0, 0, *[GROUPS] * 4]
        assert [record.get("rows", 0) for record in told] == [GROUPS * K] * 2 + [0] * 4
        assert ages(parts.store) == [0, 0, 1, 1, *[2] * 8]
