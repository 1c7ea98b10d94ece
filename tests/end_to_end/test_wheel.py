"""The built wheel, installed where only the core dependencies exist: no torch, no transformers, no checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CORE = ("types", "errors", "config", "worlds", "tasks", "tools", "store", "agents", "report", "engines.base")
CORE += ("engines.scripted", "algorithm.rewards", "algorithm.alignment", "algorithm.advantages", "cli")

# Imports each module with its submodules, and prints the file of each.
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    print(module.__file__)
    for submodule in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        print(importlib.import_module(submodule.name).__file__)
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def requirements_closure(requirements: Iterator[Requirement]) -> dict[str, Distribution]:
    """The installed distributions that ``requirements`` need, directly or not, by canonical name."""
    found: dict[str, Distribution] = {}
    queue = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    while queue:
        name = canonicalize_name(queue.pop().name)
        if name not in found:
            found[name] = distribution(name)
            needs = map(Requirement, found[name].requires or [])
            queue.extend(r for r in needs if r.marker is None or r.marker.evaluate({"extra": ""}))
    return found


def link_into(site_packages: Path, dist: Distribution) -> None:
    """Make an installed distribution importable from another environment, without copying it."""
    tops = {file.parts[0] for file in dist.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        (site_packages / top).symlink_to(Path(str(dist.locate_file(top))).resolve())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that a build leaves nothing behind in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in (ROOT / "pyproject.toml", ROOT / "LICENSE", *ROOT.glob("README.md")):
        shutil.copy(path, source)
    shutil.copytree(ROOT / "mgrpo", source / "mgrpo", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def slim_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the wheel and its core dependencies."""
    environment = tmp_path_factory.mktemp("slim")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        cwd=environment,
    )
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (metadata,) = site_packages.glob("mgrpo-*.dist-info")
    needs = map(Requirement, Distribution.at(metadata).requires or [])
    for dist in requirements_closure(needs).values():
        link_into(site_packages, dist)
    return python


def test_torch_is_absent(slim_python: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'transformers') if u.find_spec(n)])"
    assert run(slim_python, "-c", code, cwd=tmp_path).stdout.strip() == "[]"


def test_core_imports_from_the_wheel(slim_python: Path, tmp_path: Path) -> None:
    files = run(slim_python, "-c", IMPORT_ALL, *(f"mgrpo.{name}" for name in CORE), cwd=tmp_path).stdout.split()
    assert len(files) >= len(CORE)
    assert all(Path(file).is_relative_to(slim_python.parents[1]) for file in files), files


def test_command_line_helps(slim_python: Path, tmp_path: Path) -> None:
    assert "train" in run(slim_python.parent / "mgrpo", "--help", cwd=tmp_path).stdout


def test_wheel_is_typed_and_licensed(slim_python: Path) -> None:
    (site_packages,) = slim_python.parents[1].glob("lib/python*/site-packages")
    assert (site_packages / "mgrpo" / "py.typed").is_file()
    assert list(site_packages.glob("mgrpo-*.dist-info/licenses/LICENSE"))
