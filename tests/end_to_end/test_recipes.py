"""Every recipe runs: the small one to its end, the others cut to a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import ROOT, mgrpo, smoke_run

from mgrpo.config import dump, load

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
# What makes a recipe short, keeping its stages, agents and parts.
SHORT = {"evaluation.questions": 4, "evaluation.examples": 1, "threads": 1}
CUTS = {"quickstart": SHORT, "three_agents": SHORT, "two_clusters": SHORT}
STEPS = 2
# What takes the place of hardware, models and services that a recipe needs and that are not here.
SMALL = {
    "engine": '{ type = "local" }',
    "model": '{ type = "tiny", hidden_size = 32, intermediate_size = 64, num_layers = 1, num_heads = 2 }',
    "max_tokens_per_turn": 8,
    "max_context": 256,
    "max_turns": 2,
    "format": "compact",
}
INSTEAD = {
    "two_clusters": {
        **{f"agents.{agent}.{key}": value for agent in ("planner", "searcher") for key, value in SMALL.items()},
        "tasks.names": "word",
    }
}
ELSEWHERE = {"two_clusters": ("store", "weights")}  # keys of places that are not here


def here(recipe: Path, folder: Path) -> Path:
    """The recipe as it can run on this machine."""
    if recipe.stem not in INSTEAD:
        return recipe
    config = load(recipe, [f"{key}={value}" for key, value in INSTEAD[recipe.stem].items()])
    own = folder / recipe.name
    own.write_text(dump(config.model_copy(update=dict.fromkeys(ELSEWHERE[recipe.stem]))))
    return own


def test_every_recipe_is_run_here() -> None:
    assert {recipe.stem for recipe in RECIPES} == {"smoke", *CUTS}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_loads_plans_and_survives_its_own_dump(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe)
    assert config.name == recipe.stem  # so that the default run folder is runs/<recipe>
    (tmp_path / "resolved.toml").write_text(dump(config))
    assert load(tmp_path / "resolved.toml") == config
    assert mgrpo("plan", here(recipe, tmp_path)).code == 0


def test_smoke_runs_to_its_end() -> None:
    assert json.loads((smoke_run() / "summary.json").read_text())["seconds"] > 0


@pytest.mark.parametrize("name", CUTS)
def test_it_runs_cut_short(name: str, tmp_path: Path) -> None:
    recipe = here(ROOT / "recipes" / f"{name}.toml", tmp_path)
    changes = dict(CUTS[name])
    for index, _ in enumerate(load(recipe).stages):
        cut = {"steps": STEPS, "weight_sync_steps": 1, "groups_per_step": 2}
        changes |= {f"stages.{index}.{key}": value for key, value in cut.items()}
    options = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    result = mgrpo("train", recipe, "--run", tmp_path / "run", *options)
    assert result.code == 0, result
    assert mgrpo("ask", tmp_path / "run").code == 0
