"""A run folder: where everything of one run lies.

::

    config.toml         the resolved recipe          metrics.jsonl, summary.json, curves.png    report/
    store.db            groups, rewards, versions    models/AGENT       where training began
    weights/AGENT/vN-F  versions, the newest few     reference/AGENT    what a KL term compares with
    parts/NAME/         metrics and log of one process, where a run has several

The store may be a database elsewhere and the weights at another place (``store`` and ``weights`` of the recipe); then
every machine has a run folder of its own.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mgrpo.config import Config, dump, load, settled
from mgrpo.config.registry import shorten
from mgrpo.config.vocabulary import closed_vocabulary
from mgrpo.errors import DataError, RunFolderError, StoreTimeout, UserError
from mgrpo.store.base import RunInfo, Store, WeightVersion
from mgrpo.store.opening import STORE_VARIABLE, open_store, refuse_password
from mgrpo.store.weights import WeightStore

_BEGINNING_S = 120.0  # longest time for another process to write its first files
# What may differ between a run's beginning and its going on, or between its machines.
_LOCAL = frozenset({"trackers", "store", "weights", "launch"})


@dataclass(frozen=True, slots=True)
class Hold:
    """One process's hold on a run, until it is closed."""

    config: Config  # the recipe as the run keeps it
    store: Store
    weights: WeightStore
    lock: IO[str]
    alone: bool = True  # no other process has one meanwhile

    def close(self) -> None:
        self.store.close()
        self.lock.close()


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def store_file(self) -> Path:
        return self.path / "store.db"

    def part(self, name: str) -> Path:
        """The folder of one process. Raises UserError for a name that can be none."""
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise UserError(f"--name {name}: letters, digits, dots, dashes and underscores, a letter or digit first")
        return self.path / "parts" / name

    def store_url(self, config: Config) -> str | Path:
        """Where the run's store is: MGRPO_STORE, which may hold a password, else what the recipe says, else a file."""
        return os.environ.get(STORE_VARIABLE) or config.store or self.store_file

    def weight_store(self, config: Config, run: RunInfo, outage_s: float | None = None) -> WeightStore:
        """Where the run's weights are: in its folder, or below the recipe's URL, which other runs may use too."""
        outage_s = config.outage_timeout_s if outage_s is None else outage_s
        place = f"{config.weights.rstrip('/')}/{config.name}-{run.created:.0f}" if config.weights else self.path
        return WeightStore(place, self.path / "cache", outage_s)

    def begin(self, config: Config, resume: bool) -> Hold:
        """Make the folder, or go on with it, for this process alone.

        Raises RunFolderError where it is used and ``resume`` is False, not there and ``resume`` is True, held by
        another process, or not writable.
        """
        return self._hold(config, resume, alone=True)

    def join(self, config: Config, resume: bool | None = None) -> Hold:
        """Make the folder, or go on with it, together with other processes that join it.

        ``resume`` None is whichever it needs. Raises RunFolderError as `begin`, where a process holds it alone, and
        where its recipe or the store's is another one.
        """
        return self._hold(config, resume, alone=False)

    def _hold(self, config: Config, resume: bool | None, alone: bool) -> Hold:
        with _explained(self.path):
            config = self._checked(config, resume)
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._lock(alone)
            try:
                with self._beginning():
                    if not alone:  # another part may have begun the run since
                        config = self._checked(config, None)
                    store = self._write(config)
                    return Hold(config, store, self.weight_store(config, store.run), lock, alone)
            except BaseException:
                lock.close()
                raise

    def _checked(self, config: Config, resume: bool | None) -> Config:
        """The recipe as the run keeps it, in a file that others may read. Writes nothing."""
        if config.store is not None:
            refuse_password(config.store, "store")
        self.weight_store(config, RunInfo(config.seed))  # raises as that does
        threads = os.cpu_count() or 1
        used = self.path.exists() and any(not entry.name.startswith(".") for entry in self.path.iterdir())
        if self.config_file.exists():  # asked after `used`: it is the first file of a run
            if resume is False:
                raise RunFolderError(f"{self.path} holds a run already; add --resume to go on, or name another folder")
            before = load(self.config_file)
            places = {key: getattr(config, key) or getattr(before, key) for key in ("store", "weights")}
            config = settled(config.model_copy(update=places), before.threads or threads)
            self._check_same(before, config)
            return config
        elif resume:
            raise RunFolderError(f"{self.path}: no run to resume there (no config.toml)")
        elif used:
            raise RunFolderError(f"{self.path} is not empty and holds no run; name another folder")
        return settled(config, threads)

    def _lock(self, alone: bool) -> IO[str]:
        """Held until it is closed, at the latest by the system when the process ends."""
        file = (self.path / ".lock").open("a")
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise RunFolderError(
                f"{self.path}: the run is in use by another process; wait for it, or stop it and resume"
            ) from error
        return file

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        """The parts of a run on one machine make what is not there one after the other."""
        descriptor, deadline = os.open(self.path, os.O_RDONLY), time.monotonic() + _BEGINNING_S
        try:
            while not _locked(descriptor):
                if time.monotonic() > deadline:
                    raise StoreTimeout(f"waited {_BEGINNING_S:g} s for another process to begin the run in {self.path}")
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def _write(self, config: Config) -> Store:
        new, temporary = not self.config_file.exists(), self.path / ".config.toml.tmp"
        temporary.write_text(dump(config), encoding="utf-8")
        temporary.replace(self.config_file)  # a run is there from the moment its whole config.toml is
        try:
            return self._open_store(config)
        except RunFolderError:
            if new:
                self.config_file.unlink()  # the store is of another run, which the right recipe may still join
            raise

    def _open_store(self, config: Config) -> Store:
        url, began = self.store_url(config), any(self.path.glob("weights/*/v*"))
        if url == self.store_file and began:  # a store that is gone or empty has lost its groups
            return open_store(url, outage_s=config.outage_timeout_s)
        store = open_store(url, RunInfo(config.seed, config.model_dump(mode="json")), outage_s=config.outage_timeout_s)
        if found := _difference(_portable(store.run.config), _portable(config.model_dump(mode="json")), ""):
            store.close()
            raise RunFolderError(f"{self.path}: the recipe differs from that of the store's run: {found.lstrip('.')}")
        return store

    def _check_same(self, run: Config, config: Config) -> None:
        before, now = run.model_dump(mode="json"), config.model_dump(mode="json")
        for key in now:
            if key not in _LOCAL and (found := _difference(before[key], now[key], key)):
                raise RunFolderError(
                    f"{self.config_file}: the recipe differs from the run's: {found};"
                    f" resume with the run's own: mgrpo train {self.path} --resume"
                )

    def published(self, store: Store, agent: str, version: int | None = None) -> WeightVersion:
        """The newest weights of a trained agent, or those of ``version``. Raises DataError where they are not there."""
        every = {p.weights.version: p.weights for p in store.publications(agent)}
        place = self.weight_store(load(self.config_file), store.run)
        kept = [number for number, weights in every.items() if place.exists(weights.handle)]
        chosen = max(every, default=None) if version is None else version
        if chosen is None or (chosen not in kept and version is not None):
            raise DataError(
                f"{self.path}: no version {version} of {agent}; kept: {', '.join(map(str, kept)) or 'none'}"
            )
        return every[chosen]

    def open(self) -> tuple[Config, Store]:
        """An existing run, to read."""
        with _explained(self.path):
            if not self.config_file.is_file():
                raise RunFolderError(f"{self.path}: no run there (no config.toml)")
        config = load(self.config_file)
        return config, open_store(self.store_url(config))

    def models(self, config: Config) -> dict[str, Path]:
        """The folder of the model each agent starts from; tiny ones are written on the first call."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._beginning():
            own = {
                name: self._model(config, index, name)
                for index, name in enumerate(config.agents)
                if config.owner(name) == name
            }
        return {name: own[config.owner(name)] for name in config.agents}

    def _model(self, config: Config, index: int, name: str) -> Path:
        model = config.agents[name].model
        assert model is not None  # agents that share weights have none
        if isinstance(model, str):
            check_model_folder(model, f"agents.{name}.model")
            return Path(model)
        folder = self.path / "models" / name
        if not (folder / "config.json").is_file():
            from mgrpo.agents.formats import FORMATS
            from mgrpo.policy.tiny import write_tiny

            words = closed_vocabulary(config)
            controls = FORMATS[config.agents[name].format].controls
            temporary = folder.with_name(f".{name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            write_tiny(temporary, model, words, controls, seed=config.seed * 1000 + index)
            temporary.rename(folder)
        return folder


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(f"{path}: cannot be a run folder ({reason}); name another one") from error


def _portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says on every machine: without what is local, and of absolute paths the last part."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(item) for key, item in value.items()}
        if isinstance(value, list):
            return [bare(item) for item in value]
        return Path(value).name if isinstance(value, str) and value.startswith("/") else value

    return {key: bare(value) for key, value in config.items() if key not in _LOCAL | {"threads"}}


def _difference(before: Any, now: Any, key: str) -> str:
    """The first key below ``key`` with another value, and both values; "" where all are equal."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        parts = ((before[name], now[name], f"{key}.{name}") for name in now)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = ((old, new, f"{key}.{i}") for i, (old, new) in enumerate(zip(before, now, strict=True)))
    else:
        return "" if before == now else f"{key} was {shorten(before)}, is {shorten(now)}"
    return next((found for old, new, name in parts if (found := _difference(old, new, name))), "")


def check_model_folder(folder: str | Path, where: str) -> None:
    """Raise DataError that names the key ``where`` unless ``folder`` holds a model."""
    if not Path(folder).is_dir():
        raise DataError(f"{where}: no folder {str(folder)!r}; give a folder written by save_pretrained")
    if not (Path(folder) / "config.json").is_file():
        raise DataError(f"{where}: {folder} holds no config.json; give a folder written by save_pretrained")
