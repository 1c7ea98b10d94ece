"""Who may write what, and who is there: leases, fences and announced parts, on every store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from store_samples import Clock, granted, group, rewards_of, weights

from mgrpo.errors import LeaseLost
from mgrpo.store.base import Lease, Part, PartKind, RunInfo, Store
from mgrpo.store.opening import open_store
from mgrpo.store.sql import SqlStore

Opener = Callable[[], Store]


# ---------------------------------------------------------------- who gets it


def test_a_lease_is_one_owners_until_its_seconds_are_over(store: Store, clock: Clock) -> None:
    first = granted(store)
    clock.now += 9.999
    assert store.lease("learn/planner", "b", 10) is None
    clock.now += 0.001
    second = granted(store, owner="b")
    assert second.fence > first.fence
    assert store.lease("learn/planner", "a", 10) is None


def test_a_renewed_lease_lasts_from_then_on(store: Store, clock: Clock) -> None:
    lease = granted(store)
    clock.now += 8
    store.renew(lease, 10)
    clock.now += 9
    assert store.lease("learn/planner", "b", 10) is None
    store.renew(lease, 1)  # shorter, too
    clock.now += 1
    granted(store, owner="b")


def test_what_is_given_back_is_free_at_once(store: Store) -> None:
    store.release(granted(store))
    granted(store, owner="b")


def test_an_owner_that_comes_back_has_its_lease_at_once_and_its_former_self_has_not(store: Store) -> None:
    former = granted(store, seconds=1000)
    present = granted(store, seconds=1000)
    assert present.fence > former.fence
    with pytest.raises(LeaseLost):
        store.renew(former, 10)
    store.renew(present, 10)


def test_fences_grow_over_all_names(store: Store, clock: Clock) -> None:
    fences = []
    for name in ("collect/0", "collect/4", "learn/planner", "collect/0", "collect/0"):
        lease = granted(store, name)
        fences.append(lease.fence)
        if name == "collect/0":
            store.release(lease)
    clock.now += 11
    fences.append(granted(store, "collect/4", "b").fence)
    assert fences == sorted(set(fences))


def test_what_is_done_is_never_granted_again(store: Store, clock: Clock) -> None:
    assert not store.done("evaluate/after")
    store.release(granted(store, "evaluate/after"), done=True)
    clock.now += 1e6
    assert store.done("evaluate/after") and not store.done("evaluate/before")
    assert [store.lease("evaluate/after", owner, 10) for owner in "ab"] == [None, None]
    granted(store, "evaluate/before")


def test_an_owner_that_lost_its_lease_can_neither_give_it_back_nor_close_it(store: Store, clock: Clock) -> None:
    for done in (False, True):
        lost = granted(store)
        clock.now += 11
        present = granted(store, owner="b")
        store.release(lost, done=done)
        assert not store.done("learn/planner") and store.lease("learn/planner", "a", 10) is None
        store.renew(present, 10)
        store.release(present)


def test_every_handle_sees_the_same_leases(opener: Opener) -> None:
    one, other = opener(), opener()
    lease = granted(one)
    assert other.lease("learn/planner", "b", 10) is None
    other.release(lease)
    granted(one, owner="b")
    one.close()
    other.close()


def test_seconds_are_those_of_the_databases_clock(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is a day fast takes nothing from the others, and keeps nothing for longer."""
    store = open_store(postgres_url, RunInfo(0))
    granted(store, seconds=1000)
    granted(store, "collect/0", seconds=0)
    store.announce(PART, 1000)
    real = time.time
    for ahead in (86_400, -86_400):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
        assert store.lease("learn/planner", "b", 1000) is None
        granted(store, "collect/0", f"b{ahead}", seconds=0)
        assert store.parts() == [PART]
    store.close()


# ---------------------------------------------------------------- what may be written


def expire(store: Store, clock: Clock, lease: Lease) -> None:
    clock.now += 11
    granted(store, lease.name, "b")


def come_back(store: Store, clock: Clock, lease: Lease) -> None:
    granted(store, lease.name, lease.owner)


def give_back(store: Store, clock: Clock, lease: Lease) -> None:
    store.release(lease)


def close(store: Store, clock: Clock, lease: Lease) -> None:
    store.release(lease, done=True)


