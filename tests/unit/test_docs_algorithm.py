"""docs/algorithm.md maps equations to functions; the map must not rot."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from mgrpo.algorithm import advantages, alignment, coefficients, comparison, loss
from mgrpo.config import LearnerConfig
from mgrpo.config.presets import PRESETS

TEXT = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(mgrpo(?:\.\w+)+)`", TEXT)))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    module, _, attribute = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute)), name


def test_every_stage_is_on_the_map():
    stages = {name.split(".")[2] for name in NAMES if name.startswith("mgrpo.algorithm.")}
    assert stages == {
        "rewards",
        "shaping",
        "alignment",
        "comparison",
        "advantages",
        "coefficients",
        "correction",
        "loss",
        "packing",
    }


def test_every_equation_of_the_paper_is_on_the_map():
    cells = re.findall(r"^\| (\([\d(), -]+\)) \|", TEXT, re.MULTILINE)
    mapped = set()
    for cell in cells:
        for first, last in re.findall(r"\((\d+)\)(?:-\((\d+)\))?", cell):
            mapped |= set(range(int(first), int(last or first) + 1))
    assert mapped == set(range(1, 20))


def test_every_choice_of_an_option_is_on_the_map():
    kinds = (alignment.Mode, comparison.CompareWith, advantages.ScaleRewards, coefficients.LossAggMode, loss.PolicyLoss)
    for options in (*kinds, loss.KlEstimator):
        for value in options.__args__:
            assert f'"{value}"' in TEXT, value


MECHANICS = {"optimizer", "learning_rate", "lr_scheduler", "warmup_steps", "min_lr_ratio", "adam_betas", "weight_decay"}
MECHANICS |= {"max_grad_norm", "max_tokens_per_microbatch", "max_skipped_steps"}


@pytest.mark.parametrize("key", sorted(LearnerConfig.model_fields.keys() - MECHANICS))
def test_every_option_of_the_objective_is_explained(key):
    assert f"`{key}" in TEXT


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_line(name):
    assert re.search(rf"^\| `{name}`", TEXT, re.MULTILINE)
