"""Weights while things break: full disks, lost connections, and kill -9 at any moment."""

from __future__ import annotations

import errno
import itertools
import logging
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mgrpo.errors import CheckpointError, StoreUnavailable, UserError
from mgrpo.store import weights
from mgrpo.store.weights import WeightStore, handle_of

HANDLE = handle_of("planner", 1, 4)


def fill(folder: Path) -> None:
    for name in ("config.json", "model.safetensors", "learner.json"):
        (folder / name).write_bytes(name.encode())


# ---------------------------------------------------------------- on the disk before it has its name


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, events = WeightStore(tmp_path / "run", tmp_path / "cache"), []
    sync, rename = weights._sync, Path.rename
    monkeypatch.setattr(weights, "_sync", lambda path: (events.append(path), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    place.write(HANDLE, fill)
    folder = tmp_path / "run" / "weights" / "planner"
    assert events[:3] == [folder.parent, folder.parent.parent, tmp_path]  # where folders were made
    renamed = events.index("rename")
    assert {path.name for path in (folder / "v1-4").iterdir()} < {path.name for path in events[3:renamed]}
    assert events[renamed - 1].name.startswith(".v1-4.") and events[renamed + 1 :] == [folder]


def test_what_could_not_be_synced_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync the next one of the same file can succeed without the data being there."""
    place, filled = WeightStore(tmp_path / "run", tmp_path / "cache", outage_s=10), []
    failures, sync = iter([OSError(errno.EIO, "Input/output error")]), weights._sync

    def failing(path: Path) -> None:
        if path.name == "model.safetensors":
            for error in failures:
                raise error
        sync(path)

    monkeypatch.setattr(weights, "_sync", failing)
    checksum = place.write(HANDLE, lambda folder: (filled.append(folder), fill(folder)))
    assert len(set(filled)) == 2 and place.get(HANDLE, checksum)
    assert [path.name for path in (tmp_path / "run" / "weights" / "planner").iterdir()] == ["v1-4"]


# ---------------------------------------------------------------- full disk


def full_data(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("/dev/full")
    (folder / "model.safetensors").write_bytes(b"x")


def full_manifest(folder: Path) -> None:
    fill(folder)
    (folder / "manifest.json").symlink_to("/dev/full")


@pytest.mark.parametrize("filling", [full_data, full_manifest])
@pytest.mark.parametrize("kind", ["path", "elsewhere"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    filling: Callable[[Path], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "run" if kind == "path" else f"memory://{uuid.uuid4().hex}"
    place = WeightStore(base, tmp_path / "cache")
    if filling is full_manifest:  # what is hashed is what lies there, but a device has no end
        monkeypatch.setattr(weights, "_sha256", lambda path: "")
        monkeypatch.setattr(weights, "_sync", lambda path: None)
    with pytest.raises(StoreUnavailable, match="^weights .*: writing weights/planner/v1-4: No space left on device.*"):
        place.write(HANDLE, filling)
    monkeypatch.undo()
    assert not place.exists(HANDLE)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    place.get(HANDLE, place.write(HANDLE, fill), learner=True)  # there is space again


# ---------------------------------------------------------------- lost connections


class NoAnswer(Exception):
    """Of a driver's library."""


class Failing(MemoryFileSystem):
    protocol = "failing"
    failures: list[Exception] = []

    def cat_file(self, *arguments: object, **options: object) -> bytes:
        return self._failing(super().cat_file, *arguments, **options)

    def get_file(self, *arguments: object, **options: object) -> None:
        self._failing(super().get_file, *arguments, **options)

    def put_file(self, *arguments: object, **options: object) -> None:
        self._failing(super().put_file, *arguments, **options)

    def ls(self, *arguments: object, **options: object) -> list[str]:
        return self._failing(super().ls, *arguments, **options)

    def _failing(self, method: Callable[..., object], *arguments: object, **options: object) -> object:
        if self.failures:
            raise self.failures.pop(0)
        return method(*arguments, **options)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr(Failing, "failures", [])
    return f"failing://{uuid.uuid4().hex}"


OUTAGES = [ConnectionResetError(errno.ECONNRESET, "Connection reset"), TimeoutError(), NoAnswer("gone\nfor now")]


def test_an_outage_is_waited_out_and_said(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = WeightStore(url, tmp_path / "a", outage_s=30)
    with caplog.at_level(logging.WARNING, "mgrpo.store"):
        Failing.failures[:] = OUTAGES[:2]
        checksum = place.write(HANDLE, fill)
        Failing.failures[:] = OUTAGES[2:]
        assert place.exists(HANDLE)
        Failing.failures[:] = OUTAGES
        WeightStore(url, tmp_path / "b", outage_s=30).get(HANDLE, checksum)
    said = [record.message.partition(": ")[2] for record in caplog.records]
    assert said[:3] == [
        f"writing {HANDLE}: Connection reset; trying again for up to 30 s",
        f"writing {HANDLE} works again",
        f"looking for {HANDLE}: NoAnswer: gone for now; trying again for up to 30 s",
    ]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_that_lasts_is_one_line(outage: Exception, url: str, tmp_path: Path) -> None:
    place = WeightStore(url, tmp_path / "a", outage_s=0.2)
    checksum = place.write(HANDLE, fill)
    place = WeightStore(url, tmp_path / "b", outage_s=0.2)
    for use in (
        lambda: place.write(handle_of("planner", 2, 4), fill),
        lambda: place.exists(HANDLE),  # it is not known to be absent
        lambda: place.get(HANDLE, checksum),
    ):
        Failing.failures[:] = [outage] * 1000
        with pytest.raises(StoreUnavailable, match=r"^weights .*: \w+.*planner/v.-4: .*, for 0.2 s; see to it"):
            use()
    place.prune("planner", 2)  # is for later
    Failing.failures.clear()
    assert place.get(HANDLE, checksum) and not place.exists(handle_of("planner", 2, 4))


def test_no_rights_are_no_outage(url: str, tmp_path: Path) -> None:
    place = WeightStore(url, tmp_path / "a", outage_s=1000)
    checksum = place.write(HANDLE, fill)
    Failing.failures[:] = [PermissionError("Forbidden")]
    with pytest.raises(UserError, match="writing weights/planner/v2-4: Forbidden; check that place and the rights"):
        place.write(handle_of("planner", 2, 4), fill)
    Failing.failures[:] = [PermissionError("Forbidden")]
    with pytest.raises(CheckpointError, match="reading weights/planner/v1-4: Forbidden"):
        WeightStore(url, tmp_path / "b", outage_s=1000).get(HANDLE, checksum)


# ---------------------------------------------------------------- kill -9


def content(version: int) -> bytes:
    return random.Random(version).randbytes(200_000)


def place_of(kind: str, folder: Path) -> WeightStore:
    (folder / "run").mkdir(exist_ok=True)
    base = folder / "run" if kind == "path" else f"dir::file://{folder}/run"
    return WeightStore(base, folder / "cache")


def learning(kind: str, folder: str, fence: int, first: int) -> None:
    place = place_of(kind, Path(folder))
    for version in itertools.count(first):
        data = content(version)
        place.write(handle_of("planner", version, fence), lambda folder: (folder / "m").write_bytes(data))  # noqa: B023
        place.prune("planner", 3)


@pytest.mark.parametrize("kind", ["path", "folder behind a driver"])
def test_killed_at_any_moment_what_is_there_is_whole(kind: str, tmp_path: Path) -> None:
    draw, fork, seen, newest = random.Random(0), multiprocessing.get_context("fork"), 0, 0
    for fence in range(1, 21):
        process = fork.Process(target=learning, args=(kind, str(tmp_path), fence, newest + 1), daemon=True)
        process.start()
        time.sleep(draw.uniform(0.01, 0.1))
        assert process.pid is not None and process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        place = place_of(kind, tmp_path)
        for name in place._files.names("weights/planner"):
            if name.startswith(".") or not place.exists(f"weights/planner/{name}"):
                continue
            version = int(name[1:].split("-")[0])
            assert (place.get(f"weights/planner/{name}", None) / "m").read_bytes() == content(version)
            newest, seen = max(newest, version), seen + 1
    assert seen > 20 and newest > 5
    place.write(handle_of("planner", newest + 1, 21), fill)
    place.prune("planner", 2)
    left = place._files.names("weights/planner")  # nothing of those who were killed
    assert len(left) == 2 and not [name for name in left if name.startswith(".")]
