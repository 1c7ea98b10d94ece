"""The objective's two benchmarks run, cut short, and what they say about weights holds exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *options, "--json", str(folder / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_a_role_gains_nothing_from_being_called_more_often(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    options = ("--calls", "1", "8", "--rates", "1", "4", "--seeds", "1", "--steps", "2", "--figure", str(figure))
    found = run("amplification.py", tmp_path, *options)
    once, often = (found["share"]["weights"][n] for n in ("1", "8"))
    assert once == pytest.approx(0.5, abs=0.05) and often == pytest.approx(8 / 9, abs=0.05)
    assert found["share"]["agent"]["8"] == pytest.approx(0.5, abs=0.05)
    naive, ours = (found["gradient"][way]["8"] for way in ("naive", "mgrpo"))
    assert naive == pytest.approx(8 * ours), "the same rows, in one case eight times over"
    assert figure.stat().st_size > 10_000


def test_the_bookkeeping_is_timed_in_parts(tmp_path: Path) -> None:
    found = run("objective_speed.py", tmp_path, "--rows", "300", "--repeats", "1")
    assert "default path" in json.dumps(found)
