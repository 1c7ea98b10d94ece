"""A tiny recipe through `train`: what a run leaves behind, and that its stages, versions and numbers agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_recipe import REINFORCE, WARM_UP, tiny

import mgrpo.train
from mgrpo.config import Config, load
from mgrpo.config.windows import windows
from mgrpo.engines.model import load_model
from mgrpo.errors import RunFolderError
from mgrpo.learning import Learner
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.store.base import Publication, Store
from mgrpo.store.weights import WeightStore
from mgrpo.train import train
from mgrpo.types import Group, Rollout, Trajectory

EVALUATION = {"questions": 2, "tasks": {"split": "test"}, "dev_tasks": {"split": "dev"}, "dev_questions": 2, "every": 2}
CONFIG = tiny(stages=[WARM_UP, REINFORCE], reward="tiny_recipe:token_reward", evaluation=EVALUATION)
GROUPS = 4 * 3 + 4 * 2


def run(folder: Path, config: Config = CONFIG, resume: bool = False) -> dict[str, Any]:
    return train(config, folder, resume, Reporter(folder, config, quiet=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, run(folder)


@pytest.fixture
def store(finished: tuple[Path, dict[str, Any]]) -> Iterator[Store]:
    _, opened = RunFolder(finished[0]).open()
    yield opened
    opened.close()


# ---------------------------------------------------------------- what is left behind


def test_a_run_leaves_its_recipe_summary_and_curves(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    assert load(folder / "config.toml") == CONFIG
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["seed"] == 0 and summary["seconds"] > 0 and summary["success_before"] is None  # not graded here
    assert (folder / "curves.png").stat().st_size > 10_000
    assert not list(folder.rglob(".*.tmp"))


def test_metrics_tell_every_step_once(finished: tuple[Path, dict[str, Any]]) -> None:
    records = read_metrics(finished[0])
    of_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("stage", "collect", "learn", "evaluate")}
    assert [(r["step"], r["name"]) for r in of_kind["stage"]] == [(0, "warm_up"), (4, "reinforce")]
    assert [r["step"] for r in of_kind["collect"]] == [0, 2, 4, 5, 6, 7]
    for agent in ("planner", "searcher"):
        assert [r["step"] for r in of_kind["learn"] if r["agent"] == agent] == list(range(8))
    assert [(r["step"], r["name"]) for r in of_kind["evaluate"]] == [
        (4, "before"),
        (4, "before_greedy"),
        (6, "dev"),
        (8, "after"),
        (8, "after_greedy"),
        (8, "closed_book"),
    ]
    learned = [r for r in of_kind["learn"] if r.get("rows") and r["stage"] == "reinforce"]
    assert len(learned) >= 4
    for record in learned:
        assert all(isinstance(record[key], float) for key in ("loss", "grad_norm", "learning_rate", "entropy"))
        assert record["skipped_steps"] == 0.0


def test_groups_hold_the_recipes_rollouts(store: Store) -> None:
    assert store.committed() == GROUPS
    for window in windows(CONFIG):
        for id in window.groups:
            group, rewards = store.group(id)
            assert len(group.rollouts) == CONFIG.num_generations(window.stage)
            assert set(rewards) == {t.id for r in group.rollouts for t in r.trajectories}
            assert group.task.info["split"] == "train"


def test_versions_and_consumption(store: Store) -> None:
    for agent in ("planner", "searcher"):
        first, *rest = store.publications(agent)
        assert (first.weights.version, first.weights.step, len(first.consumed)) == (0, -1, 0)
        assert [p.weights.step for p in rest] == [1, 3, 4, 5, 6, 7]
        assert [id for p in rest for id in p.consumed] == list(range(GROUPS))
        for before, after in zip([first, *rest], rest, strict=False):
            assert after.weights.version == before.weights.version + bool(after.metrics)
            assert (after.weights.checksum == before.weights.checksum) >= (not after.metrics)


def test_rollouts_are_sampled_with_the_newest_weights(store: Store) -> None:
    """Synchronous: what a group was sampled with is what its learner had published before it."""
    versions = {agent: _served(store.publications(agent)) for agent in ("planner", "searcher")}
    for window in windows(CONFIG):
        for id in window.groups:
            for trajectory in _trajectories(store.group(id)[0]):
                expected = 0 if window.stage.collect == "teacher" else versions[trajectory.id.agent][window.first_group]
                assert {turn.version for turn in trajectory.turns} == {expected}


def test_updates_name_the_weights_that_they_start_from(finished: tuple[Path, dict[str, Any]], store: Store) -> None:
    """One version in all steps of a window: what they make of it is published when the window ends."""
    learned = {(r["agent"], r["step"]): r for r in read_metrics(finished[0]) if r["kind"] == "learn"}
    for agent in ("planner", "searcher"):
        before = _served(store.publications(agent))
        for window in windows(CONFIG):
            for step, _, _ in window.steps:
                assert learned[agent, step]["from_version"] == before[window.first_group]


def _served(publications: list[Publication]) -> dict[int, int]:
    """First group of a window -> version that was newest when it was collected."""
    return {p.consumed.stop: p.weights.version for p in publications}


def _trajectories(group: Group) -> list[Trajectory]:
    rollouts: tuple[Rollout, ...] = group.rollouts
    return [trajectory for rollout in rollouts for trajectory in rollout.trajectories]


def test_the_newest_checkpoints_are_whole_and_kept(finished: tuple[Path, dict[str, Any]], store: Store) -> None:
    for agent in ("planner", "searcher"):
        newest = store.latest(agent)
        assert newest is not None
        WeightStore(finished[0], finished[0] / "cache").get(newest.handle, newest.checksum, learner=True)
        assert len(list((finished[0] / "weights" / agent).iterdir())) <= CONFIG.keep_versions
        begin, end = load_model(finished[0] / "models" / agent), load_model(finished[0] / newest.handle)
        pairs = zip(begin.parameters(), end.parameters(), strict=True)
        assert not any(torch.equal(a, b) for a, b in pairs)


# ---------------------------------------------------------------- going on


def test_a_finished_run_needs_resume_and_then_does_nothing(finished: tuple[Path, dict[str, Any]], store: Store) -> None:
    folder, summary = finished
    before = [store.publications(agent) for agent in ("planner", "searcher")]
    with pytest.raises(RunFolderError, match="--resume"):
        run(folder)
    again = run(folder, resume=True)
    assert [store.publications(agent) for agent in ("planner", "searcher")] == before
    told = ("calls_per_rollout", "greedy_after", "success_after")
    assert {key: again[key] for key in told} == {key: summary[key] for key in told}


def test_the_same_recipe_gives_the_same_weights(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, store: Store
) -> None:
    """Evaluation changes nothing in training: here there is less of it."""
    less = tiny(
        stages=[WARM_UP, REINFORCE],
        reward="tiny_recipe:token_reward",
        evaluation=EVALUATION | {"questions": 1, "every": 0},
    )
    run(tmp_path / "again", less)
    _, other = RunFolder(tmp_path / "again").open()
    for agent in ("planner", "searcher"):
        mine, theirs = ([p.weights.checksum for p in run.publications(agent)] for run in (other, store))
        assert mine == theirs
    other.close()


def test_weights_that_moved_in_any_step_of_a_window_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent without rows in the last step of a window still learned from the earlier ones."""
    real: Callable[..., dict[str, Any]] = mgrpo.train.update

    def without_rows_in_odd_steps(learner: Learner, *rest: Any) -> dict[str, Any]:
        return {learner.owner: {}} if learner.owner == "searcher" and rest[-1] % 2 else real(learner, *rest)

    monkeypatch.setattr(mgrpo.train, "update", without_rows_in_odd_steps)
    run(tmp_path / "run", tiny(stages=[WARM_UP]))
    _, store = RunFolder(tmp_path / "run").open()
    assert [p.weights.version for p in store.publications("searcher")] == [0, 1, 2]
    store.close()
