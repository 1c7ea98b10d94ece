"""Parts of a run are killed, paused and starved at any moment: nothing is lost, nothing is trained twice.

What is disturbed, how, and what must be true afterwards is in benchmarks/chaos.py and the files beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, ROOT
from postgres import PostgresServer, binaries_or_skip
from sqlalchemy import create_engine, make_url, select
from sqlalchemy.exc import OperationalError
from tiny_recipe import REINFORCE, WARM_UP, tiny

sys.path.append(str(ROOT / "benchmarks"))

import chaos  # noqa: E402
from chaos_checks import notes  # noqa: E402
from chaos_forks import Nursery  # noqa: E402
from chaos_rounds import Round, begin, disturbed, environment, nursery, of_session  # noqa: E402

from mgrpo.config import dump  # noqa: E402
from mgrpo.errors import RunFolderError  # noqa: E402
from mgrpo.run import RunFolder  # noqa: E402
from mgrpo.store.base import Publication, Store  # noqa: E402
from mgrpo.store.opening import open_store  # noqa: E402
from mgrpo.store.schema import leases  # noqa: E402

KILLS = 100
REAL_KILLS = 10
SECONDS = 60.0  # for whatever is waited for
STORES = ("sqlite", "postgresql")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def forks(compiled: Path) -> Iterator[Nursery]:
    with nursery(compiled) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that this module alone stops and starts."""
    with PostgresServer(binaries_or_skip()) as started:
        yield started


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest) -> chaos.Stores:
    return chaos.Files() if request.param == "sqlite" else chaos.Server(request.getfixturevalue("server"))


async def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.02)
    return found


# ---------------------------------------------------------------- kills


def test_a_hundred_kills_lose_and_double_nothing(stores: chaos.Stores, forks: Nursery, tmp_path: Path) -> None:
    rounds = list(chaos.run(tmp_path, forks, KILLS, stores, seed=1))
    result = chaos.result_of(rounds, stores.name)
    print(json.dumps(result, indent=1))
    assert (result["kills"], result["lost"], result["duplicated"]) == (KILLS, 0, 0), result["faults"]
    assert result["faults"] == [] and result["other_deaths"] == []
    assert all(own["kills"] >= 10 for own in result["by_kind"].values())
    if isinstance(stores, chaos.Server):
        assert result["outages"] >= 2


# ---------------------------------------------------------------- owners that sleep through their leases


class Watcher:
    """Looks at the store of a run that is at work."""

    def __init__(self, round: Round) -> None:
        where = round.folder / "store.db" if round.store is None else round.store
        self.store: Store = open_store(where)
        url = make_url(f"sqlite:///{where}" if round.store is None else str(where))
        self._file = url.drivername == "sqlite"
        options = {"timeout": 0.1} if self._file else {}
        self._engine = create_engine(
            url if self._file else url.set(drivername="postgresql+psycopg"), connect_args=options
        )

    def close(self) -> None:
        self.store.close()
        self._engine.dispose()

    def held(self, owner: str) -> dict[str, int]:
        """Fences of the owner's leases, by name."""
        query = select(leases).where(leases.c.owner == owner, leases.c.done.is_(False))
        with self._engine.connect() as connection:
            return {row.name: row.fence for row in connection.execute(query)}

    def fence(self, name: str) -> int | None:
        """None where nobody holds it: it was given back."""
        with self._engine.connect() as connection:
            return connection.execute(select(leases.c.fence).where(leases.c.name == name)).scalar()

    def writable(self) -> bool:
        """Whether nobody is in the middle of a write that holds up all others."""
        locks = ["SELECT * FROM runs FOR UPDATE NOWAIT", "SELECT * FROM leases FOR UPDATE NOWAIT"]
        try:
            with self._engine.connect() as connection:
                for statement in ["BEGIN IMMEDIATE"] if self._file else locks:
                    connection.exec_driver_sql(statement)
        except OperationalError:
            return False
        return True


@asynccontextmanager
async def paused(forks: Nursery, watcher: Watcher, part: str, kind: str) -> AsyncIterator[tuple[int, str, int]]:
    """Suspends a part that holds a lease of this kind, outside of any write; yields its process, the lease's name and
    its fence."""
    draw, deadline = random.Random(3), time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < deadline, f"{part} never held a lease"
        await asyncio.sleep(draw.uniform(0.0, 0.2))
        pid = forks.signal(part, signal.SIGSTOP)
        held = {name: fence for name, fence in watcher.held(part).items() if name.startswith(kind)}
        if pid is not None and held and any(watcher.writable() for _ in range(20)):
            break
        forks.signal(part, signal.SIGCONT)
    try:
        yield pid, *next(iter(held.items()))
    finally:
        forks.signal(part, signal.SIGCONT)


