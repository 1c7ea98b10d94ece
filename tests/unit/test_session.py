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
from mgrpo.config import Config
from mgrpo.config.windows import Window
from mgrpo.errors import CheckpointError, StoreTimeout
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session, row_metrics
from mgrpo.tasks.jsonl import Settings as Jsonl
from mgrpo.types import Group, Reward, Rollout, Task, Trajectory, TrajectoryId

CONFIG = tiny(stages=[WARM_UP, REINFORCE | {"train": ["planner"]}], keep_versions=2, store_timeout_s=0.2)


def open_session(path: Path, config: Config = CONFIG, resume: bool = False) -> Session:
    return Session(config, path, resume, Reporter(path, config, quiet=True))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with open_session(tmp_path) as made:
        yield made


def commit(session: Session, window: Window) -> None:
    """Groups of one empty rollout each: enough to be consumed."""
    ids = {g: TrajectoryId(g, 0, "planner", 0) for g in window.groups}
    groups = [
        Group(g, Task(str(g), "q"), (Rollout(g, 0, (Trajectory(ids[g], "q", (), "max_turns"),)),))
        for g in window.groups
    ]
    session.store.commit(groups, {id: Reward(0.0) for id in ids.values()})


def move(session: Session, agent: str) -> None:
    session.policies[agent].update(batches(random_rows()), SFT_LOSS, 0)


def test_a_run_begins_with_version_0_of_every_trainable_agent(session: Session, tmp_path: Path) -> None:
    for agent in ("planner", "searcher"):
        newest = session.store.latest(agent)
        assert newest is not None and (newest.version, newest.step, newest.handle) == (0, -1, f"weights/{agent}/v0")
        assert (tmp_path / newest.handle / "model.safetensors").is_file()
        assert session.store.trained(agent) == 0


def test_a_frozen_agent_has_no_policy(tmp_path: Path) -> None:
    agents = {name: agent.model_dump(exclude_none=True) for name, agent in CONFIG.agents.items()}
    agents["searcher"]["trainable"] = False
    with open_session(tmp_path, tiny(agents=agents)) as session:
        assert list(session.policies) == ["planner"]
        assert session.store.latest("searcher") is None


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


def test_weights_and_consumption_are_published_together_and_old_ones_go(session: Session, tmp_path: Path) -> None:
    for version, window in enumerate(list(session.windows(0))[:2], 1):
        commit(session, window)
        session.begin_stage("planner", window)
        move(session, "planner")
        session.publish("planner", window, {"loss": 1.0})
        newest = session.store.latest("planner")
        assert newest is not None and (newest.version, newest.stage) == (version, "warm_up")
        assert newest.step == window.first_step + 1 and session.store.trained("planner") == window.end_group
    assert sorted(path.name for path in (tmp_path / "weights" / "planner").iterdir()) == ["v1", "v2"]


def test_without_rows_the_version_stays_and_the_groups_are_consumed(session: Session, tmp_path: Path) -> None:
    window = next(session.windows(0))
    commit(session, window)
    session.publish("searcher", window, {})
    newest = session.store.latest("searcher")
    assert newest is not None and (newest.version, newest.step) == (0, 1)
    assert session.store.trained("searcher") == window.end_group
    assert [path.name for path in (tmp_path / "weights" / "searcher").iterdir()] == ["v0"]


def test_a_resumed_session_has_the_newest_weights_and_its_stages_optimiser(tmp_path: Path) -> None:
    with open_session(tmp_path) as session:
        first, second, *_ = session.windows(0)
        commit(session, first)
        session.begin_stage("planner", first)
        move(session, "planner")
        session.publish("planner", first, {"loss": 1.0})
        moved = _copies(session, "planner")
        state = str([o.state_dict() for o in session.policies["planner"].optimizers])
        move(session, "planner")  # not published: lost
    with open_session(tmp_path, resume=True) as session:
        assert all(torch.equal(a, b) for a, b in zip(_copies(session, "planner"), moved, strict=True))
        assert str([o.state_dict() for o in session.policies["planner"].optimizers]) == state
        optimizers = session.policies["planner"].optimizers
        session.begin_stage("planner", second)  # the same stage goes on
        assert session.policies["planner"].optimizers is optimizers
        reinforce = next(w for w in session.windows(0) if w.stage.name == "reinforce")
        session.begin_stage("planner", reinforce)
        assert not any(o.state for o in session.policies["planner"].optimizers)


def test_resumed_at_a_stage_boundary_the_optimiser_is_fresh(tmp_path: Path) -> None:
    with open_session(tmp_path) as session:
        for window in list(session.windows(0))[:2]:
            commit(session, window)
            for agent in session.policies:
                session.begin_stage(agent, window)
                move(session, agent)
                session.publish(agent, window, {"loss": 1.0})
    with open_session(tmp_path, resume=True) as session:
        assert session.policies["planner"].schedule.steps == REINFORCE["steps"]
        assert not any(o.state for o in session.policies["planner"].optimizers)
        assert session.policies["searcher"].optimizers == []  # it does not learn in the next stage


def test_a_damaged_newest_checkpoint_is_named_on_resume(tmp_path: Path) -> None:
    with open_session(tmp_path):
        pass
    path = tmp_path / "weights" / "searcher" / "v0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{path}: damaged"):
        open_session(tmp_path, resume=True)


# ---------------------------------------------------------------- waiting


def test_waiting_for_learners_has_a_deadline_and_names_them(session: Session) -> None:
    window = next(session.windows(0))
    asyncio.run(session.wait_for_learners(window))
    commit(session, window)
    with pytest.raises(StoreTimeout, match="the learners planner, searcher to have trained on all groups before 6"):
        asyncio.run(session.wait_for_learners(None))
    for agent in session.policies:
        session.publish(agent, window, {})
    asyncio.run(session.wait_for_learners(None))


# ---------------------------------------------------------------- metrics


def test_row_metrics_count_rows_and_how_they_compared() -> None:
    rows = random_rows(4)
    compared = advantages(rows)
    assert row_metrics(rows, None) == {"rows": 4.0, "row_weight": 4.0}
    metrics = row_metrics(rows, compared)
    assert (metrics["groups"], metrics["zero_variance_groups"], metrics["singleton_groups"]) == (1.0, 0.0, 0.0)
    assert metrics["reward_mean"] == pytest.approx(sum(row.reward for row in rows) / 4)


def test_the_pad_id_is_the_models(session: Session) -> None:
    assert session.pad_id("planner") == session.policies["planner"].model.config.pad_token_id
    session.policies["planner"].model = tiny_model(pad_token_id=None)
    assert session.pad_id("planner") == 0


def _copies(session: Session, agent: str) -> list[torch.Tensor]:
    return [p.detach().clone() for p in session.policies[agent].model.parameters()]
