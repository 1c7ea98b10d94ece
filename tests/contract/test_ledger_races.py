"""Leases among owners that ask at the same time: threads, processes, and any order of calls."""

from __future__ import annotations

@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["lease", "renew", "release", "done"]))
        | st.sampled_from([1.0, 4.0, 11.0]),
        max_size=30,
    )
)
def test_leases_are_those_of_a_simple_model(store: Store, clock: Clock, steps: list[Any]) -> None:
    """Three owners ask for, renew and give back two names; each holds on to the lease that it was granted last."""
    run = next(RUNS)
    held: dict[tuple[str, str], Lease] = {}  # by name and owner: the newest that it knows of
    state: dict[str, tuple[str, int, float]] = {}  # name -> owner, fence, when it expires
    done: set[str] = set()
    for step in steps:
        if isinstance(step, float):
            clock.now += step
            continue
        letter, owner, what = step
        name = f"{run}/{letter}"
        if what == "lease":
            lease = store.lease(name, owner, 10)
            free = name not in state or state[name][0] == owner or state[name][2] <= clock.now
            assert (lease is not None) == (free and name not in done)
            if lease is not None:
                assert all(lease.fence > other.fence for other in held.values())
                held[name, owner], state[name] = lease, (owner, lease.fence, clock.now + 10)
        elif mine := held.get((name, owner)):
            newest = name not in done and name in state and state[name][1] == mine.fence
            if what == "renew" and newest:
                store.renew(mine, 10)
                state[name] = (*state[name][:2], clock.now + 10)
            elif what == "renew":
                with pytest.raises(LeaseLost):
                    store.renew(mine, 10)
            else:
                store.release(mine, done=what == "done")
                if newest:
                    del state[name]
                    done |= {name} if what == "done" else set()
        assert store.done(name) == (name in done)


RUNS = count()


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
        clock.now += 11
        asking = pool.submit(lambda: (other.lease("collect/0", "b", 10), other.missing(range(1))))
        time.sleep(0.1)  # long enough for one that does not wait
        assert not asking.done()
        go_on.set()
        writing.result(20)
        given, missing = asking.result(20)
    assert given is not None and missing == []  # whoever gets it next finds all that was written under it
    writer.close()
    other.close()


# ---------------------------------------------------------------- races

PROCESSES, THREADS = 3, 4
NAMES = [f"collect/{i}" for i in range(25)]


def test_of_threads_that_ask_at_once_exactly_one_is_granted(opener: Opener, clock: Clock) -> None:
    """New names, names that ran out and names that were given back."""
    stores = [opener() for _ in range(THREADS)]
    together = threading.Barrier(THREADS)

    def ask(place: int, name: str) -> Lease | None:
        together.wait(20)
        return stores[place].lease(name, f"owner-{place}", 10)

    fences: list[int] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for attempt, name in enumerate(name for name in NAMES[:8] for _ in range(3)):
            won = [lease for lease in pool.map(lambda i, name=name: ask(i, name), range(THREADS)) if lease]
            assert len(won) == 1, f"{name}: granted to {won}"
            fences.append(won[0].fence)
            if attempt % 3 == 0:
                stores[0].release(won[0])
            clock.now += 11
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


def test_the_count_of_committed_groups_is_right_in_every_thread(store: Store) -> None:
    """One store counts on from what it has counted before."""
    size, together = 200, threading.Barrier(THREADS)
    commit(store, *range(size))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def counted() -> int:
        together.wait(20)
        return store.committed()

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            found = [future.result() for future in [pool.submit(counted) for _ in range(THREADS)]]
    finally:
        sys.setswitchinterval(interval)
    assert found == [size] * THREADS


