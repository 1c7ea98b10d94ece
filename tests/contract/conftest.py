"""A fresh store of every kind. A new one joins by a line in STORES: where it is, a path or a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_samples import Clock

from mgrpo.store import ledger
from mgrpo.store.base import RunInfo, Store
from mgrpo.store.opening import open_store

Opener = Callable[[], Store]

STORES: dict[str, Callable[[pytest.FixtureRequest], str | Path]] = {
    "sqlite": lambda request: request.getfixturevalue("tmp_path") / "run.db",
    "postgresql": lambda request: request.getfixturevalue("postgres_url"),
}


@pytest.fixture
def run_info() -> RunInfo:
    return RunInfo(seed=7, config={"agents": {"planner": {"model": "tiny"}}, "top_p": 1.0})


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest) -> str | Path:
    """Where a store can begin."""
    return STORES[request.param](request)


@pytest.fixture
def opener(place: str | Path, run_info: RunInfo) -> Opener:
    """Opens one and the same store anew at every call."""
    return lambda: open_store(place, run_info)


@pytest.fixture
def store(opener: Opener) -> Iterator[Store]:
    opened = opener()
    yield opened
    opened.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The database's clock, as the test sets it."""
    made = Clock()
    monkeypatch.setattr(ledger, "clock", made)
    return made
