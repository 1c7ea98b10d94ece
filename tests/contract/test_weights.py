"""What every place of weights must do: a version is whole or not there, and says what is damaged."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from mgrpo.errors import CheckpointError, UserError
from mgrpo.store import weights
from mgrpo.store.weights import WeightStore

Maker = Callable[[Path], WeightStore]
PLACES: dict[str, Maker] = {
    "path": lambda folder: WeightStore(folder / "run", folder / "cache"),
    "file URL": lambda folder: WeightStore(f"file://{folder}/run", folder / "cache"),
    "memory": lambda folder: WeightStore(f"memory://{uuid.uuid4().hex}", folder / "cache"),
}
HANDLE = "weights/planner/v1-4"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    return PLACES[request.param](tmp_path)


def put(place: WeightStore, handle: str = HANDLE, content: bytes = b"w" * 1000) -> str:
    staged = place.staging(handle)
    files = {"model.safetensors": content, "config.json": b"{}", "learner.safetensors": b"m", "learner.json": b"[]"}
    for name, data in files.items():
        (staged / name).write_bytes(data)
    return place.put(staged, handle)


def test_what_is_put_is_got(place: WeightStore) -> None:
    assert not place.exists(HANDLE)
    checksum = put(place)
    assert place.exists(HANDLE)
    folder = place.get(HANDLE, checksum)
    assert (folder / "model.safetensors").read_bytes() == b"w" * 1000
    assert (place.get(HANDLE, checksum, learner=True) / "learner.json").read_bytes() == b"[]"
    manifest = (folder / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == checksum
    assert json.loads(manifest)["files"]["config.json"] == hashlib.sha256(b"{}").hexdigest()


def test_nothing_is_there_before_it_is_put(place: WeightStore) -> None:
    staged = place.staging(HANDLE)
    (staged / "model.safetensors").write_bytes(b"half")
    assert not place.exists(HANDLE)
    with pytest.raises(CheckpointError, match="v1-4"):
        place.get(HANDLE, None)


def test_another_version_than_was_published_is_refused(place: WeightStore) -> None:
    put(place)
    other = put(place, "weights/planner/v2-4", b"x")
    with pytest.raises(CheckpointError, match="not the weights that the store published"):
        place.get(HANDLE, other)


def test_what_was_never_published_is_replaced(place: WeightStore) -> None:
    put(place)
    checksum = put(place, content=b"again")
    assert (place.get(HANDLE, checksum) / "model.safetensors").read_bytes() == b"again"


def test_pruning_keeps_the_newest_and_those_in_use(place: WeightStore) -> None:
    for version in range(12):
        put(place, f"weights/planner/v{version}-1")
    put(place, "weights/planner/v11-3")  # written again under a later lease: the earlier one was not published
    put(place, "weights/searcher/v0-2")
    place.prune("planner", 2, in_use={3})
    left = [v for v in range(12) if place.exists(f"weights/planner/v{v}-1")]
    assert left == [3, 10] and place.exists("weights/planner/v11-3") and place.exists("weights/searcher/v0-2")
    place.prune("nobody", 2)


def test_a_kept_copy_outlives_its_version_and_holds_nothing_of_the_learner(place: WeightStore) -> None:
    put(place)
    place.keep(HANDLE, "reference/planner")
    put(place, "weights/planner/v2-4", b"later")
    put(place, "weights/planner/v3-4", b"later")
    place.keep("weights/planner/v3-4", "reference/planner")  # there is one
    place.prune("planner", 1)
    folder = place.get("reference/planner", None, learner=True)
    assert (folder / "model.safetensors").read_bytes() == b"w" * 1000
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "learner.safetensors"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    place = PLACES["path"](tmp_path)
    checksum = put(place)
    path = tmp_path / "run" / HANDLE / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path}: (missing|damaged)"):
        place.get(HANDLE, checksum, learner=True)
    if name.startswith("learner"):
        place.get(HANDLE, checksum)  # an engine needs it not


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"files": 3}'])
def test_a_damaged_manifest_is_named(content: str | None, tmp_path: Path) -> None:
    place = PLACES["path"](tmp_path)
    checksum = put(place)
    manifest = tmp_path / "run" / HANDLE / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    with pytest.raises(CheckpointError, match=f"{manifest}: not readable"):
        place.get(HANDLE, checksum)


def test_an_unknown_kind_of_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weights: nowhere://x: .*nowhere"):
        WeightStore("nowhere://x", tmp_path)


# ---------------------------------------------------------------- interruptions


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, events = PLACES["path"](tmp_path), []
    sync, rename = weights._sync, Path.rename
    monkeypatch.setattr(weights, "_sync", lambda path: (events.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    put(place)
    renamed = events.index("rename")
    names = {path.name for path in (tmp_path / "run" / HANDLE).iterdir()} | {f".v1-4.{os.getpid()}"}
    assert {f"sync {name}" for name in names} == set(events[:renamed])
    assert events[renamed + 1 :] == ["sync planner"]


def putting(folder: str) -> None:
    place = PLACES["path"](Path(folder))
    version = 0
    while True:
        put(place, f"weights/planner/v{version}-{os.getpid()}", random.Random(version).randbytes(200_000))
        place.prune("planner", 3)
        version += 1


def test_killed_at_any_moment_every_version_that_is_there_is_whole(tmp_path: Path) -> None:
    random_, fork = random.Random(0), multiprocessing.get_context("fork")
    seen = 0
    for _ in range(20):
        process = fork.Process(target=putting, args=(str(tmp_path),), daemon=True)
        process.start()
        time.sleep(random_.uniform(0.01, 0.12))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        place = PLACES["path"](tmp_path)
        for folder in (tmp_path / "run" / "weights" / "planner").glob("v*"):
            handle = f"weights/planner/{folder.name}"
            if not place.exists(handle):
                continue
            data = (place.get(handle, None, learner=True) / "model.safetensors").read_bytes()
            assert data == random.Random(int(folder.name[1:].split("-")[0])).randbytes(200_000)
            seen += 1
    assert seen


def test_a_full_disk_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PLACES["path"](tmp_path)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_sync", full)
        with pytest.raises(OSError, match="No space left"):
            put(place)
    assert not place.exists(HANDLE)
    checksum = put(place)  # there is space again
    place.get(HANDLE, checksum, learner=True)
    assert [path.name for path in (tmp_path / "run" / HANDLE).parent.iterdir()] == ["v1-4"]
