"""Faults that other trainers have had in data flow, resumption and asynchrony, each with its input and what is right.

Beside these: R-52 in contract/test_stores.py; R-53 and R-54 over processes in contract/test_engine_servers.py and
end_to_end; R-56 in contract/test_engine_servers.py and unit/test_decode.py; kills of whole runs that train (R-47) in
end_to_end/test_resume.py; R-58 to R-62 in golden/test_field_failures.py.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_run import (
    CountingLearner,
    collect_until_waiting,
    open_session,
    plan,
    prompts_of,
    run_to_the_end,
    trained_prompts,
)
from store_samples import Clock, commit, granted, group, rewards_of, turn, weights
from tiny_recipe import REINFORCE, tiny
from tiny_rows import SFT_LOSS, batches, random_rows

from mgrpo.config import Config
from mgrpo.errors import CheckpointError, LeaseLost
from mgrpo.learning import Learner, oldest_version
from mgrpo.report.reporter import Reporter
from mgrpo.store import ledger
from mgrpo.store.base import RunInfo, Store
from mgrpo.store.opening import open_store
from mgrpo.types import Group, Reward, Rollout, Sample, Share, Task, Trajectory, TrajectoryId

# ---------------------------------------------------------------- the cursor


def test_what_was_collected_and_not_trained_is_trained_after_a_restart(tmp_path: Path) -> None:
    """R-46: ids 0..7, four collected, two trained: the next are [2, 3], not [4, 5]."""
    stage = {"steps": 4, "groups_per_step": 2}
    config = plan(tmp_path, 8, stage=stage, max_staleness=1, store_timeout_s=0.2)
    with open_session(config, tmp_path / "run") as session:
        order = [session.task(session.source(next(session.windows(0))), id).id for id in range(8)]
        assert sorted(order) == [str(i) for i in range(8)]
        learner = CountingLearner(session)
        asyncio.run(learner.begin())
        assert collect_until_waiting(session, 3) == [range(0, 2), range(2, 4)]
        learner.publish(next(learner.windows()), {})
        assert learner.steps == [(0, tuple(order[:2]))]
    with open_session(config, tmp_path / "run") as session:
        learner = CountingLearner(session)
        window = next(learner.windows())
        (shares,) = asyncio.run(learner.take(window)).values()
        assert [share.group for share in shares] == [2, 3]
        assert prompts_of(session.store, window.groups) == tuple(order[2:4])
        assert collect_until_waiting(session, 1) == [range(4, 6)]
        assert [prompts for _, prompts in run_to_the_end(session)] == [tuple(order[i : i + 2]) for i in (2, 4, 6)]


def test_the_last_group_of_an_epoch_is_neither_dropped_nor_does_the_first_come_again(tmp_path: Path) -> None:
    """R-46: ids [0, 1, 2], two a step: [0, 1], then [2], which is all there is."""
    store = open_store(tmp_path / "s.db", RunInfo(0))
    commit(store, 0, 1, 2)
    store.publish(weights(1), [share.group for share in store.take("planner", store.trained("planner"), 2) or ()])
    assert store.trained("planner") == 2 and store.take("planner", 2, 2) is None
    store.publish(weights(2), [share.group for share in store.take("planner", store.trained("planner"), 1) or ()])
    assert [p.consumed for p in store.publications("planner")] == [range(0, 2), range(2, 3)]
    assert store.trained("planner") == 3 and store.take("planner", 3, 1) is None
    store.close()
    config = plan(tmp_path, 3, stage={"steps": 3, "groups_per_step": 2})
    with open_session(config, tmp_path / "run") as session:
        run_to_the_end(session)
        asked = trained_prompts(session.store)
    assert [sorted(asked[:3]), sorted(asked[3:])] == [["0", "1", "2"]] * 2  # the second epoch begins inside a step


# ---------------------------------------------------------------- killed anywhere

PROMPTS, EPOCHS = 20, 2
WRITES = ("lease", "release", "commit", "publish")


class Killed(BaseException):
    """The process is no more."""


class Dying:
    """A store whose process dies at its call number ``at`` of ``calls``, before or after it; then it does nothing."""

    def __init__(self, store: Store, at: int, before: bool, calls: tuple[str, ...] = WRITES) -> None:
        self._store, self._at, self._before, self._calls = store, at, before, calls
        self._lock, self._count, self._dead = threading.Lock(), 0, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:  # the two loops call it from their threads
                self._count += name in self._calls
                last = name in self._calls and self._count == self._at
                self._dead |= last and self._before
                if self._dead:
                    raise Killed
                result = method(*arguments, **options)
                self._dead |= last
            if last:
                raise Killed
            return result

        return call


def once_per_epoch(store: Store) -> bool:
    asked = trained_prompts(store)
    epochs = [Counter(asked[first : first + PROMPTS]) for first in range(0, len(asked), PROMPTS)]
    assert store.counts().groups == store.committed() == len(asked)
    return epochs == [Counter(map(str, range(PROMPTS)))] * EPOCHS


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_killed_at_any_call_of_the_store_every_prompt_is_trained_once_an_epoch(tmp_path: Path, before: bool) -> None:
    """R-47: 20 prompts; the first life ends at its first write to the store, the second at its second, and so on."""
    config = plan(tmp_path, PROMPTS, stage={"steps": 5 * EPOCHS, "groups_per_step": 4})
    for life in range(1, 60):
        with open_session(config, tmp_path / "run") as session:
            real: Any = session.store
            dying: Any = Dying(real, life, before)
            session.store = dying
            try:
                run_to_the_end(session)
            except Killed:
                assert real.trained("planner") <= real.committed()
                continue
            assert once_per_epoch(real) and life > 8
            return
    raise AssertionError("the run never came to its end")


def live(config: Config, folder: str) -> None:
    """What a process does until it is killed, or done."""
    with open_session(config, Path(folder)) as session:
        run_to_the_end(session)


@pytest.fixture
def begin() -> Iterator[Callable[[Config, Path], BaseProcess]]:
    context, begun = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(["mgrpo.train", "transformers.models.auto.tokenization_auto"])

    def start(config: Config, folder: Path) -> BaseProcess:
        process = context.Process(target=live, args=(config, str(folder)))
        process.start()
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()


def test_a_process_that_is_killed_again_and_again_trains_every_prompt_once_an_epoch(
    tmp_path: Path, begin: Callable[[Config, Path], BaseProcess]
) -> None:
    """R-47: SIGKILL, each time somewhere behind a step that it has just published."""
    config = plan(tmp_path, PROMPTS, stage={"steps": PROMPTS * EPOCHS, "groups_per_step": 1})
    with open_session(config, tmp_path / "run"):
        pass
    store = open_store(tmp_path / "run" / "store.db")
    for _ in range(3):
        process, reached = begin(config, tmp_path / "run"), store.trained("planner")
        while process.is_alive() and store.trained("planner") < reached + 5:
            time.sleep(0.001)
        process.kill()
        process.join(60)
        assert store.trained("planner") > reached
    last = begin(config, tmp_path / "run")
    last.join(120)
    assert last.exitcode == 0 and once_per_epoch(store)
    store.close()


def test_resumed_at_the_end_of_an_epoch_the_next_one_is_trained_in_its_own_order(tmp_path: Path) -> None:
    """R-48: 60 steps an epoch, two epochs, resumed at 60: steps 61 to 120 in the second epoch's order."""
    config = plan(tmp_path, 60, stage={"steps": 120, "groups_per_step": 1})
    with open_session(config, tmp_path / "run") as session:
        source = session.source(next(session.windows(0)))
        first, second = ([session.task(source, id).id for id in range(at, at + 60)] for at in (0, 60))
        assert first != second and sorted(first) == sorted(second)
        real, dying = (
            session.store,
            Dying(session.store, at=61, before=False, calls=("publish",)),
        )  # one is of version 0
        session.store = dying  # type: ignore[assignment]
        with pytest.raises(Killed):
            run_to_the_end(session)
        assert real.trained("planner") == 60 and trained_prompts(real) == first
    with open_session(config, tmp_path / "run") as session:
        steps = run_to_the_end(session)
        assert [step for step, _ in steps] == list(range(60, 120))
        assert [prompt for _, (prompt,) in steps] == second
        assert trained_prompts(session.store) == first + second


