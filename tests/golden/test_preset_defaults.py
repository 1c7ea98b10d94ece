"""Presets beside their numbers: who learns and with whose weights, and that a recipe's own words come first."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from one_question import QUESTION, Attempt, Call, alone, recipe, stage_of, tokens_of
from tiny_recipe import table

from mgrpo.config import Config, dump, load, resolve
from mgrpo.config.presets import PRESETS
from mgrpo.errors import ConfigError
from mgrpo.types import TrajectoryId

H = 0.75**0.5  # the planner's advantages on the question are +-H


@pytest.mark.parametrize("name", PRESETS)
def test_agents_learn_as_the_preset_says(name: str) -> None:
    config = resolve(recipe(name))
    expected = {"sub_only": ("searcher",)} | dict.fromkeys(("main_only", "single_agent", "flow_grpo"), ("planner",))
    assert config.trained(stage_of(config)) == expected.get(name, ("planner", "searcher"))
    assert config.learners == (("planner",) if name == "matpo" else config.trained(stage_of(config)))


def test_matpo_is_one_model_whose_workers_inherit() -> None:
    config = resolve(recipe("matpo"))
    assert config.owner("searcher") == "planner" and config.agents["searcher"].model is None
    compared = [config.learner_for(name, stage_of(config)).compare_with for name in ("planner", "searcher")]
    assert compared == ["agent", "parent"]


def test_matpo_with_a_model_for_the_worker_is_two_models() -> None:
    """They inherit still; what changes is whose tokens share a denominator: 20 of the planner's, 10 of the worker's."""
    own = recipe("matpo")
    own["agents"]["searcher"]["model"] = own["agents"]["planner"]["model"]
    config = resolve(own)
    assert config.learners == ("planner", "searcher")
    found = tokens_of(config, QUESTION)
    assert {(id.agent, round(t.coefficient, 6)) for id, own in found.items() for t in own} == {
        ("planner", 0.05),
        ("searcher", 0.1),
    }
    assert found[TrajectoryId(0, 3, "searcher", 0)][0].advantage == pytest.approx(H)


def test_a_worker_that_was_cut_off_leaves_also_where_it_would_inherit() -> None:
    """mask_truncated: of rollout 0's call nothing is trained, whatever its root was worth; the others inherit."""
    own = recipe("matpo")
    own["agents"]["searcher"]["mask_truncated"] = True
    cut = Attempt(True, (1, 1), (Call(0.6, (3, 1), cut=True),))
    assert of_workers(own, (cut, *QUESTION[1:])) == pytest.approx({(1, 0): -H, (1, 1): -H, (3, 0): H}, abs=1e-6)


def test_a_worker_whose_expert_was_out_inherits_all_the_same() -> None:
    """Its own reward is unknown, but it is the root's that counts."""
    own = recipe("matpo")
    own["agents"]["searcher"]["reward_weights"] = {"format": 0.0, "correct_main": 0.0, "expert": 1.0}
    ungraded = Attempt(True, (1, 1), (Call(None, (3, 1)),))
    found = of_workers(own, (ungraded, *QUESTION[1:]))
    assert found == pytest.approx({(0, 0): H, (1, 0): -H, (1, 1): -H, (3, 0): H}, abs=1e-6)


def of_workers(own: dict[str, Any], attempts: Sequence[Attempt]) -> dict[tuple[int, int], float]:
    """The advantage of every call's first token, by (rollout, invocation)."""
    found = tokens_of(resolve(own), attempts)
    assert len([id for id in found if id.agent == "planner"]) == 4
    return {(id.rollout, id.invocation): own[0].advantage for id, own in found.items() if id.agent == "searcher"}


def test_shaping_a_reward_that_nobody_reads_is_refused() -> None:
    """A worker that inherits is not compared by its own reward, so a penalty on it has no effect."""
    own = recipe("matpo")
    own["agents"]["searcher"]["overlong_buffer_len"] = 2
    with pytest.raises(ConfigError, match=r"agents\.searcher\.overlong_buffer_len: has no effect"):
        resolve(own)


