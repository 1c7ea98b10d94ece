"""Recipes: presets, overrides, merged learners, plug-ins by import path, and what goes into a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mgrpo.config import Config, dump, load, resolve
from mgrpo.config.load import apply_override
from mgrpo.config.registry import Factory, load_object, settings
from mgrpo.config.vocabulary import closed_vocabulary
from mgrpo.errors import ConfigError

TINY = {"type": "tiny"}


def recipe(**changes: Any) -> dict[str, Any]:
    """A planner and a sub-agent; ``changes`` replace whole tables."""
    return {
        "agents": {
            "planner": {"role": "planner", "model": TINY, "format": "compact", "tools": ["helper"]},
            "helper": {"role": "subagent", "model": TINY, "format": "compact", "tools": ["search"]},
        },
        "tools": {"search": {"type": "search"}},
        "tasks": {"type": "world"},
        "evaluation": {"tasks": {"split": "test"}},
        "stages": [{"name": "reinforce", "steps": 1, "groups_per_step": 1}],
    } | changes


# ---------------------------------------------------------------- presets and merging


def test_the_preset_is_the_papers_set_up() -> None:
    config = resolve(recipe())
    planner, helper = config.agents["planner"], config.agents["helper"]
    assert (planner.num_generations, planner.reward_weights) == (8, {"format": 0.1, "correct": 0.9})
    assert (helper.trajectories_per_rollout, helper.align) == (8, "weight")
    assert helper.reward_weights == {"format": 0.1, "correct_main": 0.4, "expert": 0.5}


def test_the_recipes_own_words_win_over_the_preset() -> None:
    table = recipe()
    table["agents"]["helper"] |= {"align": "none", "trajectories_per_rollout": 3}
    assert (resolve(table).agents["helper"].align, resolve(table).agents["helper"].trajectories_per_rollout) == (
        "none",
        3,
    )


def test_the_later_learner_table_wins() -> None:
    table = recipe(learner={"learning_rate": 1e-3, "warmup_steps": 1, "weight_decay": 0.1})
    table["agents"]["helper"]["learner"] = {"learning_rate": 2e-3, "warmup_steps": 2}
    table["stages"][0]["learner"] = {"learning_rate": 3e-3}
    config = resolve(table)
    planner, helper = (config.learner_for(name, config.stages[0]) for name in ("planner", "helper"))
    assert (planner.learning_rate, planner.warmup_steps, planner.weight_decay) == (3e-3, 1, 0.1)
    assert (helper.learning_rate, helper.warmup_steps, helper.weight_decay) == (3e-3, 2, 0.1)


def test_a_stage_may_ask_for_another_k_and_fewer_learners() -> None:
    table = recipe()
    table["stages"][0] |= {"num_generations": 3, "train": ["helper"]}
    config = resolve(table)
    assert config.num_generations(config.stages[0]) == 3
    assert config.trained(config.stages[0]) == ("helper",)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve(recipe()).seed = 3  # type: ignore[misc]


# ---------------------------------------------------------------- dump and overrides


def test_a_dump_reads_back_to_the_same_config(tmp_path: Path) -> None:
    config = resolve(recipe(seed=4, reward="json:dumps"))
    (tmp_path / "a.toml").write_text(dump(config))
    assert load(tmp_path / "a.toml") == config
    assert dump(load(tmp_path / "a.toml")) == dump(config)


def test_overrides_reach_tables_lists_and_new_keys(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(dump(resolve(recipe())))
    changes = ["stages.0.steps=7", "learner.learning_rate=1e-4", "agents.helper.align=none", 'tasks.split="dev"']
    config = load(tmp_path / "a.toml", [*changes, "threads=2"])
    assert (config.stages[0].steps, config.learner.learning_rate, config.threads) == (7, 1e-4, 2)
    assert (config.agents["helper"].align, config.tasks["split"]) == ("none", "dev")


@given(
    st.recursive(st.integers(-(2**60), 2**60) | st.booleans() | st.text("ab c=.[", max_size=5), st.lists, max_leaves=4)
)
def test_an_override_in_toml_is_taken_as_it_is(value: Any) -> None:
    table: dict[str, Any] = {}
    apply_override(table, f"a.b={json.dumps(value)}")  # numbers, truth, plain strings and lists are the same in TOML
    assert table == {"a": {"b": value}}


@given(st.text(max_size=20))
def test_any_override_is_applied_or_refused_by_name(text: str) -> None:
    try:
        apply_override({"a": {"b": [1]}, "agents": {}}, text)
    except ConfigError as error:
        assert str(error).startswith("--set ")


# ---------------------------------------------------------------- prompts


def test_a_prompt_file_becomes_part_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("planner.md").write_text("Delegate .\n")
    table = recipe()
    table["agents"]["planner"]["prompt"] = "planner.md"
    table["agents"]["helper"]["prompt"] = "Read notes.md"  # not a path: it has a space
    config = resolve(table)
    assert [agent.prompt for agent in config.agents.values()] == ["Delegate .", "Read notes.md"]
    Path("planner.md").unlink()
    with pytest.raises(ConfigError, match=r"agents.planner.prompt: planner.md: No such file"):
        resolve(table)


# ---------------------------------------------------------------- plug-ins by import path


class Own(BaseModel, extra="forbid"):
    size: int = 1

    def build(self, **_: Any) -> int:
        return self.size


def make(size: int, seed: int = -1) -> tuple[int, int]:
    return size, seed


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_parts", sys.modules[__name__])


def test_a_settings_model_of_ones_own() -> None:
    assert settings("tool", {"type": "own_parts:Own", "size": 3}, "tools.x").build() == 3
    with pytest.raises(ConfigError, match=r"^tools.x.siz: unknown key \(did you mean 'size'\?\)$"):
        settings("tool", {"type": "own_parts:Own", "siz": 3}, "tools.x")


def test_a_function_gets_its_table_and_what_it_names_of_what_is_offered() -> None:
    plan = settings("tasks", {"type": "own_parts:make", "size": 3}, "tasks")
    assert isinstance(plan, Factory)
    assert plan.build(seed=7, folder="unused") == (3, 7)
    fixed = settings("tasks", {"type": "own_parts:make", "size": 3, "seed": 1}, "tasks")
    assert fixed.build(seed=7) == (3, 1)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"type": "own_parts:make", "size": 1, "sise": 2}, "tasks.sise: own_parts:make has no such parameter"),
        ({"type": "own_parts:make"}, "tasks.size: missing; own_parts:make needs it"),
        ({"type": "own_parts:mak", "size": 1}, "tasks.type: own_parts holds no 'mak' \\(did you mean 'make'\\?\\)"),
        ({"type": "own_parts:TINY"}, "tasks.type: own_parts:TINY is not callable"),
        ({"type": ":make"}, "tasks.type: cannot import ':make'"),
        ({"type": 3}, "tasks.type: must be text, got 3"),
        ({}, "tasks.type: missing; choose one of world, jsonl"),
    ],
)
def test_what_does_not_fit_is_refused_at_load(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        settings("tasks", table, "tasks")


def test_a_bug_in_a_users_module_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "buggy_parts.py").write_text("None.attribute\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError):
        load_object("buggy_parts:Anything", "tools.x.type")


# ---------------------------------------------------------------- refused combinations and words


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"agents.helper.trainable": False, "agents.helper.learner": {"weight_decay": 0.1}},
            "helper.learner: has no eff",
        ),
        ({"agents.helper.engine": {"type": "scripted", "path": "x"}}, "helper.engine: a script cannot learn"),
        ({"evaluation.every": 5}, "evaluation.dev_tasks: missing"),
        ({"agents.planner.trainable": False, "agents.helper.trainable": False}, "stages.0: no agent learns in it"),
    ],
)
def test_combinations_without_effect_are_refused(changes: dict[str, Any], says: str) -> None:
    table = recipe()
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = table
        for part in parents:
            place = place[part]
        place[last] = value
    with pytest.raises(ConfigError, match=says):
        resolve(table)


def test_the_closed_vocabulary_has_the_words_of_agents_tools_and_prompts() -> None:
    table = recipe()
    table["agents"]["planner"]["prompt"] = "Zounds, helper!"
    config: Config = resolve(table)
    words = closed_vocabulary(config)
    assert {"Zounds", ",", "!", "helper", "search", "capital"} <= set(words) and words == sorted(set(words))


def test_free_text_has_no_closed_vocabulary() -> None:
    with pytest.raises(ConfigError, match="closed vocabulary"):
        closed_vocabulary(resolve(recipe(tasks={"type": "world", "style": "prose"})))
    with pytest.raises(ConfigError, match="tasks.type: own_parts:make has no closed vocabulary"):
        closed_vocabulary(
            resolve(recipe(tasks={"type": "own_parts:make", "size": 1}, evaluation={"tasks": {"size": 2}}))
        )


def test_a_task_files_words_are_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Who won ?", "answer": "Mira"}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "Who lost ?", "answer": "Tarn"}\n')
    (tmp_path / "pages.jsonl").write_text('{"url": "p9", "title": "Match", "text": "Mira beat Tarn ."}\n')
    tasks = {"type": "jsonl", "path": str(tmp_path / "a.jsonl"), "corpus": str(tmp_path / "pages.jsonl")}
    words = closed_vocabulary(resolve(recipe(tasks=tasks, evaluation={"tasks": {"path": str(tmp_path / "b.jsonl")}})))
    assert {"Who", "won", "lost", "Mira", "Tarn", "p9", "Match", "beat", "?", "no", "page"} <= set(words)
