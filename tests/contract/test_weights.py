"""What every place of weights must do: a version is whole or not there, stays as published and says what is damaged."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from mgrpo.errors import CheckpointError, UserError
from mgrpo.store import weights
from mgrpo.store.weights import WeightStore, handle_of

HANDLE = handle_of("planner", 1, 4)
FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"v" * 1000,
    "model-00002-of-00002.safetensors": b"w" * 1000,
    "learner.safetensors": b"m",
    "learner.json": b"[]",
}
WEIGHTS = "model-00002-of-00002.safetensors"


def place_in(folder: Path, kind: str = "path", outage_s: float = 0.0) -> WeightStore:
    (folder / "run").mkdir(parents=True, exist_ok=True)
    url = {"file URL": f"file://{folder}/run", "folder behind a driver": f"dir::file://{folder}/run"}.get(kind)
    if kind == "memory":
        url = f"memory://{folder.name}-{uuid.uuid4().hex}"
    return WeightStore(url or folder / "run", folder / "cache", outage_s)


@pytest.fixture(params=["path", "file URL", "memory", "folder behind a driver"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    return place_in(tmp_path, request.param)


def filling(content: bytes = FILES[WEIGHTS]) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        for name, data in (FILES | {WEIGHTS: content}).items():
            (folder / name).write_bytes(data)

    return fill


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ---------------------------------------------------------------- written, read


def test_what_is_written_is_read(place: WeightStore) -> None:
    assert not place.exists(HANDLE)
    checksum = place.write(HANDLE, filling())
    assert place.exists(HANDLE)
    folder = place.get(HANDLE, checksum, learner=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"} == FILES
    manifest = (folder / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == checksum
    assert json.loads(manifest) == {"files": {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}}


def test_nothing_is_there_until_it_is_whole(place: WeightStore) -> None:
    def fill(folder: Path) -> None:
        filling()(folder)
        assert not place.exists(HANDLE)
        with pytest.raises(CheckpointError, match="v1-4/manifest.json: missing"):
            place.get(HANDLE, None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.write(HANDLE, fill)
    assert not place.exists(HANDLE)
    place.get(HANDLE, place.write(HANDLE, filling()), learner=True)


def test_a_version_that_is_whole_is_never_written_again(place: WeightStore) -> None:
    checksum = place.write(HANDLE, filling())
    with pytest.raises(CheckpointError, match="v1-4: other weights are there already"):
        place.write(HANDLE, filling(b"other"))
    assert place.write(HANDLE, filling()) == checksum
    assert (place.get(HANDLE, checksum) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize("kind", ["path", "folder behind a driver"])
def test_half_of_a_version_is_written_over(kind: str, tmp_path: Path) -> None:
    place = place_in(tmp_path, kind)
    place.write(HANDLE, filling(b"half"))
    (manifest,) = (tmp_path / "run").rglob("manifest.json")
    manifest.unlink()
    assert not place.exists(HANDLE)
    checksum = place.write(HANDLE, filling())
    assert (place.get(HANDLE, checksum) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_other_weights_than_were_published_are_refused(place: WeightStore) -> None:
    place.write(HANDLE, filling())
    other = place.write(handle_of("planner", 2, 4), filling(b"x"))
    with pytest.raises(CheckpointError, match="v1-4/manifest.json: damaged, or not of the weights that the store"):
        place.get(HANDLE, other)


def test_a_kept_copy_outlives_its_version_and_holds_nothing_of_the_learner(place: WeightStore) -> None:
    place.write(HANDLE, filling())
    place.keep(HANDLE, "reference/planner")
    for version in (2, 3):
        place.write(handle_of("planner", version, 4), filling(b"later"))
    place.keep(handle_of("planner", 3, 4), "reference/planner")  # there is one
    place.prune("planner", 2)
    assert not place.exists(HANDLE)
    folder = place.get("reference/planner", None, learner=True)
    assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert entries(folder) == sorted({"manifest.json", *FILES} - {"learner.json", "learner.safetensors"})


# ---------------------------------------------------------------- two learners, one of which slept


def test_a_learner_that_slept_cannot_touch_what_its_successor_published(place: WeightStore) -> None:
    checksum = place.write(handle_of("planner", 7, 31), filling(b"published"))
    place.write(handle_of("planner", 7, 30), filling(b"too late"))
    assert (place.get(handle_of("planner", 7, 31), checksum) / WEIGHTS).read_bytes() == b"published"
    place.prune("planner", 2)
    assert place.exists(handle_of("planner", 7, 31)) and not place.exists(handle_of("planner", 7, 30))


def test_what_a_sleeper_is_writing_may_be_deleted_and_is_written_again(tmp_path: Path) -> None:
    place, calls = place_in(tmp_path, outage_s=10), []

    def fill(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            place.write(handle_of("planner", 7, 31), filling())
            place.prune("planner", 2)
        filling()(folder)

    place.write(handle_of("planner", 8, 30), fill)
    assert len(calls) == 2 and place.exists(handle_of("planner", 8, 30))  # the store refuses to publish it


def test_what_a_successor_is_writing_is_not_deleted_by_a_sleeper(place: WeightStore) -> None:
    def fill(folder: Path) -> None:
        place.prune("planner", 2)
        filling()(folder)

    for version in range(3):
        place.write(handle_of("planner", version, 30), filling())
    place.write(handle_of("planner", 3, 31), fill)
    assert [place.exists(handle_of("planner", v, f)) for v, f in ((0, 30), (1, 30), (3, 31))] == [False, True, True]


# ---------------------------------------------------------------- pruning


def test_pruning_keeps_the_newest_and_those_in_use(place: WeightStore) -> None:
    for version in range(12):
        place.write(handle_of("planner", version, 1), filling())
    place.write(handle_of("planner", 11, 3), filling())  # again under a later lease: the first was not published
    place.write(handle_of("searcher", 0, 2), filling())
    place.prune("planner", 2, in_use={3})
    left = [v for v in range(12) if place.exists(handle_of("planner", v, 1))]
    assert left == [3, 10] and all(place.exists(handle_of(*at)) for at in (("planner", 11, 3), ("searcher", 0, 2)))
    place.prune("nobody", 2)
    with pytest.raises(ValueError, match="2 must stay"):
        place.prune("planner", 1)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=30), st.integers(2, 4))
def test_whoever_prunes_whenever_what_was_published_last_stays(steps: list[tuple[int, bool, bool]], keep: int) -> None:
    """Learners come one after the other; each step one of the last few writes, and only the last one can publish."""
    there: set[str] = set()
    published: list[tuple[int, int]] = []
    next_version: dict[int, int] = {}  # of each learner, by fence
    for who, publishes, prunes in steps:
        fence = max(next_version, default=0) + 1 if who == 0 else max(1, max(next_version, default=1) - who + 1)
        own = next_version.setdefault(fence, published[-1][0] + 1 if published else 0)
        there.add(f"v{own}-{fence}")
        if lawful := publishes and fence == max(next_version):
            published.append((own, fence))
            next_version[fence] += 1
        last = [f"v{version}-{fence}" for version, fence in published]
        if prunes:
            found = [written for name in there if (written := weights._written(name))]
            there -= {written.name for written in weights._superfluous(found, keep, in_use=())}
            assert set(last[1 - keep :]) <= there
        if prunes and lawful:
            assert set(last[-keep:]) <= there <= set(last)
        assert set(last[-1:]) <= there


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    place = place_in(tmp_path)
    checksum = place.write(HANDLE, filling())
    path = tmp_path / "run" / HANDLE / name
    damage_file(path, damage)
    with pytest.raises(CheckpointError, match=f"^{path}: (missing|damaged) ?.*; restore it$"):
        place.get(HANDLE, checksum, learner=True)
    if name.startswith("learner"):
        place.get(HANDLE, checksum)  # an engine needs it not


def damage_file(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_copy_is_fetched_again_and_a_damaged_original_named(damage: str, tmp_path: Path) -> None:
    place = place_in(tmp_path, "folder behind a driver")
    checksum = place.write(HANDLE, filling())
    for name in (WEIGHTS, "manifest.json"):
        damage_file(tmp_path / "cache" / HANDLE / name, damage)
    folder = place.get(HANDLE, checksum)
    assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    (original,) = (tmp_path / "run").rglob(WEIGHTS)
    damage_file(original, damage)
    place.get(HANDLE, checksum)  # this machine has it
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: (missing|damaged)"):
        place.get(HANDLE, checksum)
    assert not [name for name in entries(folder) if name.startswith(".")]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"files": 3}', '{"files": {"../x": ""}}', '{"files": {"a/b": ""}}']
)
def test_a_manifest_that_is_none_is_named(content: str, place: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_seal", lambda folder: (folder / "manifest.json").write_text(content) and b"" or b"")
        place.write(HANDLE, lambda folder: None)
    with pytest.raises(CheckpointError, match=r"v1-4/manifest.json: (not readable|'.*' is no name of a file)"):
        place.get(HANDLE, hashlib.sha256(content.encode()).hexdigest())


@pytest.mark.parametrize("handle", ["/etc", "..", "weights/../../x", "", "a//b"])
def test_a_handle_that_leads_elsewhere_is_refused(handle: str, place: WeightStore) -> None:
    for use in (lambda: place.get(handle, None), lambda: place.write(handle, filling()), lambda: place.exists(handle)):
        with pytest.raises(CheckpointError, match="is no place below"):
            use()


def test_places_that_cannot_be_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^weights: nowhere://x: .*nowhere.*; name a path or install"):
        WeightStore("nowhere://x", tmp_path)
    with pytest.raises(UserError, match="^weights: a password does not belong in a URL; [^$]*$") as caught:
        WeightStore("ftp://user:s3cret@host/x", tmp_path)
    assert "s3cret" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^weights {tmp_path}/file: writing weights/planner/v1-4: Not a directory"):
        WeightStore(tmp_path / "file", tmp_path).write(HANDLE, filling())


# ---------------------------------------------------------------- what is fetched


class Counted(MemoryFileSystem):
    """Says what was fetched."""

    protocol = "counted"
    fetched: list[str] = []

    def get_file(self, source: str, *arguments: object, **options: object) -> None:
        self.fetched.append(source.rsplit("/", 1)[-1])
        super().get_file(source, *arguments, **options)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("counted", Counted, clobber=True)
    monkeypatch.setattr(Counted, "fetched", [])
    return f"counted://{uuid.uuid4().hex}"


def test_files_are_fetched_once_and_the_learners_on_demand(counted: str, tmp_path: Path) -> None:
    writer, reader = WeightStore(counted, tmp_path / "a"), WeightStore(counted, tmp_path / "b")
    sums = [writer.write(handle_of("planner", version, 1), filling()) for version in range(5)]
    writer.get(handle_of("planner", 4, 1), sums[4], learner=True)
    assert not Counted.fetched  # it wrote them
    for _ in range(2):
        folder = reader.get(handle_of("planner", 4, 1), sums[4])
    assert sorted(Counted.fetched) == sorted({"manifest.json", *FILES} - {"learner.json", "learner.safetensors"})
    assert entries(folder) == sorted(Counted.fetched)
    Counted.fetched.clear()
    reader.get(handle_of("planner", 4, 1), sums[4], learner=True)
    assert Counted.fetched == ["learner.json", "learner.safetensors"]


def test_of_what_was_fetched_the_newest_two_stay(counted: str, tmp_path: Path) -> None:
    writer, reader = WeightStore(counted, tmp_path / "a"), WeightStore(counted, tmp_path / "b")
    sums = [writer.write(handle_of("planner", version, 1), filling()) for version in range(12)]
    assert entries(tmp_path / "a" / "weights" / "planner") == ["v10-1", "v11-1"]
    for version in (9, 10, 11, 0):  # an old one that is asked for
        folder = reader.get(handle_of("planner", version, 1), sums[version])
    assert entries(folder.parent) == ["v0-1", "v10-1", "v11-1"]


def fetching(folder: str, sums: list[str], seed: int) -> None:
    place, draw = place_in(Path(folder), "folder behind a driver", outage_s=20), random.Random(seed)
    for _ in range(60):
        version = draw.choice([7, 8, 9])
        copy = place.get(handle_of("planner", version, 1), sums[version])
        if version > 7:  # that one may be gone again: it is not of the newest two
            assert (copy / WEIGHTS).read_bytes() == bytes([version]) * 100_000
        if draw.random() < 0.3:
            (Path(folder) / "cache" / handle_of("planner", version, 1) / "config.json").unlink(missing_ok=True)


def test_processes_of_one_machine_fetch_into_one_cache(tmp_path: Path) -> None:
    place = place_in(tmp_path, "folder behind a driver")
    sums = [place.write(handle_of("planner", v, 1), filling(bytes([v]) * 100_000)) for v in range(10)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=fetching, args=(str(tmp_path), sums, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not [name for name in entries(tmp_path / "cache" / handle_of("planner", 9, 1)) if name.startswith(".")]
