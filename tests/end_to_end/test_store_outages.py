"""Outages: the database goes away, fills up or falls silent, and all goes on by itself or says when it gave up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from postgres import PASSWORD, PostgresServer, binaries_or_skip

from mgrpo.errors import StoreUnavailable
from mgrpo.store import opening
from mgrpo.store.base import RunInfo, Store, WeightVersion
from mgrpo.store.opening import open_store
from mgrpo.types import Group, Reply, Reward, Rollout, Task, Trajectory, TrajectoryId, Turn

RUN = RunInfo(0)
WEIGHTS = WeightVersion("planner", 0, "weights/planner/v0", "sha256:0", 0, "rl")


def made(group: int, tokens: int = 50) -> tuple[Group, dict[TrajectoryId, Reward]]:
    """``tokens`` that do not compress: a byte or more of each reaches the database."""
    noise = os.urandom(tokens) if tokens > 50 else bytes([group % 256]) * tokens
    turn = Turn(tuple(noise), tuple(noise), (-0.5,) * tokens, 0, "stop", "", Reply())
    roots = [Trajectory(TrajectoryId(group, k, "planner", 0), "q", (turn,), "answer") for k in range(2)]
    rollouts = tuple(Rollout(group, t.id.rollout, (t,)) for t in roots)
    return Group(group, Task(f"t{group}", "q"), rollouts), {t.id: Reward(group / 3) for t in roots}


def weights(version: int) -> WeightVersion:
    return WeightVersion("planner", version, f"weights/planner/v{version}", f"sha256:{version}", version, "rl")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that this module alone stops and starts."""
    with PostgresServer(binaries_or_skip()) as started:
        yield started


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.new_database()


def outage_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mgrpo.store"]


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        time.sleep(0.01)


