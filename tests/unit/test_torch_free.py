"""The light core imports where torch and transformers cannot be imported at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Packages are imported with all their submodules.
TORCH_FREE = (
    "mgrpo.types",
    "mgrpo.errors",
    "mgrpo.config",
    "mgrpo.worlds",
    "mgrpo.tasks",
    "mgrpo.tools",
    "mgrpo.store",
    "mgrpo.agents",
    "mgrpo.report",
    "mgrpo.engines.base",
    "mgrpo.engines.chat",
    "mgrpo.engines.openai",
    "mgrpo.engines.scripted",
    "mgrpo.engines.remote",
    "mgrpo.engines.server",
    "mgrpo.web",
    "mgrpo.launch",
    "mgrpo.parts",
    "mgrpo.algorithm.rewards",
    "mgrpo.algorithm.alignment",
    "mgrpo.algorithm.advantages",
    "mgrpo.algorithm.coefficients",
    "mgrpo.algorithm.shaping",
    "mgrpo.cli",
)

# Runs in a process of its own: this one may have torch loaded by another test.
IMPORT_WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocked())
module = importlib.import_module(sys.argv[1])
for submodule in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(submodule.name)
"""

HELP_THEN_LIST_HEAVY_MODULES = """
import sys
from mgrpo.cli import main

sys.argv = ["mgrpo", "--help"]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
heavy = {"torch", "transformers", "matplotlib", "sqlalchemy", "bm25s"} & set(sys.modules)
assert not heavy, f"mgrpo --help imported {sorted(heavy)}"
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module: str) -> None:
    result = run_python(IMPORT_WITHOUT_TORCH, module)
    assert result.returncode == 0, result.stderr


def test_the_block_blocks() -> None:
    result = run_python(IMPORT_WITHOUT_TORCH, "torch")
    assert "torch must not be imported here" in result.stderr


def test_help_loads_nothing_heavy() -> None:
    result = run_python(HELP_THEN_LIST_HEAVY_MODULES)
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout
