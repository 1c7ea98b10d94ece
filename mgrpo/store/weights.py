"""Where weights lie between the learner that publishes them and the engines that load them: any fsspec URL.

::

    WeightStore(url, cache, outage_s=0.0)
    write(handle, fill) -> checksum              a version; ``fill(folder)`` writes its files into an empty folder
    get(handle, checksum, learner=False) -> folder          a local folder, every file of it verified
    exists(handle) -> bool; keep(handle, place); prune(agent, keep, in_use)
    handle_of(agent, version, fence) -> "weights/planner/v7-31"

    HANDLE/manifest.json      {"files": {name: sha256}}; the checksum of a version is the sha256 of these bytes
    HANDLE/*.safetensors      weights (any number of shards) and optimiser state; *.json: whatever else was written

A version is there whole or not at all: on a local disk everything is synced and then renamed, elsewhere the manifest
comes last. A version that is whole is never written again. Handles hold the fence of the lease they were written under,
so that a learner which slept through its lease writes beside what its successor published under the same number, and
the store, which refuses that learner's publication, says which of the two is real. `prune` removes the other.

    full disk, lost connection     tried again for ``outage_s`` seconds, then StoreUnavailable
    no right to write there        UserError at once
    missing, damaged, not ours     CheckpointError naming the file
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import NamedTuple

from mgrpo.errors import CheckpointError
from mgrpo.store.files import Files, reason

MANIFEST = "manifest.json"
CACHED = 2  # versions of an agent that are kept of those fetched from elsewhere

_DAMAGED = f"damaged (its sha256 is not the one in {MANIFEST})"
_LOG = logging.getLogger("mgrpo.store")
_VERSION = re.compile(r"(\.)?v(\d+)(?:-(\d+))?(?(1)\.[\w.]+)")  # with a dot before and words after it: being written
_FILE = re.compile(r"\w[\w.-]*")
_LEARNERS = re.compile(r"learner\b.*")  # of no use to an engine
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}  # of file systems where folders need no sync
_THREADS = 8  # that hash and sync files at once


def handle_of(agent: str, version: int, fence: int) -> str:
    """Where a version lies that is written under a lease with ``fence``."""
    return f"weights/{agent}/v{version}-{fence}"


class WeightStore:
    """Folders of files under ``url``. What lies elsewhere is fetched into the local folder ``cache`` to be read.

    Raises UserError for a URL that nothing installed can serve, or with a password in it.
    """

    def __init__(self, url: str | Path, cache: Path, outage_s: float = 0.0) -> None:
        self._files, self._cache = Files(url, outage_s), cache

    # ------------------------------------------------------------ writing

    def write(self, handle: str, fill: Callable[[Path], object]) -> str:
        """Have ``fill`` write files into an empty local folder, move that to ``handle`` and return its checksum.

        After an outage ``fill`` is called again: what could not be synced must be written anew. Raises as said above;
        then nothing is left behind.
        """

        def attempt() -> str:
            staged = self._staging(handle)
            try:
                with _while_there(staged):
                    fill(staged)
                    return self._put(staged, handle)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

        return self._files.outlast(f"writing {handle}", attempt)

    def _staging(self, handle: str) -> Path:
        """A new empty local folder to write a version into, from where `_put` can move it."""
        place = self._here(handle)
        _make(place.parent)
        for left in place.parent.glob(f".{escape(place.name)}.*"):
            shutil.rmtree(left, ignore_errors=True)
        staged = place.with_name(f".{place.name}.{secrets.token_hex(6)}")
        staged.mkdir()
        return staged

    def _put(self, staged: Path, handle: str) -> str:
        """Move the finished folder ``staged`` to ``handle`` and return its checksum. Raises OSError; see `write`."""
        manifest = _seal(staged)
        found = self._files.read(f"{handle}/{MANIFEST}")
        if found is None and self._files.local:
            self._move(staged, handle)
        elif found is None:
            self._upload(staged, handle)
        elif found != manifest:
            place = self._files.path(handle)
            raise CheckpointError(f"{place}: other weights are there already; give every run a place of its own")
        return hashlib.sha256(manifest).hexdigest()

    def _move(self, staged: Path, handle: str) -> None:
        place = self._here(handle)
        try:
            staged.rename(place)
        except OSError as error:
            if error.errno not in _OCCUPIED or (place / MANIFEST).exists():
                raise
            shutil.rmtree(place)  # half removed
            staged.rename(place)
        _sync(place.parent)

    def _upload(self, staged: Path, handle: str) -> None:
        names = [path.name for path in sorted(staged.iterdir()) if path.name != MANIFEST]
        self._files.upload(staged, names, MANIFEST, handle)
        folder = self._here(handle)  # who reads it on this machine need not fetch it
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process found it too old to keep
            for name in [*names, MANIFEST]:
                (staged / name).replace(folder / name)
        _evict(folder)

    def keep(self, handle: str, place: str) -> None:
        """Copy a version to ``place``, which is never pruned, without what is the learner's own. Nothing where one is
        there already."""
        if self.exists(place):
            return
        folder = self.get(handle, None)
        names = _listed((folder / MANIFEST).read_bytes(), folder / MANIFEST, learner=False)

        def copy(staged: Path) -> None:
            for name in names:
                shutil.copy2(folder / name, staged / name)

        self.write(place, copy)

    def prune(self, agent: str, keep: int, in_use: Collection[int] = ()) -> None:
        """Delete the versions of ``agent`` but the newest ``keep`` (at least 2) and those ``in_use``; and what nobody
        published: numbers that were written again under a later lease, and what killed writers left.

        Whoever calls this, and however late, touches neither what was published last nor what is being written. What
        cannot be deleted now is by the next call.
        """
        if keep < 2:
            raise ValueError(f"keep = {keep}: the newest version may not be published yet, so that 2 must stay")
        folder = f"weights/{agent}"
        try:
            found = [written for name in self._files.names(folder) if (written := _written(name))]
            for written in _superfluous(found, keep, in_use):
                self._remove(f"{folder}/{written.name}")
        except OSError as error:
            _LOG.warning("weights %s: old versions stay for now: %s", self._files.path(folder), reason(error))

    def _remove(self, handle: str) -> None:
        if self._files.local:
            _delete(self._here(handle))
        else:
            self._files.remove(f"{handle}/{MANIFEST}")  # first: what is half gone is no version
            self._files.remove(handle, folder=True)

    # ------------------------------------------------------------ reading

    def exists(self, handle: str) -> bool:
        look = partial(self._files.read, f"{handle}/{MANIFEST}")
        return self._files.outlast(f"looking for {handle}", look, CheckpointError) is not None

    def get(self, handle: str, checksum: str | None, learner: bool = False) -> Path:
        """A local folder with the files of a version, each of them verified; of the learner's own only on demand.

        ``checksum`` is what was returned when it was written; None trusts the manifest. Raises CheckpointError naming
        the file that is missing or differs from what was written, StoreUnavailable where it cannot be fetched.
        """
        read = partial(self._verified if self._files.local else self._fetched, handle, checksum, learner)
        return self._files.outlast(f"reading {handle}", read, CheckpointError)

    def _verified(self, handle: str, checksum: str | None, learner: bool) -> Path:
        folder = self._here(handle)
        wanted = _listed(self._manifest(handle, checksum), folder / MANIFEST, learner)
        for name, fault in _faults(folder, wanted).items():
            raise CheckpointError(f"{folder / name}: {fault}; restore it")
        return folder

    def _fetched(self, handle: str, checksum: str | None, learner: bool) -> Path:
        """The local copy of a version; what is not there, or damaged, is fetched."""
        folder = self._here(handle)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            known = (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else b""
            manifest = known if _sum(known) == checksum else self._manifest(handle, checksum)
            wanted = _listed(manifest, self._files.path(f"{handle}/{MANIFEST}"), learner)
            for name in _faults(folder, wanted):
                self._fetch(handle, name, wanted[name])
            if known != manifest:
                self._fetch(handle, MANIFEST, _sum(manifest))
        except FileNotFoundError as error:
            raise _deleted(folder) from error
        _evict(folder)
        return folder

    def _fetch(self, handle: str, name: str, expected: str) -> None:
        """Under a name of its own first, so that processes which fetch the same file do not meet."""
        source, folder = f"{handle}/{name}", self._here(handle)
        arriving = folder / f".{name}.{secrets.token_hex(6)}"
        try:
            self._files.download(source, arriving)
            if _sha256(arriving) != expected:
                raise CheckpointError(f"{self._files.path(source)}: {_DAMAGED}; restore it")
            arriving.replace(folder / name)
        except FileNotFoundError as error:
            if self._files.exists(source):
                raise
            raise CheckpointError(f"{self._files.path(source)}: missing; restore it") from error
        finally:
            arriving.unlink(missing_ok=True)

    def _manifest(self, handle: str, checksum: str | None) -> bytes:
        place = self._files.path(f"{handle}/{MANIFEST}")
        manifest = self._files.read(f"{handle}/{MANIFEST}")
        if manifest is None:
            raise CheckpointError(f"{place}: missing, so that no version is there; restore it")
        if checksum is not None and _sum(manifest) != checksum:
            raise CheckpointError(f"{place}: damaged, or not of the weights that the store published; restore it")
        return manifest

    def _here(self, handle: str) -> Path:
        """The folder on this machine where ``handle`` is, or is fetched to."""
        path = self._files.path(handle)
        return Path(path) if self._files.local else self._cache / handle


# ---------------------------------------------------------------- names


class _Written(NamedTuple):
    """A folder of a version: whole, half there or (``name`` begins with a dot) being written."""

    version: int
    fence: int
    name: str


def _written(name: str) -> _Written | None:
    match = _VERSION.fullmatch(name)
    return _Written(int(match[2]), int(match[3] or 0), name) if match else None


def _superfluous(found: Collection[_Written], keep: int, in_use: Collection[int]) -> list[_Written]:
    """Those that `WeightStore.prune` deletes."""
    placed = sorted(one for one in found if not one.name.startswith("."))
    kept = {*sorted({one.version for one in placed})[-keep:], *in_use}
    real = {one.version: one for one in placed if one.version in kept}  # of a number the one of the latest fence
    last_fence = max((one.fence for one in placed), default=0)
    left = [one for one in found if one.name.startswith(".") and one.fence < last_fence]
    return left + [one for one in placed if one not in real.values()]


def _evict(folder: Path) -> None:
    """Delete the oldest versions beside ``folder`` in a cache, and what killed processes left there."""
    found = [written for path in folder.parent.iterdir() if (written := _written(path.name))]
    own = {written.version for written in found if written.name == folder.name}
    for written in _superfluous(found, CACHED, own) if own else ():
        _delete(folder.parent / written.name)


# ---------------------------------------------------------------- contents


def _listed(manifest: bytes, place: str | Path, learner: bool) -> dict[str, str]:
    """Checksums of the files by name. Raises CheckpointError where that is no manifest, or names other places."""
    try:
        files = {str(name): str(expected) for name, expected in json.loads(manifest)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place}: not readable: {error!r}; restore it") from error
    if wrong := [name for name in files if not _FILE.fullmatch(name)]:
        raise CheckpointError(f"{place}: {wrong[0]!r} is no name of a file in a version; restore it")
    return {name: expected for name, expected in files.items() if learner or not _LEARNERS.fullmatch(name)}


def _seal(folder: Path) -> bytes:
    """Write the manifest of a folder; everything in it is on the disk when this returns."""
    paths = sorted(folder.iterdir())
    with ThreadPoolExecutor(_THREADS) as pool:
        syncing, hashing = pool.map(_sync, paths), pool.map(_sha256, paths)
        sums = dict(zip((path.name for path in paths), hashing, strict=True))
        list(syncing)
    manifest = json.dumps({"files": sums}, indent=1).encode()
    (folder / MANIFEST).write_bytes(manifest)
    _sync(folder / MANIFEST)
    _sync(folder)
    return manifest


def _faults(folder: Path, wanted: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with the files that are not as they were written."""

    def fault(name: str) -> str:
        try:
            same = _sha256(folder / name) == wanted[name]
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"not readable ({reason(error)})"
        return "" if same else _DAMAGED

    with ThreadPoolExecutor(_THREADS) as pool:
        return {name: wrong for name, wrong in zip(wanted, pool.map(fault, wanted), strict=True) if wrong}


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _while_there(folder: Path) -> Iterator[None]:
    """Another process that deletes ``folder`` meanwhile is an outage: what was done in it can be done again."""
    try:
        yield
    except FileNotFoundError as error:
        if folder.is_dir():
            raise
        raise _deleted(folder) from error


def _deleted(folder: Path) -> OSError:
    return OSError(errno.EAGAIN, f"{folder} was deleted by another process")


def _delete(folder: Path) -> None:
    """All at once for whoever looks; what a kill leaves has the name of a version that is being written."""
    gone = folder.with_name(f"{'' if folder.name.startswith('.') else '.'}{folder.name}.{secrets.token_hex(6)}")
    try:
        folder.rename(gone)
    except FileNotFoundError:  # another process did it
        return
    shutil.rmtree(gone, ignore_errors=True)


def _make(folder: Path) -> None:
    """The folder and those above it, each of them on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
