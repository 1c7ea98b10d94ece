"""Files and functions stay small enough to read. An exception needs a line in EXCEPTIONS, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_BUDGET = 60
README_BUDGET = 130

# Globs relative to the repository; the first that matches a file sets its budget in lines.
FILE_BUDGETS = (
    ("mgrpo/train.py", 150),
    ("mgrpo/algorithm/*.py", 200),
    ("mgrpo/**/*.py", 400),
    ("tests/**/*.py", 400),
    ("benchmarks/**/*.py", 400),
    ("recipes/**/*.toml", 60),
    ("README.md", README_BUDGET),
)

# "path" for a file or "path::function" for a function -> why it may be larger.
EXCEPTIONS: dict[str, str] = {}


def budgeted_files(root: Path) -> dict[str, int]:
    """Every budgeted file, as a POSIX path relative to ``root``, with its budget in lines."""
    budgets: dict[str, int] = {}
    for pattern, budget in FILE_BUDGETS:
        for path in root.glob(pattern):
            budgets.setdefault(path.relative_to(root).as_posix(), budget)
    return budgets


def function_lengths(source: str) -> Iterator[tuple[str, int]]:
    """Qualified name and length in lines, ``def`` to last line, of every function and method."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, prefix)
                continue
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                assert child.end_lineno is not None
                yield name, child.end_lineno - child.lineno + 1
            yield from walk(child, f"{name}.")

    return walk(ast.parse(source), "")


def offenders(root: Path) -> dict[str, str]:
    """Whatever is over its budget, by the name it would have in EXCEPTIONS."""
    found: dict[str, str] = {}
    for file, budget in sorted(budgeted_files(root).items()):
        source = (root / file).read_text(encoding="utf-8")
        lines = len(source.splitlines())
        if lines > budget:
            found[file] = f"{lines} lines, budget {budget}"
        if file.endswith(".py"):
            for name, length in function_lengths(source):
                if length > FUNCTION_BUDGET:
                    found[f"{file}::{name}"] = f"{length} lines, budget {FUNCTION_BUDGET}"
    return found


def test_everything_fits_its_budget() -> None:
    found = {name: size for name, size in offenders(ROOT).items() if name not in EXCEPTIONS}
    assert not found, "over budget (split it, or add it to EXCEPTIONS with a reason):\n" + "\n".join(
        f"  {name}: {size}" for name, size in found.items()
    )


def test_exceptions_are_still_needed() -> None:
    stale = sorted(EXCEPTIONS.keys() - offenders(ROOT).keys())
    assert not stale, f"these fit their budget now; remove them from EXCEPTIONS: {stale}"


@pytest.mark.parametrize(
    ("file", "lines", "over"),
    [
        ("mgrpo/train.py", 150, False),
        ("mgrpo/train.py", 151, True),
        ("mgrpo/algorithm/loss.py", 201, True),
        ("mgrpo/agents/loop.py", 400, False),
        ("mgrpo/agents/loop.py", 401, True),
        ("recipes/quickstart.toml", 61, True),
        ("README.md", README_BUDGET + 1, True),
    ],
)
def test_file_budget_applies(tmp_path: Path, file: str, lines: int, over: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# line\n" * lines)
    assert (file in offenders(tmp_path)) is over


def test_function_budget_sees_methods_and_nested_functions(tmp_path: Path) -> None:
    body = "            pass\n" * FUNCTION_BUDGET
    path = tmp_path / "mgrpo" / "long.py"
    path.parent.mkdir()
    path.write_text(f"class A:\n    def f(self):\n        async def g():\n{body}")
    assert set(offenders(tmp_path)) == {"mgrpo/long.py::A.f", "mgrpo/long.py::A.f.g"}