def refused(round: Round, part: str, what: str, pid: int, fence: int) -> bool:
    mine = [note for note in notes(round.folder).get(part, ()) if note["pid"] == pid]
    return any(note["what"] == f"{what} refused" and note["fence"] == fence for note in mine)


def test_a_collector_that_sleeps_through_its_lease_writes_nothing(
    stores: chaos.Stores, forks: Nursery, tmp_path: Path
) -> None:
    round = begin(tmp_path / "home", forks, stores.new(), lease_s=1.0)
    slept: list[tuple[int, int]] = []

    async def disturb() -> None:
        watcher = Watcher(round)
        for part in ("collect-0", "collect-1"):
            async with paused(forks, watcher, part, "collect/") as (pid, lease, fence):
                group = int(lease.partition("/")[2])
                there = partial(watcher.store.missing, range(group, group + 1))
                await until(lambda there=there: not there(), f"another to commit group {group}")
                assert watcher.fence(lease) != fence
            await until(partial(refused, round, part, "commit", pid, fence), f"{part} to be refused")
            slept.append((pid, group))
        watcher.close()

    asyncio.run(disturbed(round, disturb))
    assert round.findings.clean, round.findings
    assert round.deaths == [], "it goes on with other work"
    store = open_store(round.folder / "store.db" if round.store is None else round.store)
    for pid, group in slept:
        assert {reward.parts["process"] for reward in store.group(group)[1].values()} != {pid}
    store.close()
    logs = "".join((round.folder / "parts" / f"collect-{i}" / "log.txt").read_text() for i in range(2))
    assert logs.count("go back: collect-") == len(slept) == 2


def test_a_learner_that_sleeps_through_its_lease_publishes_nothing(
    stores: chaos.Stores, forks: Nursery, tmp_path: Path
) -> None:
    round = begin(tmp_path / "home", forks, stores.new(), lease_s=1.0)
    first = next(plan for plan in round.plans if plan.name == "learn-planner")
    argv = tuple(word.replace("learn-planner", "learn-planner-too") for word in first.argv)
    round.plans = [*round.plans, replace(first, name="learn-planner-too", argv=argv)]
    fences: list[int] = []

    async def disturb() -> None:
        watcher = Watcher(round)
        await until(lambda: watcher.store.trained("planner") > 4, "the first steps")
        owner = "learn-planner" if watcher.held("learn-planner") else "learn-planner-too"
        async with paused(forks, watcher, owner, "learn/") as (pid, lease, fence):
            before = watcher.store.trained("planner")
            await until(lambda: watcher.store.trained("planner") > before, "the other learner to publish")
            assert watcher.fence(lease) != fence
        await until(lambda: refused(round, owner, "publish", pid, fence), f"{owner} to be refused")
        fences.append(fence)
        watcher.close()

    asyncio.run(disturbed(round, disturb))
    assert round.findings.clean, round.findings
    assert len(round.deaths) == 1 and "LeaseLost" in round.deaths[0], round.deaths
    store = open_store(round.folder / "store.db" if round.store is None else round.store)
    written = [fence_of(publication) for publication in store.publications("planner")]
    store.close()
    assert written == sorted(written) and written[0] == fences[0] < written[-1]


def fence_of(publication: Publication) -> int:
    return int(publication.weights.handle.rpartition("-")[2])


