"""The lock is installed without resolving, so it has to be complete and to agree with pyproject.toml by itself."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return (ROOT / "requirements.lock").read_text().splitlines()


@pytest.fixture(scope="module")
def pins(lines: list[str]) -> dict[str, Version]:
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def direct_requirements() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    groups.append(project["build-system"]["requires"])
    return (Requirement(text) for group in groups for text in group if not text.startswith("mgrpo["))


def locked_requirements(pins: dict[str, Version]) -> Iterator[Requirement]:
    """What the locked packages themselves require on this platform, optional extras left out."""
    for name in pins:
        try:
            texts = requires(name) or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is in requirements.lock but not installed; run make setup")
        for requirement in map(Requirement, texts):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def test_every_line_is_a_plain_pin(lines: list[str]) -> None:
    assert [line for line in lines if not PIN.fullmatch(line)] == []


def test_lock_is_sorted_without_duplicates(lines: list[str], pins: dict[str, Version]) -> None:
    assert len(pins) == len(lines)


def test_lock_satisfies_pyproject(pins: dict[str, Version]) -> None:
    assert list(unsatisfied(direct_requirements(), pins)) == []


def test_lock_is_complete(pins: dict[str, Version]) -> None:
    accelerators = re.compile(r"nvidia-|cuda-|triton")  # asked for by a CUDA build of torch; setup adds them
    missing = unsatisfied(locked_requirements(pins), pins)
    assert [text for text in missing if not accelerators.match(text)] == []


def unsatisfied(requirements: Iterator[Requirement], pins: dict[str, Version]) -> Iterator[str]:
    for requirement in requirements:
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            yield f"{requirement} (locked: {pin})"
