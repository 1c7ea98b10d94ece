"""Agents of one model, told apart by their prompts: one set of weights, one engine, one learner, statistics apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from command_line import mgrpo, version_folder
from tiny_recipe import REINFORCE, WARM_UP, table, train_briefly

from mgrpo.config import Config, resolve
from mgrpo.errors import ConfigError
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.store.sql import SqlStore
from mgrpo.team import Team
from mgrpo.train import train

STEPS, GROUPS, K, D = 2, 2, 4, 2
WARM = WARM_UP | {
    "steps": 40,
    "weight_sync_steps": 20,
    "groups_per_step": 8,
    "tasks": {"tasks_per_world": 8},
    "learner": {"optimizer": "muon", "learning_rate": 1e-2},
}
STAGE = REINFORCE | {"steps": STEPS, "groups_per_step": GROUPS, "num_generations": K}
TAUGHT = 40 * 8  # groups of demonstrations
Change = Callable[[dict[str, Any]], None]


def recipe(change: Change = lambda made: None, **options: Any) -> Config:
    made = table(
        stages=[WARM, STAGE],
        evaluation={"questions": 2, "tasks": {"split": "test"}, "examples": 0},
        reward="tiny_recipe:token_reward",
    )
    del made["agents"]["searcher"]["model"]
    made["agents"]["searcher"] |= {"share_weights_with": "planner", "trajectories_per_rollout": D}
    made |= options
    change(made)
    return resolve(made)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("shared") / "run", recipe()
    train(config, folder, reporter=Reporter(folder, config, quiet=True))
    return folder


@pytest.fixture(scope="module")
def model(finished: Path) -> Path:
    """What demonstrations made of the one model; it plays both parts."""
    taught = version_folder(finished, "planner", 2) / "model.safetensors"
    folder = finished.parent / "taught"
    assert mgrpo("export", finished, "planner", folder).code == 0
    (folder / "model.safetensors").write_bytes(taught.read_bytes())
    return folder


def reinforced(model: Path, folder: Path, change: Change = lambda made: None, **learner: Any) -> list[dict[str, Any]]:
    """Records of a run that begins with reinforcement."""

    def begin(made: dict[str, Any]) -> None:
        made["agents"]["planner"]["model"] = str(model)
        change(made)

    rates = {"learning_rate": 1e-3, **learner}
    return train_briefly(recipe(begin, stages=[STAGE | {"learner": rates}]), folder)


def versions(folder: Path) -> list[str]:
    """Checksums of the weights of each publication."""
    _, store = RunFolder(folder).open()
    found = [publication.weights.checksum for publication in store.publications()]
    store.close()
    return found


def test_one_set_of_weights_is_published_and_served_to_both(finished: Path) -> None:
    config, store = RunFolder(finished).open()
    assert config.learners == ("planner",)
    assert {p.weights.agent for p in store.publications()} == {"planner"}
    assert [p.weights.version for p in store.publications()] == [0, 1, 2, 3, 4]
    assert [path.name for path in (finished / "weights").iterdir()] == ["planner"]
    assert [path.name for path in (finished / "models").iterdir()] == ["planner"]
    groups = [store.group(TAUGHT + step * GROUPS)[0] for step in range(STEPS)]
    for group, version in zip(groups, (2, 3), strict=True):
        turns = [turn for rollout in group.rollouts for t in rollout.trajectories for turn in t.turns]
        assert {turn.version for turn in turns} == {version}
    store.close()


def test_such_a_team_is_asked_and_evaluated_with_one_engine(finished: Path, tmp_path: Path) -> None:
    with Team.load(finished) as team:
        assert team.engines["planner"] is team.engines["searcher"]
        question = team.questions().task(0).question
        assert {turn.version for turn in team.ask(question).root.turns} == {4}
    assert mgrpo("evaluate", finished, "--questions", "2", "--json", tmp_path / "scores.json").code == 0
    assert json.loads((tmp_path / "scores.json").read_text())


def test_either_agent_exports_the_weights(finished: Path, tmp_path: Path) -> None:
    for agent in ("planner", "searcher"):
        assert mgrpo("export", finished, agent, tmp_path / agent).code == 0
    one, other = ((tmp_path / agent / "model.safetensors").read_bytes() for agent in ("planner", "searcher"))
    assert one == other == (version_folder(finished, "planner", 4) / "model.safetensors").read_bytes()


def test_a_stage_may_leave_one_out_and_compare_with_the_weights_it_had(tmp_path: Path) -> None:
    """A searcher that joins in the second stage of reinforcement is compared with what it was before."""
    first = REINFORCE | {"name": "first", "steps": 1, "train": ["planner"]}
    second = REINFORCE | {"name": "second", "steps": 1, "learner": {"kl_coef": 0.1}}
    evaluation = {"questions": 1, "tasks": {"split": "test"}, "examples": 0}
    config = resolve(table(stages=[first, second], evaluation=evaluation, reward="tiny_recipe:token_reward"))
    train_briefly(config, tmp_path / "run")
    for agent in config.agents:
        reference = tmp_path / "run" / "reference" / agent / "model.safetensors"
        assert reference.read_bytes() == (tmp_path / "run" / "models" / agent / "model.safetensors").read_bytes()


def test_each_agent_has_statistics_of_its_own_and_both_have_rows(finished: Path) -> None:
    learned = [r for r in read_metrics(finished) if r["kind"] == "learn" and r["stage"] == "reinforce"]
    _, store = RunFolder(finished).open()
    for agent in ("planner", "searcher"):
        own = [record for record in learned if record["agent"] == agent]
        assert len(own) == STEPS
        for step, record in enumerate(own):
            shares = store.take(agent, TAUGHT + step * GROUPS, GROUPS)
            assert shares is not None
            samples = [sample for share in shares for sample in share.samples]
            assert {sample.trajectory.id.agent for sample in samples} == {agent}
            assert all(sorted(share.roots) == list(range(K)) for share in shares)
            assert record["rows"] == len(samples) > 0
            assert record["gradient_mass"] > 0
            assert ("loss" in record and "grad_norm" in record) == (agent == "planner")
            if agent == "planner":  # whose rows all weigh 1
                assert record["reward_mean"] == pytest.approx(fmean(sample.reward.value for sample in samples))
    store.close()


# ---------------------------------------------------------------- the loss


def by_hand(folder: Path) -> dict[str, tuple[float, float]]:
    """Of the first step, from what is stored: by agent, - sum of w A mean(log pi) over its rows, and sum of w."""
    _, store = RunFolder(folder).open()
    found = {}
    for agent in ("planner", "searcher"):
        pull = weight = 0.0
        for id in range(GROUPS):
            group, rewards = store.group(id)
            rows = []
            for rollout in group.rollouts:
                own = [t for t in rollout.trajectories if t.id.agent == agent]
                aligned = 1.0 if agent == "planner" else D / max(len(own), 1)
                rows += [(aligned, rewards[t.id].value, t) for t in own]
            total = sum(w for w, _, _ in rows)
            mean = sum(w * r for w, r, _ in rows) / total
            deviation = (sum(w * (r - mean) ** 2 for w, r, _ in rows) / total) ** 0.5
            for w, r, trajectory in rows:
                logprobs = [value for turn in trajectory.turns for value in turn.logprobs]
                pull -= w * (r - mean) / deviation * fmean(logprobs)
            weight += total
        found[agent] = pull, weight
    store.close()
    return found


def freeze(made: dict[str, Any]) -> None:
    made["agents"]["searcher"]["trainable"] = False


def test_the_losses_of_both_agents_are_added_or_put_over_one_denominator(model: Path, tmp_path: Path) -> None:
    """- A log pi, unlike a ratio's loss, is not 0 at the weights that sampled: its value tells the denominators."""
    losses = {}
    for denominator in ("agent", "weights"):
        records = reinforced(model, tmp_path / denominator, policy_loss="reinforce", loss_denominator=denominator)
        losses[denominator] = next(r["loss"] for r in records if r["kind"] == "learn" and "loss" in r)
    records = reinforced(model, tmp_path / "alone", freeze, policy_loss="reinforce")
    losses["alone"] = next(r["loss"] for r in records if r["kind"] == "learn")
    (planner, n), (searcher, m) = by_hand(tmp_path / "agent").values()
    assert losses["agent"] == pytest.approx(planner / n + searcher / m, abs=1e-6)
    assert losses["weights"] == pytest.approx((planner + searcher) / (n + m), abs=1e-6)
    assert losses["alone"] == pytest.approx(planner / n, abs=1e-6)
    assert min(abs(losses["agent"] - losses[other]) for other in ("weights", "alone")) > 1e-3
    first = {versions(tmp_path / name)[1] for name in losses}
    assert len(first) == 3  # both agents' rows move the weights, and the denominator matters


