"""Recipes: presets, overrides, merged learners, plug-ins by import path, and what goes into a run folder."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mgrpo.config import Config, dump, load, resolve, settled
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
    table["agents"]["helper"] |= {"align": "resample", "trajectories_per_rollout": 3}
    helper = resolve(table).agents["helper"]
    assert (helper.align, helper.trajectories_per_rollout) == ("resample", 3)


def test_without_alignment_there_is_no_target_of_it() -> None:
    table = recipe()
    table["agents"]["helper"]["align"] = "none"
    config = resolve(table)
    assert config.agents["helper"].trajectories_per_rollout is None
    assert resolve(tomllib.loads(dump(config))) == config


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
    changes = ["stages.0.steps=7", "learner.learning_rate=1e-4", "agents.helper.align=resample", 'tasks.split="dev"']
    config = load(tmp_path / "a.toml", [*changes, "threads=2"])
    assert (config.stages[0].steps, config.learner.learning_rate, config.threads) == (7, 1e-4, 2)
    assert (config.agents["helper"].align, config.tasks["split"]) == ("resample", "dev")


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
        ({"stages.0.name": ""}, "stages.0.name: must have at least 1 character"),
        ({"stages.0.num_generations": 1}, "stages.0.num_generations: one rollout has none to be compared with"),
        ({"agents.planner.num_generations": 1}, "stages.0.num_generations: one rollout"),
        (
            {"agents.helper.align": "none", "agents.helper.trajectories_per_rollout": 3},
            "rollout: has no effect with al",
        ),
        ({"learner": {"min_lr_ratio": 0.1}}, "^learner.min_lr_ratio: has no effect with lr_scheduler = 'constant'"),
        ({"stages.0.learner": {"min_lr_ratio": 0.1}}, "^stages.0.learner.min_lr_ratio: has no effect"),
        ({"agents.helper.learner": {"min_lr_ratio": 0.1}}, "^agents.helper.learner.min_lr_ratio: has no effect"),
        (
            {"evaluation.tasks": {"countries": 9}},
            "evaluation.tasks: stage 0 trains on these questions .split = 'train'",
        ),
        ({"evaluation.dev_tasks": {"split": "train"}}, "evaluation.dev_tasks: stage 0 trains on these questions"),
        (
            {"tasks": {"type": "jsonl", "path": "a"}, "evaluation.tasks": {"path": "b"}},
            "^tasks.corpus: missing; tool 'search' reads pages",
        ),
        ({"stages.0.tasks": {"type": "jsonl", "path": "a"}}, "^stages.0.tasks.corpus: missing; tool 'search'"),
        ({"evaluation.tasks": {"type": "jsonl", "path": "a"}}, "^evaluation.tasks.corpus: missing; tool 'search'"),
        (
            {"tasks": {"type": "jsonl", "path": "x/../a", "corpus": "c"}, "evaluation.tasks": {"path": "a"}},
            "evaluation.tasks: stage 0 trains on these questions .path = 'a'",
        ),
        (
            {"stages.0.train": ["planner"], "agents.helper.learner": {"weight_decay": 0.1}},
            "agents.helper.learner: has no effect",
        ),
    ],
)
def test_combinations_without_effect_are_refused(changes: dict[str, Any], says: str) -> None:
    table = recipe()
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = table
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        place[last] = value
    with pytest.raises(ConfigError, match=says):
        resolve(table)


TAUGHT = {"name": "taught", "steps": 1, "groups_per_step": 1, "collect": "teacher"}
READS = {"search": {"type": "search"}, "visit": {"type": "visit"}}


def taught(**changes: Any) -> dict[str, Any]:
    """A recipe whose first stage is the teacher's and fits it."""
    table = recipe(tools=READS, **changes)
    table["agents"]["helper"]["tools"] = ["search", "visit"]
    table["stages"].insert(0, TAUGHT)
    return table


def test_a_teacher_needs_agents_that_can_do_what_it_does() -> None:
    resolve(taught())
    table = taught()
    table["agents"]["helper"]["tools"] = ["search"]
    table["agents"]["planner"]["tools"].append("visit")
    with pytest.raises(ConfigError, match="helper.tools: the teacher of stage 'taught' acts for it and calls visit;"):
        resolve(table)
    table = taught()
    table["agents"]["middle"] = table["agents"]["helper"] | {"tools": ["helper"]}
    table["agents"]["planner"]["tools"] = ["middle"]
    with pytest.raises(ConfigError, match="middle.tools: the teacher of stage 'taught' acts for it and calls search"):
        resolve(table)


def test_a_teacher_needs_lists_of_hits_that_it_can_read() -> None:
    world = {"type": "world", "names": "syllables", "style": "prose"}
    with pytest.raises(ConfigError, match="tools.search.style: the teacher of stage 'taught' cannot read 'compact'"):
        resolve(taught(tasks=world))
    prose = taught(tasks=world)
    prose["tools"] = {"search": {"type": "search", "style": "prose"}, "visit": {"type": "visit"}}
    resolve(prose)
    resolve(recipe(tasks=world))  # models learn to read them


def test_settings_that_work_in_some_stage_are_not_inert() -> None:
    falling = {"name": "fall", "steps": 1, "groups_per_step": 1, "learner": {"lr_scheduler": "linear"}}
    table = recipe(learner={"min_lr_ratio": 0.1})
    table["stages"].append(falling)
    resolve(table)
    table = taught()
    table["agents"]["helper"]["learner"] = {"clip_ratio_low": 0.1}
    resolve(table)
    table["stages"][1]["train"] = ["planner"]
    with pytest.raises(ConfigError, match="^agents.helper.learner.clip_ratio_low: has no effect with policy_loss"):
        resolve(table)


# ---------------------------------------------------------------- what a run keeps


def test_a_run_keeps_absolute_paths_and_a_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = {"type": "jsonl", "path": "a.jsonl", "corpus": "pages.jsonl"}
    table = recipe(tasks=tasks, evaluation={"tasks": {"path": "b.jsonl"}})
    table["agents"]["helper"] |= {"model": "models/helper", "trainable": False}
    table["agents"]["helper"]["engine"] = {"type": "scripted", "path": "replies.json"}
    table["stages"][0]["tasks"] = {"path": "c.jsonl"}
    kept = settled(resolve(table), threads=3)
    assert kept.threads == 3 and settled(kept, threads=4) == kept
    assert kept.tasks == tasks | {"path": f"{tmp_path}/a.jsonl", "corpus": f"{tmp_path}/pages.jsonl"}
    assert kept.evaluation.tasks == {"path": f"{tmp_path}/b.jsonl"}
    assert kept.stages[0].tasks == {"path": f"{tmp_path}/c.jsonl"}
    assert kept.agents["helper"].model == f"{tmp_path}/models/helper"
    assert kept.agents["helper"].engine == {"type": "scripted", "path": f"{tmp_path}/replies.json"}
    assert settled(resolve(recipe(threads=2)), threads=3).threads == 2


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
