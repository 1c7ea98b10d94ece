"""Leases among owners that ask in any order, and at the same time: threads, processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection
from store_samples import Clock, commit, granted, group, rewards_of

import mgrpo
from mgrpo.errors import LeaseLost
from mgrpo.store import ledger
from mgrpo.store.base import Lease, Store

Opener = Callable[[], Store]
SECONDS = 10.0
RUNS = count()


class Model:
    """What a ledger of leases is, in a few lines: who holds each name, under which fence and until when."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.clock, self.run = store, clock, next(RUNS)
        self.held: dict[tuple[str, str], Lease] = {}  # the last one that an owner was granted of a name
        self.now: dict[str, tuple[Lease, float]] = {}  # the newest of a name, and when it expires
        self.done: set[str] = set()

    def step(self, what: str, letter: str, owner: str) -> None:
        """The same in the store and here, with the same outcome."""
        name = f"{self.run}/{letter}"
        mine = self.held.get((name, owner))
        if what == "wait":
            self.clock.now += SECONDS * 0.6
        elif what == "lease":
            self.lease(name, owner)
        elif mine is not None:
            mine_still = name in self.now and self.now[name][0] == mine
            (self.renew if what == "renew" else self.release)(mine, mine_still, what == "done")
        assert self.store.done(name) == (name in self.done)

    def lease(self, name: str, owner: str) -> None:
        lease = self.store.lease(name, owner, SECONDS)
        holder, expires = self.now.get(name, (None, 0.0))
        free = holder is None or holder.owner == owner or expires <= self.clock.now
        assert (lease is not None) == (free and name not in self.done)
        if lease is not None:
            assert all(lease.fence > other.fence for other in self.held.values())
            self.held[name, owner], self.now[name] = lease, (lease, self.clock.now + SECONDS)

    def renew(self, mine: Lease, mine_still: bool, _: bool) -> None:
        if mine_still:
            self.store.renew(mine, SECONDS)
            self.now[mine.name] = (mine, self.clock.now + SECONDS)
        else:
            with pytest.raises(LeaseLost):
                self.store.renew(mine, SECONDS)

    def release(self, mine: Lease, mine_still: bool, done: bool) -> None:
        self.store.release(mine, done)
        if mine_still:
            del self.now[mine.name]
            self.done |= {mine.name} if done else set()


actions = st.sampled_from(["lease"] * 3 + ["renew"] * 3 + ["release", "done", "wait"])


@settings(
    max_examples=25,
    phases=[Phase.generate],  # every step is a durable write: shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(st.tuples(actions, st.sampled_from("ab"), st.sampled_from("xyz")), min_size=20, max_size=40))
def test_leases_are_those_of_a_simple_model(store: Store, clock: Clock, steps: list[tuple[str, str, str]]) -> None:
    """Three owners ask for two names, renew them, give them back, and go on believing in what they lost."""
    model = Model(store, clock)
    for step in steps:
        model.step(*step)


def test_a_lease_does_not_change_hands_in_the_middle_of_a_commit(
    opener: Opener, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, go_on, real = threading.Event(), threading.Event(), ledger.check

    def check_and_wait(connection: Connection, lease: Lease) -> None:
        real(connection, lease)
        checked.set()
        assert go_on.wait(20)

    monkeypatch.setattr(ledger, "check", check_and_wait)
    writer, other = opener(), opener()
    lease = granted(writer, "collect/0")
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(writer.commit, [group(0)], rewards_of(group(0)), lease)
        assert checked.wait(20)
        clock.now += 2 * SECONDS
        asking = pool.submit(lambda: (other.lease("collect/0", "b", SECONDS), other.missing(range(1))))
        time.sleep(0.1)  # long enough for one that does not wait
        assert not asking.done()
        go_on.set()
        writing.result(20)
        given, missing = asking.result(20)
    assert given is not None and missing == []  # whoever gets it next finds all that was written under it
    writer.close()
    other.close()


# ---------------------------------------------------------------- races

PROCESSES, THREADS = 2, 4
NAMES = [f"collect/{i}" for i in range(25)]


def test_of_threads_that_ask_at_once_exactly_one_is_granted(opener: Opener, clock: Clock) -> None:
    """New names, names that ran out and names that were given back."""
    stores = [opener() for _ in range(THREADS)]
    together = threading.Barrier(THREADS)

    def ask(place: int, name: str) -> Lease | None:
        together.wait(20)
        return stores[place].lease(name, f"owner-{place}", SECONDS)

    fences: list[int] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for attempt, name in enumerate(name for name in NAMES[:8] for _ in range(3)):
            won = [lease for lease in pool.map(lambda i, name=name: ask(i, name), range(THREADS)) if lease]
            assert len(won) == 1, f"{name}: granted to {won}"
            fences.append(won[0].fence)
            if attempt % 3 == 0:
                stores[0].release(won[0])
            clock.now += 2 * SECONDS
    assert fences == sorted(set(fences))
    for store in stores:
        store.close()


ASKING = """
import sys
from mgrpo.store.opening import open_store
store = open_store(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
for name in sys.argv[3:]:
    if store.lease(name, sys.argv[2], 1000) is not None:
        print(name, flush=True)
"""


def test_processes_that_ask_for_the_same_share_them_out(opener: Opener, place: str | Path) -> None:
    opener().close()
    command = [sys.executable, "-c", ASKING, str(place)]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    root = str(Path(mgrpo.__file__).parents[1])
    asking = [subprocess.Popen([*command, f"p{i}", *NAMES], cwd=root, **options) for i in range(PROCESSES)]
    for process in asking:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
    for process in asking:
        assert process.stdin is not None
        process.stdin.write("now\n")
        process.stdin.flush()
    got = [process.communicate(timeout=60)[0].split() for process in asking]
    assert [process.returncode for process in asking] == [0] * PROCESSES
    assert sorted(name for names in got for name in names) == sorted(NAMES)


def test_the_count_of_committed_groups_is_right_in_every_thread(opener: Opener) -> None:
    """A store counts on from what it has counted before."""
    size, together = 200, threading.Barrier(THREADS)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def counted(store: Store) -> int:
        together.wait(20)
        return store.committed()

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for attempt in range(15):
                store = opener()
                if not attempt:
                    commit(store, *range(size))
                assert list(pool.map(counted, [store] * THREADS)) == [size] * THREADS
                store.close()
    finally:
        sys.setswitchinterval(interval)
