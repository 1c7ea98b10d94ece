"""Parts of a run as processes of a test: started, watched and ended, every wait with a deadline and all their logs.

What a part imports takes seconds, so most are forked from one process that has imported it all; a ``fresh`` one is what
a user starts, ``python -m mgrpo.cli``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from command_line import ROOT

from mgrpo.config import Config, dump
from mgrpo.config.windows import total_groups
from mgrpo.errors import RunFolderError
from mgrpo.report.follow import last_lines
from mgrpo.report.metrics_log import metrics_files, read_metrics
from mgrpo.store.base import Part, Store
from mgrpo.store.opening import open_store
from mgrpo.types import Group, Trajectory, TrajectoryId

DEADLINE_S = 120.0  # of every wait; a busy machine is no failure
PRELOADED = [
    "anyio._backends._asyncio",
    "bm25s",
    "httpcore",
    "psycopg",
    "uvicorn.protocols.http.httptools_impl",
    "mgrpo.cli.parts",
    "mgrpo.collecting",
    "mgrpo.engines.decode",
    "mgrpo.engines.model",
    "mgrpo.learning",
    "mgrpo.parts",
    "mgrpo.policy.checkpoint",
    "mgrpo.policy.tiny",
    "mgrpo.train",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
]
_TESTS = ROOT / "tests"
_forking = multiprocessing.get_context("forkserver")


def _environment() -> dict[str, str]:
    """For Python: this package and what recipes name of the tests; compiled files, also where none are to be left."""
    found = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, _TESTS)))}
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        compiled = Path(tempfile.gettempdir()) / f"mgrpo-bytecode-{os.getuid()}"
        found |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(compiled)}
    return found


def _start_server() -> None:
    """The process that imports for all; it ends with this one."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in _environment().items():
            patch.setenv(key, value)
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


def _become(arguments: list[str], log: str, environment: Mapping[str, str | None], namespace: str, fresh: bool) -> None:
    """The rest of this process is ``mgrpo ARGUMENTS``."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for key, value in environment.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    if namespace:
        _enter(namespace)
    if fresh:
        os.environ |= _environment()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "mgrpo.cli", *arguments])
    from mgrpo.cli import main

    main(arguments)


def _enter(namespace: str) -> None:
    """This process is in the network namespace of that name from now on (setns of Linux)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class Running:
    """One process; ``log`` is all that it and those of its name before it wrote."""

    def __init__(self, name: str, log: Path, process: ForkServerProcess) -> None:
        self.name, self.log, self._process = name, log, process
        self.ends = False  # a test has asked for it

    @property
    def code(self) -> int | None:
        """The exit code, minus the signal that killed it, or None while it runs."""
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.ends = True
        self._process.kill()
        self._process.join()

    def stop(self, seconds: float = DEADLINE_S) -> int | None:
        """SIGTERM; the exit code."""
        self.ends = True
        self._process.terminate()
        self._process.join(seconds)
        assert self.code is not None, f"{self.name} goes on {seconds:g} s after SIGTERM:\n{self.said()}"
        return self.code

    def said(self, lines: int = 20) -> str:
        return "\n".join(reversed(last_lines(self.log, 0)[:lines])) if self.log.exists() else ""


