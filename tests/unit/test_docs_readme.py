"""The README names commands, files and pictures that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mgrpo.cli import app

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_names_commands_that_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = set(re.findall(r"^    mgrpo ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named and named <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"quickstart", "test", "setup", "check"} <= targets


def test_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"`((?:mgrpo|recipes)/[\w/.-]+\.(?:py|toml))`", text)
    assert len(listed) >= 6
    for name in listed:
        assert (ROOT / name).is_file(), name


def test_no_placeholder_is_left() -> None:
    for page in PAGES:
        assert not re.search(r"\b[A-Z]+_OUTPUT\b|TODO|FIXME", page.read_text(encoding="utf-8")), page.name
