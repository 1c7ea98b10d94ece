"""Every preset and option of the objective trains tiny models for real, and moves what it should and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from command_line import version_folder
from safetensors.torch import load_file
from tiny_recipe import REINFORCE, WARM_UP, table, team_of_one, token_reward, train_briefly, warmed_team
from torch import Tensor

from mgrpo.algorithm.shaping import MASKED, truncated
from mgrpo.config import Config, resolve
from mgrpo.config.presets import PRESETS
from mgrpo.policy.update import Policy
from mgrpo.run import RunFolder
from mgrpo.types import Reward, Rollout, TrajectoryId

STEPS, GROUPS, K = 2, 2, 4
STAGE = REINFORCE | {"steps": STEPS, "groups_per_step": GROUPS, "num_generations": K}
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
FROZEN = {"main_only": {"searcher"}, "sub_only": {"planner"}, "flow_grpo": {"searcher"}}

Models = Mapping[str, str]
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def models() -> Models:
    return warmed_team()


def recipe(models: Models, preset: str = "m_grpo", learner: Mapping[str, Any] | None = None, **options: Any) -> Config:
    """Two steps of two questions by a team that has seen demonstrations; its rewards always vary (`token_reward`)."""
    made = team_of_one() if preset == "single_agent" else table()
    for name, agent in made["agents"].items():
        agent["model"] = agent["model"] if preset == "single_agent" else models[name]
        agent.pop("trajectories_per_rollout", None)
    if preset == "matpo":
        del made["agents"]["searcher"]["model"]
    made |= {"preset": preset, "stages": [STAGE], "evaluation": SHORT, "reward": "tiny_recipe:token_reward"}
    for name, own in options.pop("agents", {}).items():
        made["agents"][name] |= own
    return resolve(made | {"learner": {"learning_rate": 1e-3, **(learner or {})}} | options)


def learned(records: Records, agent: str = "planner") -> Records:
    return [record for record in records if record["kind"] == "learn" and record["agent"] == agent]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def is_dull(rollout: Rollout) -> bool:
    """About every other question."""
    return sum(rollout.root.turns[0].context_ids) % 2 == 0


def some_dull(rollout: Rollout, *rest: Any) -> dict[TrajectoryId, Reward]:
    """`token_reward`, but the same for every rollout of a dull question. Usable as `reward`."""
    return equal_reward(rollout) if is_dull(rollout) else token_reward(rollout, *rest)


def equal_reward(rollout: Rollout, *_: Any) -> dict[TrajectoryId, Reward]:
    """Everybody's work is worth the same. Usable as `reward`."""
    return {trajectory.id: Reward(0.5) for trajectory in rollout.trajectories}


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_moves_the_agents_that_it_should_and_no_other(preset: str, models: Models, tmp_path: Path) -> None:
    config, run = recipe(models, preset), tmp_path / "run"
    before = {name: weights(Path(models[name])) for name in models}
    records = train_briefly(config, run)
    _, store = RunFolder(run).open()
    learning = set(config.agents) - FROZEN.get(preset, set())
    owners = learning - {"searcher"} if preset == "matpo" else learning
    assert {p.weights.agent for p in store.publications()} == owners == set(config.learners)
    assert {path.name for path in (run / "weights").iterdir()} == owners
    assert {name: weights(Path(models[name])) for name in models} == before
    for agent in owners:
        assert [p.weights.version for p in store.publications(agent)] == [0, 1, 2]
        assert len({p.weights.checksum for p in store.publications(agent)}) == 3
        assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in learned(records, agent))
    for agent in config.agents:
        own = learned(records, agent)
        assert len(own) == (STEPS if agent in learning else 0)
        assert all(r["rows"] > 0 and r["gradient_mass"] > 0 and r["reward_std"] > 0 for r in own)
    for id in range(STEPS * GROUPS):
        group, rewards = store.group(id)
        assert rewards.keys() == {t.id for rollout in group.rollouts for t in rollout.trajectories}
        assert {t.agent for t in rewards} == set(config.agents)  # those of frozen agents are kept too
        newest = {t.agent: id // GROUPS if config.owner(t.agent) in owners else 0 for t in rewards}
        turns = [(t, turn) for rollout in group.rollouts for t in rollout.trajectories for turn in t.turns]
        assert all(turn.version == newest[t.id.agent] for t, turn in turns)
    store.close()


# ---------------------------------------------------------------- options of the loss


@pytest.fixture(scope="module")
def plain(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    return gradients(models, tmp_path_factory.mktemp("plain"), {})[0]


def gradients(models: Models, folder: Path, learner: Mapping[str, Any], **more: Any) -> tuple[list[Tensor], Records]:
    """The searcher's gradients of two passes over one step, flat and before the clip by norm; and the learn records."""
    stage = STAGE | {"steps": 1, "train": ["searcher"]}
    quick = {"learning_rate": 1e-2, "num_iterations": 2, "max_grad_norm": 1e6}
    config = recipe(models, learner=quick | learner, stages=[stage], **more)
    taken: list[Tensor] = []
    apply = Policy._apply

    def recording(policy: Policy, step: int) -> float:
        taken.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
        return apply(policy, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "_apply", recording)
        records = train_briefly(config, folder / "run")
    return taken, learned(records, "searcher")


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("learner", "metric"),
    [
        ({"policy_loss": "cispo"}, "clip_fraction"),
        ({"policy_loss": "reinforce"}, "approx_kl"),
        ({"clip_ratio_c": 1.05}, "clip_fraction"),
        ({"importance_sampling_level": "sequence"}, "clip_fraction"),
        ({"kl_coef": 0.5}, "kl"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_losses_agree_where_the_policy_is_the_one_that_sampled_and_part_after_an_update(
    learner: dict[str, Any], metric: str, models: Models, plain: list[Tensor], tmp_path: Path
) -> None:
    """At ratio 1 the gradient of each is minus the mean of A grad log pi, and that of the KL term is 0."""
    (first, second), (record,) = gradients(models, tmp_path, learner)
    assert difference(first, plain[0]) < 1e-4
    assert difference(second, plain[1]) > 1e-2
    assert record[metric] > 0


@pytest.mark.parametrize(
    ("learner", "metric", "value"),
    [
        ({"rollout_is": "token"}, "rollout_is_mean", 1.0),
        ({"rollout_is": "sequence", "rollout_is_threshold": 3.0}, "rollout_is_mean", 1.0),
        ({"rollout_rs": "token"}, "rejected_fraction", 0.0),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": [0.9, 1.1]}, "rejected_fraction", 0.0),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_corrections_change_nothing_where_the_engine_is_the_learners_own_code(
    learner: dict[str, Any], metric: str, value: float, models: Models, plain: list[Tensor], tmp_path: Path
) -> None:
    found, (record,) = gradients(models, tmp_path, learner)
    assert record["logprob_abs_diff"] < 1e-5
    assert record[metric] == pytest.approx(value, abs=1e-4)
    assert difference(found[0], plain[0]) < 1e-5
    assert difference(found[1], plain[1]) < 1e-2


def test_a_corrected_first_step_ends_at_the_same_weights(models: Models, tmp_path: Path) -> None:
    ends = []
    for level in ("none", "token"):
        stage = STAGE | {"steps": 1}
        learner = {"rollout_is": level, "learning_rate": 1e-4}
        train_briefly(recipe(models, learner=learner, stages=[stage]), tmp_path / level)
        ends.append([load_file(version_folder(tmp_path / level, a, 1) / "model.safetensors") for a in models])
    for one, other in zip(*ends, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[name], other[name], atol=1e-6, rtol=0.0) for name in one)


@pytest.mark.parametrize(
    "learner",
    [
        {"loss_agg_mode": "rollout-mean"},
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"compare_with": "agent_turn"},
        {"scale_rewards": "none", "whiten_advantages": True},
        {"scale_rewards": "batch", "leave_one_out": True},
        {"entropy_coef": 0.1},
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_other_weights_of_tokens_give_another_gradient(
    learner: dict[str, Any], models: Models, plain: list[Tensor], tmp_path: Path
) -> None:
    (first, _), (record,) = gradients(models, tmp_path, learner)
    assert math.isfinite(record["loss"]) and record["gradient_mass"] > 0
    assert 1e-2 < difference(first, plain[0]) < 100.0


def test_tokens_that_are_all_rejected_move_nothing(models: Models, tmp_path: Path) -> None:
    """Every ratio of an engine that is the learner's own code is 1, outside of [2, 3]."""
    taken, (record,) = gradients(models, tmp_path, {"rollout_rs": "token", "rollout_rs_threshold": [2.0, 3.0]})
    assert record["rejected_fraction"] == 1.0 and "loss" not in record and not taken
    _, store = RunFolder(tmp_path / "run").open()
    first, last = store.publications("searcher")
    assert last.weights.checksum == first.weights.checksum
    assert store.trained("searcher") == GROUPS
    store.close()


def test_an_entropy_bonus_is_all_there_is_where_rewards_are_equal(models: Models, tmp_path: Path) -> None:
    here = "test_objective_trains:equal_reward"
    learner = {"entropy_coef": 1.0, "num_iterations": 4, "learning_rate": 3e-3}
    taken, (record,) = gradients(models, tmp_path / "with", learner, reward=here)
    assert len(taken) == 4
    alone, (before,) = gradients(models, tmp_path / "once", learner | {"num_iterations": 1}, reward=here)
    assert torch.equal(alone[0], taken[0])
    assert record["entropy"] > before["entropy"]  # a mean over four passes over the same rows, against the first


def test_minibatches_and_iterations_are_optimiser_steps(models: Models, tmp_path: Path) -> None:
    learner = {"num_minibatches": 2, "num_iterations": 3, "entropy_coef": 1e-3}
    train_briefly(recipe(models, learner=learner), tmp_path / "run")
    for agent in models:
        state = load_file(version_folder(tmp_path / "run", agent, 2) / "learner.safetensors")
        taken = {int(value) for place, value in state.items() if place.endswith("/step")}
        assert taken == {STEPS * 2 * 3}


# ---------------------------------------------------------------- the reference of a KL term


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_is_to_the_weights_that_reinforcement_began_with(where: str, models: Models, tmp_path: Path) -> None:
    run, warm = tmp_path / "run", WARM_UP | {"steps": 2, "weight_sync_steps": 2}
    learner = {"kl_coef": 0.2, "kl_in": where, "learning_rate": 1e-2}
    records = train_briefly(recipe(models, learner=learner, stages=[warm, STAGE]), run)
    _, store = RunFolder(run).open()
    for agent in models:
        assert weights(run / "reference" / agent) == weights(version_folder(run, agent, 1))
        assert weights(run / "reference" / agent) != weights(Path(models[agent]))
    first, second = (record for record in learned(records) if record["stage"] == "reinforce")
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and second["kl"] > 1e-4
    taught = 2 * WARM_UP["groups_per_step"]
    graded = [store.group(id)[1].items() for id in range(taught, taught + STEPS * GROUPS)]
    raw = [reward.value for rewards in graded for i, reward in rewards if i.agent == "planner"]
    assert fmean(raw[: GROUPS * K]) == pytest.approx(first["reward_mean"], abs=1e-6)
    penalty = fmean(raw[GROUPS * K :]) - second["reward_mean"]  # k3 is never negative
    assert penalty > 1e-3 if where == "reward" else penalty == pytest.approx(0.0)
    store.close()


# ---------------------------------------------------------------- which rewards are compared


def test_questions_whose_rollouts_tie_are_replaced_by_others(models: Models, tmp_path: Path) -> None:
    reward = "test_objective_trains:some_dull"
    records = train_briefly(recipe(models, reward=reward, filter_groups={"enable": True}), tmp_path / "on")
    train_briefly(recipe(models, reward=reward), tmp_path / "off")
    collected = [record for record in records if record["kind"] == "collect"]
    (_, on), (_, off) = (RunFolder(tmp_path / name).open() for name in ("on", "off"))
    ids = range(STEPS * GROUPS)
    dull = [is_dull(off.group(id)[0].rollouts[0]) for id in ids]
    assert any(dull) and not all(dull)
    for id in ids:
        same = on.group(id)[0].task == off.group(id)[0].task
        assert same != dull[id]  # replaced where it was dull, and nowhere else
        assert not is_dull(on.group(id)[0].rollouts[0])
    assert sum(record["replaced_groups"] for record in collected) >= sum(dull)
    assert all(record["dull_groups"] == 0 for record in collected)
    on.close()
    off.close()


def test_replacement_is_bounded_and_what_is_dull_after_it_is_kept(models: Models, tmp_path: Path) -> None:
    """Nobody's answers differ in worth: after two batches, the first one included, they are trained on as they are."""
    dull = {"enable": True, "max_num_gen_batches": 2}
    config = recipe(models, filter_groups=dull, reward="test_objective_trains:equal_reward")
    records = train_briefly(config, tmp_path / "run")
    collected = [record for record in records if record["kind"] == "collect"]
    assert [(r["replaced_groups"], r["dull_groups"]) for r in collected] == [(GROUPS, GROUPS)] * STEPS
    assert all(r["zero_variance_groups"] == GROUPS and "loss" not in r for r in learned(records))
    _, store = RunFolder(tmp_path / "run").open()
    assert store.committed() == STEPS * GROUPS == store.trained("planner")
    store.close()


def test_overlong_turns_are_penalised_beside_what_was_graded(models: Models, tmp_path: Path) -> None:
    agents = {"planner": {"overlong_buffer_len": 10, "overlong_penalty_factor": 0.5}}
    train_briefly(recipe(models, agents=agents), tmp_path / "run")
    _, store = RunFolder(tmp_path / "run").open()
    for id in range(store.committed()):
        group, rewards = store.group(id)
        for rollout in group.rollouts:
            root = rewards[rollout.root.id]
            longest = max(len(turn.token_ids) for turn in rollout.root.turns)
            assert root.parts["overlong"] == pytest.approx(-0.5 * longest / 10)
            assert root.value == pytest.approx(root.parts["remainder"] + root.parts["overlong"])
            assert all("overlong" not in rewards[t.id].parts for t in rollout.trajectories if t.parent is not None)
    store.close()


def test_what_a_limit_cut_off_is_masked_and_leaves_the_rows(models: Models, tmp_path: Path) -> None:
    records = train_briefly(recipe(models, agents={"planner": {"mask_truncated": True}}), tmp_path / "run")
    _, store = RunFolder(tmp_path / "run").open()
    masked = []
    for step in range(STEPS):
        whole = 0
        for id in range(step * GROUPS, (step + 1) * GROUPS):
            group, rewards = store.group(id)
            for trajectory in (t for rollout in group.rollouts for t in rollout.trajectories):
                cut = trajectory.parent is None and truncated(trajectory)
                reward = rewards[trajectory.id]
                assert reward.cause == (MASKED if cut else None) and (reward.value is None) == cut
                assert reward.parts["remainder"] is not None  # what it was graded stays to be seen
                masked += [cut] if trajectory.parent is None else []
                whole += trajectory.parent is None and not cut
        assert learned(records)[step].get("rows", 0) == whole
    assert any(masked) and not all(masked)
    store.close()
