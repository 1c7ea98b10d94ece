"""Imports point down: the layers contract in pyproject.toml holds, and can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(LINT_IMPORTS, cwd=root, capture_output=True, text=True, timeout=120)


def test_imports_point_down() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A package with the same layers and nothing in them, under the project's own contract."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("", "agents", "store", "tasks", "worlds"):
        (tmp_path / "mgrpo" / package).mkdir()
        (tmp_path / "mgrpo" / package / "__init__.py").touch()
    for module in ("errors", "types", "train"):
        (tmp_path / "mgrpo" / f"{module}.py").touch()
    return tmp_path


def test_an_empty_skeleton_passes(skeleton: Path) -> None:
    result = lint_imports(skeleton)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("worlds/__init__.py", "import mgrpo.tasks"),  # upwards
        ("tasks/__init__.py", "import mgrpo.store"),  # between siblings
        ("types.py", "def late():\n    import mgrpo.train"),  # upwards, inside a function
        ("utils.py", ""),  # a module without a layer
    ],
)
def test_contract_refuses(skeleton: Path, file: str, line: str) -> None:
    (skeleton / "mgrpo" / file).write_text(line + "\n")
    result = lint_imports(skeleton)
    assert result.returncode == 1, result.stdout + result.stderr
