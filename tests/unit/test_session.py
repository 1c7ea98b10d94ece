"""What the two loops stand on: cursors, tasks by group, weights published and taken up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_recipe import REINFORCE, WARM_UP, tiny
from tiny_rows import SFT_LOSS, batches, random_rows

from mgrpo.algorithm.advantages import advantages
from mgrpo.collecting import Collector, Work
from mgrpo.config import Config
from mgrpo.config.windows import Window
from mgrpo.errors import CheckpointError, StoreTimeout
from mgrpo.learning import Learner, row_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session
from mgrpo.tasks.jsonl import Settings as Jsonl
from mgrpo.team import Team
from mgrpo.types import Group, Reward, Rollout, Task, Trajectory, TrajectoryId

CONFIG = tiny(stages=[WARM_UP, REINFORCE | {"train": ["planner"]}], keep_versions=2, store_timeout_s=0.2)


def open_session(path: Path, config: Config = CONFIG, resume: bool = False) -> Session:
    return Session(config, path, resume, Reporter(path, config, quiet=True))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with open_session(tmp_path) as made:
        yield made


def begun(session: Session, owner: str) -> Learner:
    learner = Learner(session, owner)
    asyncio.run(learner.begin())
    return learner


@pytest.fixture
def planner(session: Session) -> Learner:
    return begun(session, "planner")


def commit(session: Session, window: Window) -> None:
    """Groups of one empty rollout each: enough to be consumed."""
    ids = {g: TrajectoryId(g, 0, "planner", 0) for g in window.groups}
    groups = [
        Group(g, Task(str(g), "q"), (Rollout(g, 0, (Trajectory(ids[g], "q", (), "max_turns"),)),))
        for g in window.groups
    ]
    session.store.commit(groups, {id: Reward(0.0) for id in ids.values()})


def move(learner: Learner) -> None:
    learner.policy.update(batches(random_rows()), SFT_LOSS, 0)


def versions(folder: Path, agent: str) -> list[str]:
    """Of the weights' folders, without the fence of the lease under which each was written."""
    return sorted(path.name.split("-")[0] for path in (folder / "weights" / agent).iterdir())


def test_a_run_begins_with_version_0_of_every_trainable_agent(session: Session, tmp_path: Path) -> None:
    for agent in ("planner", "searcher"):
        begun(session, agent)
        newest = session.store.latest(agent)
        assert newest is not None and (newest.version, newest.step) == (0, -1)
        assert newest.handle.startswith(f"weights/{agent}/v0-")
        assert (tmp_path / newest.handle / "model.safetensors").is_file()
        assert session.store.trained(agent) == 0


# ---------------------------------------------------------------- tasks by group


@pytest.fixture
def finite(tmp_path: Path) -> Jsonl:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": "a"}) + "\n" for i in range(7)))
    return Jsonl(path=path)


