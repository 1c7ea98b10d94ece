"""Agents of one model, told apart by their prompts: one set of weights, one engine, one learner, statistics apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import mgrpo
from tiny_recipe import REINFORCE, WARM_UP, table

from mgrpo.config import Config, resolve
from mgrpo.errors import ConfigError
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.team import Team
from mgrpo.train import train

WARM = WARM_UP | {
    "steps": 40,
    "weight_sync_steps": 20,
    "groups_per_step": 8,
    "tasks": {"tasks_per_world": 8},
    "learner": {"optimizer": "muon", "learning_rate": 1e-2},
}


def recipe(change: Callable[[dict[str, Any]], None] = lambda made: None, **learner: Any) -> Config:
    made = table(
        stages=[WARM, REINFORCE | {"steps": 2, "num_generations": 4, "learner": learner}],
        evaluation={"questions": 2, "tasks": {"split": "test"}, "examples": 0},
        reward="tiny_recipe:token_reward",
    )
    del made["agents"]["searcher"]["model"]
    made["agents"]["searcher"]["share_weights_with"] = "planner"
    change(made)
    return resolve(made)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("shared") / "run", recipe()
    train(config, folder, reporter=Reporter(folder, config, quiet=True))
    return folder


def test_one_set_of_weights_is_published_and_served_to_both(finished: Path) -> None:
    config, store = RunFolder(finished).open()
    assert config.learners == ("planner",)
    assert {p.weights.agent for p in store.publications()} == {"planner"}
    assert [path.name for path in (finished / "weights").iterdir()] == ["planner"]
    assert [path.name for path in (finished / "models").iterdir()] == ["planner"]
    store.close()
    with Team.load(finished) as team:
        assert team.engines["planner"] is team.engines["searcher"]
        question = team.questions().task(0).question
        assert team.ask(question).trajectories


def test_either_agent_exports_the_weights(finished: Path, tmp_path: Path) -> None:
    for agent in ("planner", "searcher"):
        assert mgrpo("export", finished, agent, tmp_path / agent).code == 0
    one, other = ((tmp_path / agent / "model.safetensors").read_bytes() for agent in ("planner", "searcher"))
    assert one == other


def test_a_stage_may_leave_one_out_and_compare_with_the_weights_it_had(tmp_path: Path) -> None:
    """A searcher that joins in the second stage of reinforcement is compared with what it was before."""
    first = REINFORCE | {"name": "first", "steps": 1, "train": ["planner"]}
    second = REINFORCE | {"name": "second", "steps": 1, "learner": {"kl_coef": 0.1}}
    evaluation = {"questions": 1, "tasks": {"split": "test"}, "examples": 0}
    config = resolve(table(stages=[first, second], evaluation=evaluation, reward="tiny_recipe:token_reward"))
    train(config, tmp_path / "run", reporter=Reporter(tmp_path / "run", config, quiet=True))
    for agent in config.agents:
        reference = tmp_path / "run" / "reference" / agent / "model.safetensors"
        assert reference.read_bytes() == (tmp_path / "run" / "models" / agent / "model.safetensors").read_bytes()


def test_each_agent_has_statistics_of_its_own_and_both_have_rows(finished: Path) -> None:
    learned = [r for r in read_metrics(finished) if r["kind"] == "learn" and r["stage"] == "reinforce"]
    planner = [r for r in learned if r["agent"] == "planner"]
    searcher = [r for r in learned if r["agent"] == "searcher" and "rows" in r]
    assert searcher, "the warm-up teaches too little: nobody delegates"
    assert all("loss" in record and "grad_norm" in record for record in planner)
    assert all("loss" not in record and record["gradient_mass"] >= 0 for record in searcher)
    assert all(record["reward_mean"] != planner[0]["reward_mean"] for record in searcher)


def test_the_losses_of_both_agents_are_added_or_put_over_one_denominator(finished: Path, tmp_path: Path) -> None:
    """By agent, each one's coefficients sum to 1 over its rows; over the weights, those of both together do."""
    from mgrpo.algorithm.alignment import align
    from mgrpo.policy.step import _coefficients
    from mgrpo.session import Session

    _, store = RunFolder(finished).open()
    groups = range(store.committed() - 4, store.committed())
    rows = []
    for agent, d in (("planner", None), ("searcher", 2)):
        shares = store.take(agent, groups.start, len(groups))
        assert shares is not None
        rows += align([s for share in shares for s in share.samples], "weight", d, seed=0, step=0)
    store.close()
    assert len({row.id.agent for row in rows}) == 2
    for denominator, total in (("agent", 2.0), ("weights", 1.0)):
        own = recipe(loss_denominator=denominator)
        with Session(own, tmp_path / denominator, False, Reporter(tmp_path / denominator, own, quiet=True)) as session:
            window = list(session.windows(0))[-1]
            plan = session.step_plan("planner", window)
        found = _coefficients(rows, plan)
        assert sum(c * row.sampled for c, row in zip(found, rows, strict=True)) == pytest.approx(total)


def test_a_frozen_sharer_acts_with_the_newest_weights_and_teaches_nothing(tmp_path: Path) -> None:
    def freeze(made: dict[str, Any]) -> None:
        made["agents"]["searcher"]["trainable"] = False

    config = recipe(freeze)
    train(config, tmp_path / "run", reporter=Reporter(tmp_path / "run", config, quiet=True))
    records = list(read_metrics(tmp_path / "run"))
    assert {record["agent"] for record in records if record["kind"] == "learn"} == {"planner"}
    _, store = RunFolder(tmp_path / "run").open()
    versions = {
        turn.version
        for id in range(store.committed() - 2, store.committed())
        for rollout in store.group(id)[0].rollouts
        for trajectory in rollout.trajectories
        for turn in trajectory.turns
    }
    assert versions == {store.publications("planner")[-2].weights.version}
    store.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"share_weights_with": "plannr"}, "share_weights_with: unknown agent 'plannr' (did you mean 'planner'?)"),
        ({"share_weights_with": "searcher"}, "share_weights_with: 'searcher' has no model of its own"),
        ({"model": {"type": "tiny"}}, "model: give a model folder, a tiny model, or share_weights_with"),
        ({"format": "hermes"}, "format: must be that of 'planner', whose weights it shares"),
        ({"temperature": 0.5}, "temperature: must be that of 'planner', whose weights it shares"),
        ({"engine": {"type": "local", "dtype": "bfloat16"}}, "engine: has no effect, 'planner' serves the weights"),
        ({"learner": {"learning_rate": 1e-2}}, "learner.learning_rate: belongs to the weights of 'planner'"),
    ],
)
def test_what_belongs_to_the_weights_is_said_once(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(lambda made: made["agents"]["searcher"].update(keys))
    assert message in str(caught.value) and "\n" not in str(caught.value)