# ---------------------------------------------------------------- a full disk


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system ({mounted.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(filler: Path) -> None:
    """Take every byte that is free."""
    with filler.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_a_full_disk_pauses_the_run_until_there_is_space(forks: Nursery, tmp_path: Path) -> None:
    """Of the whole run folder: store, weights, metrics and logs."""
    with small_disk(tmp_path / "disk", 24) as disk:
        round = begin(disk / "home", forks, None, max_staleness=1)
        stood = []

        async def disturb() -> None:
            watcher = Watcher(round)
            for _ in range(2):
                before = watcher.store.trained("planner")
                await until(lambda before=before: watcher.store.trained("planner") > before + 4, "some steps")
                until_ = time.monotonic() + 3.0
                while time.monotonic() < until_:
                    fill(disk / "filler")
                    await asyncio.sleep(0.05)
                stood.append(shutil.disk_usage(disk).free)
                (disk / "filler").unlink()
            watcher.close()

        asyncio.run(disturbed(round, disturb))
        logs = "".join(path.read_text() for path in round.folder.glob("parts/*/log.txt"))
    assert stood == [0, 0] and "works again after" in logs
    assert round.findings.clean, round.findings
    assert round.deaths == []


# ---------------------------------------------------------------- real learners and engines, under `mgrpo launch`

REAL = tiny(
    stages=[
        {**WARM_UP, "steps": 6},
        {**REINFORCE, "steps": 6, "learner": {"kl_coef": 0.05, "num_iterations": 2}},
    ],
    reward="tiny_recipe:token_reward",
    evaluation={"questions": 1, "tasks": {"split": "test"}, "closed_book": False, "examples": 0},
    launch={"max_restarts": 100},
    lease_s=5.0,
)


@pytest.fixture(scope="module")
def children(compiled: Path) -> dict[str, str]:
    own = environment(compiled)
    return own | {"PYTHONPATH": own["PYTHONPATH"] + os.pathsep + str(ROOT / "tests")}


class Launched:
    """`mgrpo launch` at work, and its parts by what it writes of them."""

    def __init__(self, recipe: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._events = folder, folder / "parts" / "events.jsonl"
        command = [*COMMAND, "launch", str(recipe), "--run", str(folder)]
        self._output = (folder.parent / "launch.txt").open("wb")
        self.process = subprocess.Popen(command, env=environment, stdout=self._output, stderr=subprocess.STDOUT)

    def close(self) -> None:
        self.process.kill()  # its parts go with it
        self.process.wait()
        self._output.close()

    @property
    def output(self) -> str:
        return (self._folder.parent / "launch.txt").read_text()

    def parts(self) -> dict[str, int]:
        """Processes of the parts that run."""
        found: dict[str, int] = {}
        for line in self._events.read_text().splitlines() if self._events.exists() else ():
            event = json.loads(line)
            if event["event"] in ("start", "restart"):
                found[event["part"]] = event["pid"]
            else:
                found.pop(event["part"], None)
        return found

    def progress(self) -> int:
        """Grows with every group and every publication."""
        try:
            _, store = RunFolder(self._folder).open()
        except RunFolderError:  # it begins in a moment
            return 0
        with closing(store):
            return store.committed() + len(store.publications())

    def kill(self, kills: int, draw: random.Random) -> list[str]:
        """Parts in random order, and each of them, at random moments; every time after the run got on a little."""
        killed: list[str] = []
        order: list[str] = []
        while len(killed) < kills:
            before, deadline = self.progress(), time.monotonic() + 2 * SECONDS
            while self.progress() <= before:
                assert self.process.poll() is None, f"it ended after {len(killed)} kills:\n{self.output}"
                assert time.monotonic() < deadline, f"it stands still after {killed}:\n{self.output}"
                time.sleep(0.05)
            time.sleep(draw.uniform(0.0, 0.5))
            there = self.parts()
            order = order or draw.sample(sorted(there), len(there))
            name = next((name for name in order if name in there), None)
            if name is not None:
                order.remove(name)
                os.kill(there[name], signal.SIGKILL)
                killed.append(name)
        return killed


def test_a_launched_run_whose_parts_are_killed_ends_with_the_weights_of_one_that_nothing_disturbed(
    tmp_path: Path, children: dict[str, str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump(REAL))
    calm = [*COMMAND, "train", str(recipe), "--run", str(tmp_path / "calm")]
    done = subprocess.run(calm, env=children, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    launched = Launched(recipe, tmp_path / "run", children)
    try:
        killed = launched.kill(REAL_KILLS, random.Random(7))
        assert launched.process.wait(300) == 0, launched.output
    finally:
        launched.close()
    assert len(killed) == REAL_KILLS and {"learn-planner", "learn-searcher", "collect-0", "tools-0"} <= set(killed)
    deaths = [json.loads(line) for line in (tmp_path / "run" / "parts" / "events.jsonl").read_text().splitlines()]
    assert [event["part"] for event in deaths if event["event"] == "death"] == killed
    assert not [event["pid"] for event in deaths if event["pid"] and of_session(event["pid"])]
    assert published(tmp_path / "run") == published(tmp_path / "calm")


def published(folder: Path) -> list[tuple[str, int, str, range]]:
    """Every version of every agent: the checksum of its files, and the groups it was made of."""
    _, store = RunFolder(folder).open()
    with closing(store):
        every = store.publications()
    return [(p.weights.agent, p.weights.version, p.weights.checksum, p.consumed) for p in every]