def test_a_frozen_sharer_acts_with_the_newest_weights_and_teaches_nothing(model: Path, tmp_path: Path) -> None:
    records = reinforced(model, tmp_path / "run", freeze)
    assert {record["agent"] for record in records if record["kind"] == "learn"} == {"planner"}
    _, store = RunFolder(tmp_path / "run").open()
    for id in range(STEPS * GROUPS):
        trajectories = [t for rollout in store.group(id)[0].rollouts for t in rollout.trajectories]
        assert {t.id.agent for t in trajectories} == {"planner", "searcher"}
        assert {turn.version for t in trajectories for turn in t.turns} == {id // GROUPS}
    store.close()


def test_a_run_that_broke_off_ends_like_one_that_did_not(model: Path, tmp_path: Path) -> None:
    reinforced(model, tmp_path / "whole", kl_coef=0.1)
    publish = SqlStore.publish
    calls = 0

    def broken(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # the last step is computed and saved, but not published
            raise RuntimeError("the disk is gone")
        publish(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqlStore, "publish", broken)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            reinforced(model, tmp_path / "broken", kl_coef=0.1)
    assert versions(tmp_path / "broken") == versions(tmp_path / "whole")[:-1]
    config, store = RunFolder(tmp_path / "broken").open()
    store.close()
    train_briefly(config, tmp_path / "broken", resume=True)
    assert versions(tmp_path / "broken") == versions(tmp_path / "whole")


# ---------------------------------------------------------------- recipes


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
        ({"learner": {"kl_coef": 0.1}}, "learner.kl_coef: belongs to the weights of 'planner'"),
    ],
)
def test_what_belongs_to_the_weights_is_said_once(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(lambda made: made["agents"]["searcher"].update(keys))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_owner_is_named_and_not_another_that_shares(tmp_path: Path) -> None:
    def chain(made: dict[str, Any]) -> None:
        made["agents"]["reader"] = made["agents"]["searcher"] | {"share_weights_with": "searcher"}
        made["agents"]["planner"]["tools"] = ["searcher", "reader"]

    with pytest.raises(ConfigError) as caught:
        recipe(chain)
    message = "agents.reader.share_weights_with: 'searcher' has no model of its own; name the owner"
    assert str(caught.value) == message
