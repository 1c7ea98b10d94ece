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
CUTS = {"quickstart": SHORT, "three_agents": SHORT}
STEPS = 2


def test_every_recipe_is_run_here() -> None:
    assert {recipe.stem for recipe in RECIPES} == {"smoke", *CUTS}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_loads_plans_and_survives_its_own_dump(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe)
    assert config.name == recipe.stem  # so that the default run folder is runs/<recipe>
    (tmp_path / "resolved.toml").write_text(dump(config))
    assert load(tmp_path / "resolved.toml") == config
    assert mgrpo("plan", recipe).code == 0


def test_smoke_runs_to_its_end() -> None:
    assert json.loads((smoke_run() / "summary.json").read_text())["seconds"] > 0


@pytest.mark.parametrize("name", CUTS)
def test_it_runs_cut_short(name: str, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / f"{name}.toml"
    changes = dict(CUTS[name])
    for index, _ in enumerate(load(recipe).stages):
        cut = {"steps": STEPS, "weight_sync_steps": 1, "groups_per_step": 2}
        changes |= {f"stages.{index}.{key}": value for key, value in cut.items()}
    options = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    result = mgrpo("train", recipe, "--run", tmp_path / "run", *options)
    assert result.code == 0, result
    assert mgrpo("ask", tmp_path / "run").code == 0