LOSSES: dict[str, tuple[Callable[[Store, Clock, Lease], None], str]] = {
    "given to another": (expire, "a lost its lease '.*', which is held by b since; nothing is written under it"),
    "given to its owner's next life": (come_back, "a lost its lease '.*', which is held by a since"),
    "given back": (give_back, "a lost its lease '.*', which was given back"),
    "closed": (close, "a lost its lease '.*', which was given back"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_written_under_a_lease_that_was_lost(store: Store, clock: Clock, loss: str) -> None:
    lose, said = LOSSES[loss]
    collect, learn = granted(store, "collect/0"), granted(store)
    groups = [group(id) for id in range(4)]
    store.commit(groups[:2], rewards_of(*groups[:2]), collect)
    store.publish(weights(0), (), None, learn)
    store.publish(weights(1), range(1), None, learn)
    before = store.counts()
    for lease in (collect, learn):
        lose(store, clock, lease)
    with pytest.raises(LeaseLost, match=said):
        store.commit(groups[2:], rewards_of(*groups[2:]), collect)
    with pytest.raises(LeaseLost, match=said):
        store.publish(weights(2), range(1, 2), {"loss": 1.0}, learn)
    for lease in (collect, learn):
        with pytest.raises(LeaseLost, match=said):
            store.renew(lease, 10)
    assert store.counts() == before and store.missing(range(4)) == [2, 3]
    assert (store.trained("planner"), store.latest("planner")) == (1, weights(1))
    assert len(store.publications()) == 2


def test_whoever_was_given_the_lease_writes(store: Store, clock: Clock) -> None:
    late = granted(store, "collect/0")
    clock.now += 11
    present = granted(store, "collect/0", "b")
    ours, theirs = group(0, (1, 1)), group(0, (2, 2))
    with pytest.raises(LeaseLost):
        store.commit([theirs], rewards_of(theirs), late)
    store.commit([ours], rewards_of(ours), present)
    assert store.group(0) == (ours, rewards_of(ours))


def test_a_lease_that_nobody_else_was_given_is_good_however_late(store: Store, clock: Clock) -> None:
    collect, learn = granted(store, "collect/0"), granted(store)
    clock.now += 1e6
    store.commit([group(0)], rewards_of(group(0)), collect)
    store.publish(weights(0), range(1), None, learn)
    store.renew(learn, 10)
    assert store.committed() == store.trained("planner") == 1


# ---------------------------------------------------------------- what is said twice


class Forgetful:
    """Loses the acknowledgement of the next transaction that writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = 0
        real = SqlStore._writing

        @contextmanager
        def writing(store: SqlStore) -> Iterator[Connection]:
            with real(store) as connection:
                yield connection
            if self.armed:
                self.armed, self.lost = False, self.lost + 1
                raise OperationalError("COMMIT", {}, Exception("connection lost"), connection_invalidated=True)

        self.armed = False
        monkeypatch.setattr(SqlStore, "_writing", writing)


def test_a_call_whose_acknowledgement_was_lost_is_the_same_as_one_call(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = Forgetful(monkeypatch)

    def twice(call: Callable[..., Any], *arguments: Any) -> Any:
        forgetful.armed, before = True, forgetful.lost
        result = call(*arguments)
        assert forgetful.lost == before + 1
        return result

    lease = twice(store.lease, "collect/0", "a", 100)
    assert isinstance(lease, Lease) and store.lease("collect/0", "b", 100) is None
    twice(store.renew, lease, 100)
    groups = [group(0), group(1)]
    twice(store.commit, groups, rewards_of(*groups), lease)
    assert store.counts().groups == store.committed() == 2
    twice(store.release, lease)
    assert not store.done("collect/0")
    learn = twice(store.lease, "learn/planner", "a", 100)
    twice(store.publish, weights(0), (), None, learn)
    twice(store.publish, weights(1), range(2), {"loss": 1.0}, learn)
    assert [(p.weights.version, p.consumed) for p in store.publications()] == [(0, range(0)), (1, range(2))]
    twice(store.release, learn, True)
    assert store.done("learn/planner")
    twice(store.announce, PART, 100)
    assert store.parts() == [PART]
    twice(store.retire, PART.name)
    assert store.parts() == []


def test_giving_back_again_takes_nothing_from_the_next_owner(store: Store) -> None:
    """The second call of one whose acknowledgement came too late."""
    lease = granted(store)
    store.release(lease)
    present = granted(store, owner="b")
    store.release(lease)
    store.renew(present, 10)


# ---------------------------------------------------------------- who is there

PART = Part("serve-planner-0", "engine", "planner", "http://127.0.0.1:8000", "5d2c", 3, "")


def test_parts_are_those_that_announced_themselves_and_are_not_overdue(store: Store, clock: Clock) -> None:
    assert store.parts() == []
    store.announce(PART, 10)
    clock.now += 9
    assert store.parts() == [PART]
    store.announce(PART, 10)
    clock.now += 9
    assert store.parts() == [PART]
    clock.now += 1
    assert store.parts() == []
    store.announce(PART, 10)  # it was only late
    assert store.parts() == [PART]


def test_parts_are_told_by_name_of_a_kind_and_of_an_agent(store: Store) -> None:
    every = [
        Part("collect-0", "collect"),
        Part("learn-planner", "learn", "planner"),
        PART,
        Part("serve-searcher-0", "engine", "searcher", version=0),
        Part("tools-0", "tools", url="http://127.0.0.1:8001"),
    ]
    for part in reversed(every):
        store.announce(part, 100)
    assert store.parts() == every
    assert store.parts("engine") == every[2:4]
    assert store.parts("engine", "searcher") == every[3:4]
    assert store.parts(agent="planner") == every[1:3]
    assert store.parts("tools", "planner") == []
    assert {part.kind for part in every} == set(get_args(PartKind))


def test_what_a_part_says_replaces_what_it_said(store: Store) -> None:
    store.announce(PART, 100)
    news = Part(PART.name, "engine", "planner", "http://127.0.0.1:9000", "77aa", 4, "version 5 could not be loaded")
    store.announce(news, 100)
    assert store.parts() == [news]


def test_a_part_that_is_gone_is_gone_at_once(store: Store) -> None:
    store.announce(PART, 100)
    store.announce(Part("collect-0", "collect"), 100)
    store.retire(PART.name)
    store.retire("nobody")
    assert [part.name for part in store.parts()] == ["collect-0"]


@pytest.mark.parametrize("state", ["no\0body", "half \ud83d of a pair", "caf\u00e9 \U0001f3d4", "x" * 5000])
def test_whatever_an_error_message_holds_a_part_can_say_that_it_is_not_well(store: Store, state: str) -> None:
    store.announce(Part(PART.name, "engine", state=state), 100)
    (told,) = store.parts()
    assert len(told.state) == len(state) and told.state.isprintable()
    assert all(a == b or not b.isascii() or not b.isprintable() for a, b in zip(told.state, state, strict=True))