def test_finite_tasks_come_once_an_epoch_in_another_order(session: Session, finite: Jsonl) -> None:
    """R-47."""
    source = finite.build()
    last = session.config.stages[-1]
    begin = sum(stage.steps * stage.groups_per_step for stage in session.config.stages[:-1])
    assert begin % 7 and last.steps * last.groups_per_step == 8  # the stage begins inside of an epoch of the run
    order = [session.task(source, group).id for group in range(begin, begin + 21)]
    epochs = [order[:7], order[7:14], order[14:]]
    assert all(sorted(epoch) == sorted(order[:7]) and len(set(epoch)) == 7 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    first = [session.task(source, group).id for group in range(begin)]
    assert len(set(first[:7])) == 7 and first[:7] == order[:7]


def test_the_task_of_a_group_is_a_pure_function_of_seed_and_group(
    session: Session, finite: Jsonl, tmp_path: Path
) -> None:
    """R-48: a resumed run asks what the first would have asked, wherever it goes on."""
    order = [session.task(finite.build(), group).id for group in range(14)]
    with open_session(tmp_path / "same") as same, open_session(tmp_path / "other", tiny(seed=1)) as other:
        assert [same.task(finite.build(), group).id for group in reversed(range(14))] == order[::-1]
        assert [other.task(finite.build(), group).id for group in range(14)] != order


def test_endless_tasks_come_in_order(session: Session) -> None:
    window = next(session.windows(0))
    source = session.source(window)
    assert source is session.source(window)
    assert [session.task(source, group) for group in (0, 1, 9)] == [source.task(i) for i in (0, 1, 9)]


# ---------------------------------------------------------------- weights


def test_weights_and_consumption_are_published_together_and_old_ones_go(
    session: Session, planner: Learner, tmp_path: Path
) -> None:
    for version, window in enumerate(list(session.windows(0))[:2], 1):
        commit(session, window)
        planner.begin_stage(window)
        move(planner)
        planner.publish(window, {"loss": 1.0})
        newest = session.store.latest("planner")
        assert newest is not None and (newest.version, newest.stage) == (version, "warm_up")
        assert newest.step == window.first_step + 1 and session.store.trained("planner") == window.end_group
    assert versions(tmp_path, "planner") == ["v1", "v2"]


def test_without_rows_the_version_stays_and_the_groups_are_consumed(session: Session, tmp_path: Path) -> None:
    window = next(session.windows(0))
    commit(session, window)
    begun(session, "searcher").publish(window, {})
    newest = session.store.latest("searcher")
    assert newest is not None and (newest.version, newest.step) == (0, 1)
    assert session.store.trained("searcher") == window.end_group
    assert versions(tmp_path, "searcher") == ["v0"]


def test_a_resumed_learner_has_the_newest_weights_and_its_stages_optimiser(tmp_path: Path) -> None:
    with open_session(tmp_path) as session:
        first, second, *_ = session.windows(0)
        commit(session, first)
        planner = begun(session, "planner")
        planner.begin_stage(first)
        move(planner)
        planner.publish(first, {"loss": 1.0})
        moved = _copies(planner)
        state = str([o.state_dict() for o in planner.policy.optimizers])
        move(planner)  # not published: lost
    with open_session(tmp_path, resume=True) as session:
        planner = begun(session, "planner")
        assert all(torch.equal(a, b) for a, b in zip(_copies(planner), moved, strict=True))
        assert str([o.state_dict() for o in planner.policy.optimizers]) == state
        optimizers = planner.policy.optimizers
        planner.begin_stage(second)  # the same stage goes on
        assert planner.policy.optimizers is optimizers
        planner.begin_stage(next(w for w in session.windows(0) if w.stage.name == "reinforce"))
        assert not any(o.state for o in planner.policy.optimizers)


def test_resumed_at_a_stage_boundary_the_optimiser_is_fresh(tmp_path: Path) -> None:
    with open_session(tmp_path) as session:
        learners = [begun(session, agent) for agent in ("planner", "searcher")]
        for window in list(session.windows(0))[:2]:
            commit(session, window)
            for learner in learners:
                learner.begin_stage(window)
                move(learner)
                learner.publish(window, {"loss": 1.0})
    with open_session(tmp_path, resume=True) as session:
        planner, searcher = (begun(session, agent) for agent in ("planner", "searcher"))
        assert planner.policy.schedule.steps == REINFORCE["steps"]
        assert not any(o.state for o in planner.policy.optimizers)
        assert searcher.policy.optimizers == []  # it does not learn in the next stage


@pytest.mark.parametrize("name", ["model.safetensors", "learner.safetensors", "learner.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(name: str, tmp_path: Path) -> None:
    """R-50. The groups it was trained on stay consumed, and its number is not used again."""
    with open_session(tmp_path) as session:
        planner = begun(session, "planner")
        first, second = list(session.windows(0))[:2]
        kept = []
        for window in (first, second):
            commit(session, window)
            planner.begin_stage(window)
            move(planner)
            planner.publish(window, {"loss": 1.0})
            kept.append(_copies(planner))
        newest = session.store.latest("planner")
    assert newest is not None and newest.version == 2
    path = tmp_path / newest.handle / name
    path.write_bytes(path.read_bytes()[:-1])
    with open_session(tmp_path, resume=True) as session:
        planner = begun(session, "planner")
        assert all(torch.equal(a, b) for a, b in zip(_copies(planner), kept[0], strict=True))
        newest = session.store.latest("planner")
        assert newest is not None and (newest.version, session.store.trained("planner")) == (3, second.end_group)
    with open_session(tmp_path, resume=True) as session:  # once
        begun(session, "planner")
        newest = session.store.latest("planner")
        assert newest is not None and newest.version == 3


def test_where_no_checkpoint_is_whole_the_damage_is_named(tmp_path: Path) -> None:
    with open_session(tmp_path) as session:
        begun(session, "searcher")
    (path,) = (tmp_path / "weights" / "searcher").glob("v0-*/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with open_session(tmp_path, resume=True) as session, pytest.raises(CheckpointError, match=f"{path}: damaged"):
        begun(session, "searcher")


# ---------------------------------------------------------------- what is collected next


async def first_work(collector: Collector) -> Work | None:
    async for work in collector.work():
        return work
    return None


def test_a_collector_waits_for_learners_with_a_deadline_and_names_them(session: Session, tmp_path: Path) -> None:
    learners = [begun(session, agent) for agent in ("planner", "searcher")]
    collector = Collector(session, Team(session.config, session.folder.models(session.config)))
    first, second, reinforce, *_ = session.windows(0)
    commit(session, first)
    work = asyncio.run(first_work(collector))  # of the same stage: demonstrations are one window ahead
    assert work is not None and work.groups == second.groups
    session.release(work.lease)
    commit(session, second)
    with pytest.raises(StoreTimeout, match="the learners planner, searcher to have trained on all groups before 12"):
        asyncio.run(first_work(collector))
    for learner in learners:
        for window in (first, second):
            learner.publish(window, {})
    work = asyncio.run(first_work(collector))
    assert work is not None and work.groups == reinforce.groups


# ---------------------------------------------------------------- metrics


def test_row_metrics_count_rows_and_how_they_compared() -> None:
    rows = random_rows(4)
    compared = advantages(rows)
    assert row_metrics(rows, None) == {"rows": 4.0, "row_weight": 4.0}
    metrics = row_metrics(rows, compared)
    assert (metrics["groups"], metrics["zero_variance_groups"], metrics["singleton_groups"]) == (1.0, 0.0, 0.0)
    assert metrics["reward_mean"] == pytest.approx(sum(row.reward for row in rows) / 4)


def test_the_pad_id_is_the_models(session: Session, planner: Learner) -> None:
    window = next(session.windows(0))
    assert planner.step_plan(window).pad_id == planner.policy.model.config.pad_token_id
    planner.policy.model = tiny_model(pad_token_id=None)
    assert planner.step_plan(window).pad_id == 0


def _copies(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in learner.policy.model.parameters()]