@contextmanager
def in_another_thread(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


# ---------------------------------------------------------------- PostgreSQL goes away


def test_a_server_that_restarts_and_crashes_loses_nothing_and_doubles_nothing(
    server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()

    def collect() -> int:
        store, group = open_store(url, RUN), 0
        while not over.is_set():
            store.commit(*as_commit(made(group)))
            group += 1
        store.close()
        return group

    def learn() -> int:
        store, version = open_store(url, RUN), 0
        while not over.is_set():
            if store.take("planner", version, 1) is not None:
                store.publish(weights(version), range(version, version + 1))
                version += 1
        store.close()
        return version

    with ThreadPoolExecutor(2) as pool:
        collected, learned = pool.submit(collect), pool.submit(learn)
        reader = open_store(url, RUN)
        for end in (server.stop, server.kill, server.stop, server.kill):
            seen = reader.trained("planner")
            until(lambda seen=seen: reader.trained("planner") > seen + 3)  # type: ignore[misc]
            end()
            server.start()
        seen = reader.trained("planner")
        until(lambda: reader.trained("planner") > seen)
        over.set()
        groups, versions = collected.result(60), learned.result(60)
    assert reader.committed() == reader.counts().groups == groups
    assert [reader.group(id) for id in range(groups)] == [made(id) for id in range(groups)]
    assert [p.weights for p in reader.publications()] == [weights(n) for n in range(versions)]
    assert [p.consumed for p in reader.publications()] == [range(n, n + 1) for n in range(versions)]
    reader.close()
    begun = [line for line in outage_lines(caplog) if "; trying again for up to 60 s" in line]
    ended = [line for line in outage_lines(caplog) if "works again after" in line]
    assert 4 <= len(begun) == len(ended) <= 3 * 4, "a line when an outage begins and one when it ends, of every store"
    assert PASSWORD[:16] not in caplog.text


def as_commit(group: tuple[Group, dict[TrajectoryId, Reward]]) -> tuple[list[Group], dict[TrajectoryId, Reward]]:
    return [group[0]], group[1]


def test_a_part_may_start_before_its_database(server: PostgresServer, url: str) -> None:
    server.stop()
    with in_another_thread(lambda: open_store(url, RUN)) as opened:
        server.start()
        opened.result(60).close()


def test_who_waited_long_enough_says_so_once_and_clearly(
    server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(url, RUN, outage_s=0.2)
    server.stop()
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                store.publish(WEIGHTS, ())
    finally:
        server.start()
    message = str(caught.value)
    assert message.startswith(f"store postgresql://mgrpo@127.0.0.1:{server.port}/") and "\n" not in message
    assert ": publish failed for 0.2 s: " in message and "Connection refused" in message
    assert len(outage_lines(caplog)) == 1
    store.publish(WEIGHTS, ())
    assert store.latest("planner") == WEIGHTS
    assert "works again after" in outage_lines(caplog)[-1]
    store.close()


def test_a_server_that_falls_silent_is_given_up_and_found_again(
    server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "_TRANSACTION_SECONDS", 0.5)
    store = open_store(url, RUN)
    server.signal_all(signal.SIGSTOP)
    try:
        with in_another_thread(lambda: store.publish(WEIGHTS, ())) as published:
            until(lambda: outage_lines(caplog) or published.done())
            assert not published.done()
            server.signal_all(signal.SIGCONT)
            published.result(60)
    finally:
        server.signal_all(signal.SIGCONT)
    assert store.latest("planner") == WEIGHTS
    store.close()


def test_an_owner_that_is_suspended_in_the_middle_of_a_write_loses_its_locks(
    server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(opening._SESSION, "idle_in_transaction_session_timeout", "200ms")
    suspended, store = open_store(url, RUN), open_store(url, RUN)
    held = store.lease("learn/planner", "learn-planner", 60.0)
    assert held is not None
    with (
        pytest.raises(Exception, match="idle-in-transaction timeout"),
        suspended._writer.begin() as connection,  # type: ignore[attr-defined]
    ):
        connection.exec_driver_sql("SELECT * FROM leases FOR UPDATE")
        store.renew(held, 60.0)
        connection.exec_driver_sql("UPDATE leases SET owner = 'thief'")
    assert store.lease("learn/planner", "thief", 60.0) is None
    assert suspended.committed() == 0, "the next call has a new connection"
    suspended.close()
    store.close()


def test_too_many_connections_pass_by_themselves(
    server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    import psycopg

    database = url.rpartition("/")[2]
    server.execute("CREATE ROLE guest LOGIN PASSWORD 'guest' CONNECTION LIMIT 1")
    server.execute(f"ALTER DATABASE {database} OWNER TO guest")
    guest = server.url(database, username="guest", password="guest")
    holder = psycopg.connect(guest)
    with in_another_thread(lambda: open_store(guest, RUN)) as opened:
        until(lambda: outage_lines(caplog) or opened.done())
        holder.close()
        opened.result(60).close()
    assert "too many connections for role" in outage_lines(caplog)[0]


def test_of_learners_that_race_one_wins_and_the_others_are_told(url: str) -> None:
    stores = [open_store(url, RUN) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        same = [pool.submit(store.publish, WEIGHTS, ()) for store in stores]
        assert [future.result() for future in same] == [None] * 6
        for version in range(1, 6):
            different = [
                pool.submit(store.publish, WeightVersion("planner", version, f"w{n}", f"sha256:{n}", 1, "rl"), ())
                for n, store in enumerate(stores)
            ]
            errors = [future.exception() for future in different]
            assert errors.count(None) == 1
            assert {type(error) for error in errors} == {type(None), ValueError}
    assert [p.weights.version for p in stores[0].publications()] == list(range(6))
    for store in stores:
        store.close()


# ---------------------------------------------------------------- full disks


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system ({mounted.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no byte free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    assert shutil.disk_usage(disk).free == 0
    return filler


def pauses_and_goes_on(store: Store, disk: Path, first: int, caplog: pytest.LogCaptureFixture) -> None:
    """A commit on a full disk waits; after space is freed it is there, once, and so is what was there before."""
    before, after = made(first, 100_000), made(first + 1, 100_000)
    store.commit(*as_commit(before))
    filler = fill(disk)
    with in_another_thread(lambda: store.commit(*as_commit(after))) as committed:
        until(lambda: outage_lines(caplog) or committed.done())
        assert not committed.done() and store.group(first) == before
        filler.unlink()
        committed.result(60)
    assert (store.group(first), store.group(first + 1)) == (before, after)
    assert "works again after" in outage_lines(caplog)[-1]


def test_a_full_disk_pauses_an_embedded_store_until_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        store = open_store(disk / "s.db", RUN)
        pauses_and_goes_on(store, disk, 0, caplog)
        filler = fill(disk)
        short = open_store(disk / "s.db", outage_s=0.1)
        with pytest.raises(
            StoreUnavailable, match=r"/s\.db: commit failed for 0.1 s: database or disk is full; see to"
        ):
            short.commit(*as_commit(made(2, 100_000)))
        filler.unlink()
        assert short.committed() == 2
        short.close()
        store.close()


def test_a_full_disk_pauses_a_server_until_there_is_space(
    server: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(server.folder / "disk", 32) as disk:
        server.own(disk)
        server.execute(f"CREATE TABLESPACE small LOCATION '{disk}'")
        server.execute("CREATE DATABASE full_run TABLESPACE small")
        store = open_store(server.url("full_run"), RUN)
        pauses_and_goes_on(store, disk, 0, caplog)
        store.close()
        server.execute("DROP DATABASE full_run")
        server.execute("DROP TABLESPACE small")
