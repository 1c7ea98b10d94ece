"""Published functions of other libraries, taken out of their installed source files and run by themselves.

TRL and verl are references of the tests only. Importing them would need several hundred MB of packages that their
formulas never touch, and other versions of ours; compiling single functions needs the two wheels and nothing else.
`make references` unpacks them beside the environment's own packages, where no import finds them.
"""

from __future__ import annotations
import __future__

import ast
import os
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PLACE = Path(sys.prefix) / "references"
PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[2] / "requirements-references.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def published(package: str, file: str, names: Iterable[str], **namespace: Any) -> SimpleNamespace:
    """The functions and constants ``names`` of ``package``/``file``, as published but for decorators and annotations.

    They see each other, ``namespace`` and nothing else. "Class.method" gives a plain function named after the method.
    Skips the module that calls it where the package is absent or of another version than the tests speak of.
    """
    tree = ast.parse(_folder(package).joinpath(file).read_text(encoding="utf-8"))
    found = [_definition(tree, name.split("."), f"{package}/{file}") for name in names]
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    code = compile(ast.Module(found, []), f"{package}/{file}", "exec", __future__.annotations.compiler_flag, True)
    exec(code, namespace)
    return SimpleNamespace(**{name.split(".")[-1]: namespace[name.split(".")[-1]] for name in names})


def _folder(package: str) -> Path:
    found = {own.metadata["Name"]: own.version for own in distributions(path=[str(PLACE)])}
    if found.get(package) != PINS[package]:
        reason = f"{package} is {found.get(package, 'absent')}; make references fetches {PINS[package]} to compare with"
        if os.environ.get("MGRPO_REFERENCES") == "required":
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)
    return PLACE / package


def _definition(tree: ast.Module | ast.ClassDef, path: list[str], where: str) -> ast.stmt:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == path[0]:
            return _definition(node, path[1:], where) if isinstance(node, ast.ClassDef) and path[1:] else node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == path[0] for target in targets):
            return node
    raise LookupError(f"{where} defines no {path[0]} at that place; the published source has changed")