def test_agents_that_share_weights_can_be_one_group() -> None:
    """compare_with = "query": the planner's 1, .1, .1, 1 and the calls' 1, 0, .1, 1 have mean 4.3 / 8 = .5375 and the
    sum of squares 4 (.4625)^2 + 3 (.4375)^2 + (.5375)^2 = 1.71875, over 7."""
    shared = recipe("matpo", learner={"compare_with": "query"})
    found = tokens_of(resolve(shared), QUESTION)
    sigma = (1.71875 / 7) ** 0.5
    right, wrong, invalid = 0.4625 / sigma, -0.4375 / sigma, -0.5375 / sigma
    expected = {"planner": [right, wrong, wrong, right], "searcher": [right, invalid, wrong, right]}
    for agent, values in expected.items():
        ids = sorted(id for id in found if id.agent == agent)
        assert [found[id][0].advantage for id in ids] == pytest.approx(values, abs=1e-6)
    counted = [token.coefficient for own in found.values() for token in own]
    assert counted == pytest.approx([1 / 30] * 30, abs=1e-6)


def test_a_single_agent_is_a_team_of_one() -> None:
    """The same recipe under m_grpo: the same configuration but for the preset's name, and the same tokens."""
    one = resolve(recipe("single_agent"))
    team = resolve(recipe("single_agent") | {"preset": "m_grpo"})
    assert one.model_copy(update={"preset": "m_grpo"}) == team
    assert tokens_of(one, alone(QUESTION)) == tokens_of(team, alone(QUESTION))


def test_a_single_agent_has_no_sub_agents() -> None:
    with pytest.raises(ConfigError, match=r"agents\.searcher: this preset has one agent"):
        resolve(table(preset="single_agent"))


# ---------------------------------------------------------------- a preset is only defaults


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_applied_to_its_own_result_changes_nothing(name: str, tmp_path: Path) -> None:
    config = resolve(recipe(name))
    written = tmp_path / "recipe.toml"
    written.write_text(dump(config))
    assert load(written) == config
    assert resolve(tomllib.loads(dump(load(written)))) == config


def of_planner(config: Config) -> Any:
    return config.learner_for("planner", stage_of(config))


OWN_WORDS: list[tuple[str, str, Any, Callable[[Config], Any]]] = [
    ("grpo", "learner.kl_coef", 0.1, lambda config: of_planner(config).kl_coef),
    ("dr_grpo", "agents.planner.learner.scale_rewards", "group", lambda config: of_planner(config).scale_rewards),
    ("gspo", "agents.planner.learner.clip_ratio_low", 0.1, lambda config: of_planner(config).clip_ratio_low),
    ("dapo", "agents.planner.max_tokens_per_turn", 25, lambda config: config.agents["planner"].overlong_buffer_len * 5),
    ("dapo", "agents.planner.overlong_buffer_len", 0, lambda config: config.agents["planner"].overlong_buffer_len),
    ("dapo", "filter_groups.metric", "correct", lambda config: config.filter_groups.metric),
    ("dapo", "filter_groups.enable", False, lambda config: config.filter_groups.enable),
    ("main_only", "agents.searcher.trainable", True, lambda config: config.agents["searcher"].trainable),
    ("dr_mas", "learner.compare_with", "agent", lambda config: of_planner(config).compare_with),
    (
        "matpo",
        "learner.compare_with",
        "query",
        lambda config: config.learner_for("searcher", stage_of(config)).compare_with,
    ),
    (
        "matpo",
        "agents.searcher.learner.compare_with",
        "agent",
        lambda config: config.learner_for("searcher", stage_of(config)).compare_with,
    ),
    (
        "m_grpo",
        "agents.searcher.reward_weights",
        {"format": 1.0, "correct_main": 0.0, "expert": 0.0},
        lambda config: config.agents["searcher"].reward_weights,
    ),
]


@pytest.mark.parametrize(("name", "key", "value", "read"), OWN_WORDS, ids=[f"{n} {k}" for n, k, _, _ in OWN_WORDS])
def test_the_recipes_own_words_win(name: str, key: str, value: Any, read: Callable[[Config], Any]) -> None:
    own = recipe(name)
    assert read(resolve(own)) != value
    place: Any = own
    *parents, last = key.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    assert read(resolve(own)) == value
