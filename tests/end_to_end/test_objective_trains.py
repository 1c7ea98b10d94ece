"""Every preset and option of the objective trains tiny models for real, and moves what it should and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import REINFORCE, table, team_of_one

from mgrpo.config import Config, resolve
from mgrpo.config.presets import PRESETS
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.train import train

STEPS = 2
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}


def recipe(preset: str = "m_grpo", learner: dict[str, Any] | None = None, **options: Any) -> Config:
    """Two steps of two questions; an untrained team, whose rewards vary all the same (`token_reward`)."""
    made = team_of_one() if preset == "single_agent" else table()
    for name, agent in made["agents"].items():
        agent.pop("trajectories_per_rollout", None)
        if name == "searcher" and preset == "matpo":
            del agent["model"]
    stage = REINFORCE | {"steps": STEPS, "num_generations": 4}
    made |= {"preset": preset, "stages": [stage], "evaluation": SHORT, "reward": "tiny_recipe:token_reward"}
    return resolve(made | {"learner": {"learning_rate": 1e-3} | (learner or {})} | options)


def run(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Train, and return the learn records of the planner (or whoever learns first)."""
    train(config, folder, reporter=Reporter(folder, config, quiet=True))
    return list(read_metrics(folder))


def learned(records: list[dict[str, Any]], agent: str = "planner") -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "learn" and record["agent"] == agent]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_the_agents_that_it_should(preset: str, tmp_path: Path) -> None:
    config = recipe(preset)
    records = run(tmp_path / "run", config)
    _, store = RunFolder(tmp_path / "run").open()
    moving = {"sub_only": {"searcher"}, "main_only": {"planner"}, "flow_grpo": {"planner"}, "matpo": {"planner"}}
    owners = moving.get(preset, set(config.agents))
    assert {p.weights.agent for p in store.publications()} == owners == set(config.learners)
    if "planner" in owners:
        assert [p.weights.version for p in store.publications("planner")] == [0, 1, 2]
        for record in learned(records):
            assert abs(record["loss"]) < 100 and record["grad_norm"] > 0 and record["gradient_mass"] > 0
    group, rewards = store.group(0)
    assert all(t.id in rewards for rollout in group.rollouts for t in rollout.trajectories)
    store.close()


@pytest.mark.parametrize(
    ("learner", "metric"),
    [
        ({"policy_loss": "cispo"}, "clip_fraction"),
        ({"policy_loss": "reinforce"}, "approx_kl"),
        ({"clip_ratio_c": 3.0}, "clip_fraction"),
        ({"importance_sampling_level": "sequence"}, "clip_fraction"),
        ({"entropy_coef": 0.01}, "entropy"),
        ({"rollout_is": "token"}, "rollout_is_mean"),
        ({"rollout_is": "sequence", "rollout_is_threshold": 3.0}, "rollout_is_mean"),
        ({"rollout_rs": "token"}, "rejected_fraction"),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": [0.1, 10.0]}, "rejected_fraction"),
        ({"loss_agg_mode": "rollout-mean"}, "loss"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 20.0}, "loss"),
        ({"scale_rewards": "none", "whiten_advantages": True}, "loss"),
        ({"scale_rewards": "batch", "leave_one_out": True, "std_unbiased": True}, "loss"),
    ],
)
def test_an_option_trains_and_is_accounted_for(learner: dict[str, Any], metric: str, tmp_path: Path) -> None:
    records = learned(run(tmp_path / "run", recipe(learner=learner)))
    assert len(records) == STEPS
    assert all(math.isfinite(record[metric]) and record["grad_norm"] > 0 for record in records)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_is_to_the_weights_that_reinforcement_began_with(where: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    records = learned(run(folder, recipe(learner={"kl_coef": 0.1, "kl_in": where, "learning_rate": 1e-2})))
    reference = (folder / "reference" / "planner" / "model.safetensors").read_bytes()
    assert reference == (folder / "weights" / "planner" / "v0" / "model.safetensors").read_bytes()
    if where == "loss":
        assert records[0]["kl"] == pytest.approx(0.0, abs=1e-6)
        assert records[1]["kl"] > 1e-4


def test_minibatches_and_iterations_are_optimiser_steps(tmp_path: Path) -> None:
    import torch

    learner = {"num_minibatches": 2, "num_iterations": 3, "optimizer": "adamw", "entropy_coef": 1e-3}
    run(tmp_path / "run", recipe(learner=learner))
    state = torch.load(tmp_path / "run" / "weights" / "planner" / "v2" / "learner.pt", weights_only=True)
    taken = {int(own["step"]) for own in state["optimizers"][0]["state"].values()}
    assert taken == {STEPS * 2 * 3}


def test_importance_weights_are_one_for_the_learners_own_code(tmp_path: Path) -> None:
    """The first step from the same weights is the same step, corrected or not."""
    plain, corrected = recipe(), recipe(learner={"rollout_is": "token"})
    for name, config in (("plain", plain), ("corrected", corrected)):
        records = learned(run(tmp_path / name, config))
        assert records[0]["logprob_abs_diff"] < 1e-5
        if name == "corrected":
            assert records[0]["rollout_is_mean"] == pytest.approx(1.0, abs=1e-5)
    one, other = (list(read_metrics(tmp_path / name)) for name in ("plain", "corrected"))
    assert learned(one)[0]["grad_norm"] == pytest.approx(learned(other)[0]["grad_norm"], rel=1e-4)


def test_dull_questions_are_replaced_a_bounded_number_of_times(tmp_path: Path) -> None:
    """An untrained team is always wrong: every question is dull, and after two batches it is trained on as it is."""
    config = recipe(filter_groups={"enable": True, "max_num_gen_batches": 2}, reward=None)
    records = [record for record in run(tmp_path / "run", config) if record["kind"] == "collect"]
    assert [(record["replaced_groups"], record["dull_groups"]) for record in records] == [(2.0, 2.0)] * STEPS
    _, store = RunFolder(tmp_path / "run").open()
    assert store.committed() == STEPS * 2 == store.trained("planner")
    store.close()


def test_shaping_and_masks_are_stored_beside_what_was_graded(tmp_path: Path) -> None:
    made = table()["agents"]
    made["planner"] |= {"overlong_buffer_len": 10, "overlong_penalty_factor": 0.5}
    made["searcher"] |= {"mask_truncated": True}
    run(tmp_path / "run", recipe(agents=made))
    _, store = RunFolder(tmp_path / "run").open()
    for id in range(store.committed()):
        group, rewards = store.group(id)
        for rollout in group.rollouts:
            root = rewards[rollout.root.id]
            longest = max(len(turn.token_ids) for turn in rollout.root.turns)
            assert root.parts["overlong"] == pytest.approx(-0.5 * longest / 10)
            assert root.value == pytest.approx(root.parts["remainder"] + root.parts["overlong"])
    store.close()