# ---------------------------------------------------------------- checkpoints


def test_a_newest_checkpoint_that_is_not_whole_gives_way_to_the_one_before_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-50: whichever of its files is cut short."""
    config, warnings = tiny(stages=[REINFORCE | {"steps": 2}]), []
    monkeypatch.setattr(Reporter, "warn", lambda self, line: warnings.append(line))
    with open_session(config, tmp_path) as session:
        planner = Learner(session, "planner")
        asyncio.run(planner.begin())
        window = next(session.windows(0))
        commit_empty(session.store, window.groups)
        whole = [p.detach().clone() for p in planner.policy.model.parameters()]
        planner.begin_stage(window)
        planner.policy.update(batches(random_rows()), SFT_LOSS, 0)
        planner.publish(window, {"loss": 1.0})
        newest = session.store.latest("planner")
        assert newest is not None and not warnings
        paths = sorted((tmp_path / newest.handle).iterdir())
        assert {"model.safetensors", "config.json", "manifest.json", "learner.json"} <= {path.name for path in paths}
        for path in reversed(paths):
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            with pytest.raises(CheckpointError, match=f"{path}: damaged"):
                session.weights.get(newest.handle, newest.checksum, learner=True)
            if path != paths[0]:
                path.write_bytes(content)
    with open_session(config, tmp_path) as session:
        planner = Learner(session, "planner")
        asyncio.run(planner.begin())
        assert all(map(torch.equal, planner.policy.model.parameters(), whole))
        (warning,) = warnings
        assert warning.startswith(f"planner goes on with version 0, since {paths[0]}: damaged")
        newest = session.store.latest("planner")
        assert newest is not None and (newest.version, session.store.trained("planner")) == (2, window.end_group)


def commit_empty(store: Store, ids: range) -> None:
    roots = {id: Trajectory(TrajectoryId(id, 0, "planner", 0), "q", (), "max_turns") for id in ids}
    groups = [Group(id, Task(str(id), "q"), (Rollout(id, 0, (root,)),)) for id, root in roots.items()]
    store.commit(groups, {root.id: Reward(0.0) for root in roots.values()})


# ---------------------------------------------------------------- staleness


def test_how_far_collectors_may_be_ahead_counts_for_all_of_them_together_and_after_a_restart(tmp_path: Path) -> None:
    """R-53: max_staleness 2, 8 groups a step, taken up at version 5: (2 + 1) x 8 = 24 groups, however many collect."""
    options: dict[str, Any] = {"max_staleness": 2, "store_timeout_s": 0.2, "rollout": {"groups_per_lease": 4}}
    config = plan(tmp_path, 200, stage={"steps": 12, "groups_per_step": 8}, **options)
    with open_session(config, tmp_path / "run") as session:
        commit_empty(session.store, range(40))
        for version in range(6):
            consumed = range(8 * (version - 1), 8 * version) if version else range(0)
            session.store.publish(weights(version), consumed)
    with open_session(config, tmp_path / "run", "a") as a, open_session(config, tmp_path / "run", "b") as b:
        found = [collect_until_waiting(part, most) for part, most in ((a, 2), (b, 1), (a, 100), (b, 100))]
    assert sorted(id for cohorts in found for cohort in cohorts for id in cohort) == list(range(40, 64))
    assert found[1] == [range(48, 52)]


def test_the_age_of_a_group_is_that_of_its_oldest_sampled_token(tmp_path: Path) -> None:
    """R-54: what was only read, or given up, has no version, whatever is written there."""
    id = TrajectoryId(0, 0, "planner", 0)

    def share(*turns: Any) -> Share:
        return Share(0, (Sample(Trajectory(id, "q", turns, "answer"), Reward(1.0)),), {0: 1.0})

    mixed = share(turn(6), turn(-1, tokens=0), turn(4), turn(9))
    assert oldest_version(mixed) == 4
    assert oldest_version(share(turn(-1, tokens=0))) is None and oldest_version(Share(0, (), {0: 1.0})) is None
    config = plan(tmp_path, 8, stage={"steps": 4, "groups_per_step": 2}, max_staleness=2)
    with open_session(config, tmp_path / "run") as session:
        learner, window = CountingLearner(session), next(session.windows(0))
        for version, kept in ((6, True), (7, False)):
            session.store.publish(weights(version), ())
            (left,), metrics = learner.fresh(window, [mixed])
            assert (bool(left.samples), metrics["staleness"]) == (kept, version - 4.0)
            assert metrics["stale_groups"] == float(not kept) and left.roots == mixed.roots


# ---------------------------------------------------------------- who was given what

MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC).timestamp()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.now = MIDNIGHT - 1
    monkeypatch.setattr(ledger, "clock", made)
    monkeypatch.setattr(time, "time", lambda: made.now)
    return made


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    opened = open_store(tmp_path / "s.db", RunInfo(0))
    yield opened
    opened.close()


def test_what_is_written_before_midnight_is_found_after_it(store: Store, clock: Clock, tmp_path: Path) -> None:
    """R-57: 23:59:59 and 00:00:01."""
    lease = granted(store, "collect/0", seconds=30)
    commit(store, 0, 1)
    clock.now = MIDNIGHT + 1
    other = open_store(tmp_path / "s.db")
    assert other.lease("collect/0", "b", 30) is None
    other.renew(lease, 30)
    assert [share.group for share in other.take("planner", 0, 2) or ()] == [0, 1]
    other.close()


def test_what_a_killed_learner_took_is_taken_again_after_its_lease_and_trained_once(store: Store, clock: Clock) -> None:
    """R-57."""
    commit(store, 0, 1)
    killed = granted(store, "learn/planner", "a", 30)
    taken = store.take("planner", store.trained("planner"), 2)
    clock.now += 29
    assert store.lease("learn/planner", "b", 30) is None
    clock.now += 1
    heir = granted(store, "learn/planner", "b", 30)
    assert store.take("planner", store.trained("planner"), 2) == taken
    store.publish(weights(1), range(2), {"loss": 1.0}, heir)
    with pytest.raises(LeaseLost):  # it was only suspended, and wakes up
        store.publish(replace(weights(1), checksum="sha256:other"), range(2), {"loss": 2.0}, killed)
    assert [(p.consumed, p.metrics) for p in store.publications("planner")] == [(range(2), {"loss": 1.0})]


def test_a_group_that_is_committed_twice_is_one_row(store: Store) -> None:
    """R-57."""
    for value in (0.25, 0.75):
        store.commit([group(0)], rewards_of(group(0), value=value))
    assert store.counts().groups == 1 and store.group(0) == (group(0), rewards_of(group(0), value=0.25))