class Parts:
    """The processes of one run on this machine. A context manager that ends them all.

    ``options`` go to every command, ``environment`` to every process. ``store`` is what this process opens: by default
    the one in the run folder.
    """

    def __init__(
        self,
        home: Path,
        config: Config,
        *options: str,
        run: str = "run",
        store: str = "",
        namespace: str = "",
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.folder, self.recipe, self.options = home / run, home / f"{run}.toml", options
        self.recipe.write_text(dump(config), encoding="utf-8")
        self.config, self._home, self._namespace = config, home, namespace
        self._environment = {"MGRPO_TOKEN": None, "MGRPO_STORE": None, **(environment or {})}
        self.every: list[Running] = []
        self._store_url = store or self.folder / "store.db"
        self._store: Store | None = None

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running in self.every:
            if running.code is None:
                running.kill()
        if self._store is not None:
            self._store.close()

    def start(self, *command: str, name: str = "", options: Iterable[str] = (), fresh: bool = False) -> Running:
        """``mgrpo COMMAND RECIPE --run RUN``; a part's name is made of its command."""
        name = name or "-".join([*command, "0"][: 2 if command[0] == "learn" else None])
        named = [] if command[0] in ("train", "launch") else ["--name", name]
        arguments = [*command, str(self.recipe), "--run", str(self.folder), *named, *self.options, *options]
        return self.run(name, arguments, fresh)

    def run(self, name: str, arguments: Iterable[str], fresh: bool = False) -> Running:
        """``mgrpo ARGUMENTS``."""
        _start_server()
        log = self._home / f"{name}.log"
        given = (list(map(str, arguments)), str(log), self._environment, self._namespace, fresh)
        process = _forking.Process(target=_become, args=given, daemon=True)
        process.start()
        self.every.append(Running(name, log, process))
        return self.every[-1]

    def all(self, *less: str) -> dict[str, Running]:
        """One part of each kind that the recipe needs, by name."""
        owners = [agent for agent in self.config.agents if self.config.owner(agent) == agent]
        commands = [
            *((["tools"],) if self.config.launch.tool_server else ()),
            *(["serve", owner] for owner in owners),
            *(["learn", owner] for owner in self.config.learners),
            ["collect"],
        ]
        started = [self.start(*command) for command in commands if command[0] not in less]
        return {running.name: running for running in started}

    # ------------------------------------------------------------ the store

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = self.until(self._opened, "the store to be there")
            assert self._store is not None
        return self._store

    def _opened(self) -> Store | None:
        with suppress(RunFolderError):  # not there yet, or without its tables
            return open_store(self._store_url)
        return None

    def part(self, name: str) -> Part | None:
        """As it announces itself."""
        return next((part for part in self.store.parts() if part.name == name), None)

    def records(self, kind: str, part: str = "") -> list[dict[str, Any]]:
        """What was written to metrics.jsonl, by all or by one part."""
        folder = self.folder / "parts" / part if part else self.folder
        return [record for record in read_metrics(folder) if record["kind"] == kind] if metrics_files(folder) else []

    # ------------------------------------------------------------ waiting

    def until(self, condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
        """What ``condition`` returns once that is true. Fails with all logs, at once where a part failed meanwhile."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            failed = [running for running in self.every if running.code and not running.ends]
            if failed or time.monotonic() > deadline:
                why = f"{failed[0].name} ended with {failed[0].code}" if failed else f"{seconds:g} s are over"
                pytest.fail(f"{why}, waiting for {what}\n{self.logs()}", pytrace=False)
            time.sleep(0.01)
        return found

    def committed(self, groups: int) -> None:
        self.until(lambda: self.store.committed() >= groups, f"{groups} groups to be committed")

    def trained(self, owner: str, groups: int) -> None:
        self.until(lambda: self.store.trained(owner) >= groups, f"{owner} to be trained on {groups} groups")

    def serves(self, name: str, version: int) -> Part:
        """Wait until the engine of that name serves ``version`` or a newer one."""

        def ready() -> Part | None:
            part = self.part(name)
            return part if part is not None and part.url and part.version >= version else None

        found: Part = self.until(ready, f"{name} to serve version {version}")
        return found

    def complete(self) -> None:
        """Wait until all that collect or learn have ended by themselves, with code 0."""
        workers = [r for r in self.every if not r.ends and not r.name.startswith(("serve", "tools"))]
        self.until(lambda: all(worker.code == 0 for worker in workers), "the run to be complete")

    def logs(self) -> str:
        logs = {running.log: running for running in self.every}
        return "\n".join(f"---- {r.name} (code {r.code})\n{r.said()}" for r in logs.values())


# ---------------------------------------------------------------- what a store holds


def weights(store: Store) -> dict[str, list[tuple[int, str, int, int]]]:
    """Of each agent's publications the version, the sum over all its files, and the groups consumed."""
    found: dict[str, list[tuple[int, str, int, int]]] = {}
    for p in store.publications():
        told = (p.weights.version, p.weights.checksum, p.consumed.start, p.consumed.stop)
        found.setdefault(p.weights.agent, []).append(told)
    return found


def sampled(store: Store) -> dict[TrajectoryId, Any]:
    """Every token of every group with its probability and its version, what it led to, and what that was worth."""
    found = {}
    for id in range(store.committed()):
        group, rewards = store.group(id)
        for trajectory in trajectories(group):
            turns = [(t.context_ids, t.token_ids, t.logprobs, t.version, t.reply) for t in trajectory.turns]
            found[trajectory.id] = (trajectory.parent, turns, trajectory.ending, rewards[trajectory.id])
    return found


def trajectories(group: Group) -> list[Trajectory]:
    return [trajectory for rollout in group.rollouts for trajectory in rollout.trajectories]


def assert_same_run(one: Store, other: Store) -> None:
    found, expected = sampled(one), sampled(other)
    assert found.keys() == expected.keys()
    assert [id for id in found if found[id] != expected[id]] == []
    assert weights(one) == weights(other)


def assert_ledger(store: Store, config: Config) -> None:
    """Every group is there once and whole, each agent was trained on all of them once, and versions have no gaps."""
    groups = total_groups(config)
    assert store.committed() == store.counts().groups == groups
    assert store.counts().failed_rollouts == 0
    for agent in config.learners:
        published = store.publications(agent)
        assert [id for p in published for id in p.consumed] == list(range(groups))
        versions = [p.weights.version for p in published]
        assert sorted(set(versions)) == list(range(max(versions) + 1)) and versions == sorted(versions)
