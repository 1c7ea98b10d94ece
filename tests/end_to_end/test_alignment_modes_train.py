"""`weight`, `resample` and `none` all train, from the same warm-up, and count rows as they say."""

from __future__ import annotations

import math
import shutil
from collections import Counter

import pytest
from tiny_recipe import REINFORCE, WARM_UP, table, tiny

from mgrpo.config import resolve
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.store.base import Store
from mgrpo.train import train
from mgrpo.types import Group

MODES = ("weight", "resample", "none")
D = 2
STEPS, GROUPS, K = 3, 2, 4
WARM = WARM_UP | {
    "steps": 40,
    "weight_sync_steps": 20,
    "groups_per_step": 8,
    "tasks": {"tasks_per_world": 8},
    "learner": {"optimizer": "muon", "learning_rate": 1e-2},
}
STAGE = REINFORCE | {"steps": STEPS, "groups_per_step": GROUPS, "num_generations": K}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model folder for each agent that has seen demonstrations: enough to delegate now and then."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    config = tiny(stages=[WARM])
    train(config, folder, reporter=Reporter(folder, config, quiet=True))
    _, store = RunFolder(folder).open()
    for agent in config.agents:
        newest = store.latest(agent)
        assert newest is not None
        shutil.copy(folder / newest.handle / "model.safetensors", folder / "models" / agent)
    store.close()
    return {agent: str(folder / "models" / agent) for agent in config.agents}


@pytest.fixture(scope="module", params=MODES)
def run(
    request: pytest.FixtureRequest, warmed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Store]:
    mode = request.param
    folder = tmp_path_factory.mktemp(mode) / "run"
    agents = {name: agent | {"model": warmed[name]} for name, agent in table()["agents"].items()}
    agents["searcher"] |= {"align": mode, "trajectories_per_rollout": D}
    if mode == "none":
        del agents["searcher"]["trajectories_per_rollout"]
    evaluation = {"questions": 1, "tasks": {"split": "test"}, "examples": 0}
    recipe = table(agents=agents, stages=[STAGE], reward="tiny_recipe:token_reward", evaluation=evaluation)
    config = resolve(recipe)
    train(config, folder, reporter=Reporter(folder, config, quiet=True))
    _, store = RunFolder(folder).open()
    return mode, store


def calls(group: Group) -> list[int]:
    """d_k of every rollout."""
    return [len(rollout.trajectories) - 1 for rollout in group.rollouts]


def test_it_trains(run: tuple[str, Store]) -> None:
    _, store = run
    for agent in ("planner", "searcher"):
        first, *rest = store.publications(agent)
        assert len(rest) == STEPS
        assert rest[-1].weights.checksum != first.weights.checksum
        for publication in rest:
            assert all(math.isfinite(value) for value in publication.metrics.values())
        assert any(publication.metrics.get("grad_norm", 0.0) > 0.0 for publication in rest)


def test_rows_are_counted_as_the_mode_says(run: tuple[str, Store]) -> None:
    mode, store = run
    differing = 0
    for publication in store.publications("searcher")[1:]:
        d_k = [d for id in publication.consumed for d in calls(store.group(id)[0])]
        aligned = D * sum(d > 0 for d in d_k)
        expected = {
            "weight": (sum(d_k), aligned),
            "none": (sum(d_k), sum(d_k)),
            "resample": (sum(min(d, D) for d in d_k), aligned),
        }[mode]
        if sum(d_k):
            found = publication.metrics["rows"], publication.metrics["row_weight"]
            assert found == pytest.approx(expected)  # a duplicate is a heavier row, not another one
        differing += sum(d not in (0, D) for d in d_k)
    assert differing, "every rollout made d calls: nothing was aligned"


def test_the_planner_is_not_aligned(run: tuple[str, Store]) -> None:
    for publication in run[1].publications("planner")[1:]:
        assert publication.metrics["rows"] == publication.metrics["row_weight"] == GROUPS * K


def test_a_searcher_is_compared_with_all_calls_of_its_question(run: tuple[str, Store]) -> None:
    _, store = run
    for publication in store.publications("searcher")[1:]:
        with_calls = Counter(bool(sum(calls(store.group(id)[0]))) for id in publication.consumed)
        if publication.metrics:
            assert publication.metrics["groups"] == with_calls[True]
