"""Which replica is asked, and what happens when one is lost, behind, or new: real servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from engine_servers import Serving, asks, over, remote, serving
from hypothesis import given
from hypothesis import strategies as st
from web_server import TOKEN

from mgrpo.engines.base import Completion, Request
from mgrpo.engines.remote import Remote, Replica, spread
from mgrpo.errors import EngineLost, StoreUnavailable
from mgrpo.types import TrajectoryId
from mgrpo.web.asking import Client


class Echo:
    """Samples the prompt's last id plus one; notes its batches and what it was told to forget."""

    max_batch, max_calls = 256, 8

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.batches: list[list[Request]] = []
        self.released: list[TrajectoryId] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.batches.append(list(requests))
        return [Completion((r.prompt_ids[-1] + 1,), (-0.25,), self.version, "length") for r in requests]

    async def load(self, version: int, handle: str) -> None:
        self.version = version

    def release(self, id: TrajectoryId) -> None:
        self.released.append(TrajectoryId.parse(str(id)))  # whichever client it belongs to

    @property
    def seen(self) -> list[int]:
        return [request.id.rollout for batch in self.batches for request in batch]


def with_fleet(work: Callable[..., Coroutine[Any, Any, Any]], count: int = 2, version: int = 0) -> Any:
    """``work`` is given servers named a, b, ... that it may stop one by one with their `stop`."""

    async def main() -> Any:
        async with AsyncExitStack() as stack:
            fleet = []
            for name in "abc"[:count]:
                inner = await stack.enter_async_context(AsyncExitStack())
                found = await inner.enter_async_context(serving(Echo(version), name=name, version=version))
                found.stop = inner.aclose  # type: ignore[attr-defined]
                fleet.append(found)
            return await work(*fleet)

    return asyncio.run(main())


# ---------------------------------------------------------------- who gets what


ids = st.builds(
    TrajectoryId, st.integers(0, 3), st.integers(0, 7), st.sampled_from(["planner", "searcher"]), st.just(0)
)


@given(st.sets(ids), st.sets(st.sampled_from("abcdef"), min_size=1))
def test_new_trajectories_are_shared_out_evenly_by_their_ids_and_the_names_alone(
    ids: set[TrajectoryId], names: set[str]
) -> None:
    found = spread(ids, sorted(names))
    assert found == spread(reversed(sorted(ids)), sorted(names))
    assert set(found) == ids
    counts = {name: list(found.values()).count(name) for name in names}
    assert max(counts.values()) - min(counts.values()) <= 1
    runs = [found[id] for id in sorted(ids)]
    assert sum(a != b for a, b in zip(runs, runs[1:], strict=False)) <= len(names)  # neighbours stay together


def test_single_trajectories_reach_every_replica() -> None:
    names = [spread([TrajectoryId(g, r, "planner", 0)], ["a", "b", "c"]) for g in range(4) for r in range(8)]
    assert {name for found in names for name in found.values()} == {"a", "b", "c"}


def test_a_trajectory_stays_where_its_prefix_is_and_a_new_one_after_its_release_does_not_have_to() -> None:
    async def work(a: Serving, b: Serving) -> None:
        engine = remote(a, b)
        first = await engine.generate(asks(*range(8)))
        assert [c.token_ids for c in first] == [(r + 2,) for r in range(8)]
        assert (len(a.engine.seen), len(b.engine.seen)) == (4, 4)
        before = set(a.engine.seen), set(b.engine.seen)
        await engine.generate(asks(*range(8, 11)))
        await engine.generate(asks(*range(7, -1, -1)))
        assert (set(a.engine.batches[-1][i].id.rollout for i in range(4)), len(a.engine.batches[-1])) == (before[0], 4)
        engine.release(asks(0)[0].id)
        home, other = (a, b) if 0 in before[0] else (b, a)
        await engine.generate(asks(*range(1, 8)))
        assert home.engine.released[-1] == asks(0)[0].id and asks(0)[0].id not in other.engine.released[4:]

    with_fleet(work)


def test_batches_keep_the_order_of_their_requests() -> None:
    async def work(a: Serving) -> None:
        await remote(a).generate(asks(4, 1, 3))
        assert a.engine.seen == [4, 1, 3]

    with_fleet(work, count=1)


def test_a_lost_replica_ends_a_deterministic_batch() -> None:
    async def work(a: Serving, b: Serving) -> None:
        engine = remote(a, b)
        await engine.generate(asks(*range(8)))
        await a.stop()
        with pytest.raises(EngineLost, match=r"no server of 'planner' \(version 0 or newer\) took g5/r.*a: .*reached"):
            await engine.generate(asks(*range(8)))
        await engine.load(0, "")  # who is left
        assert len(await engine.generate(asks(*range(8)))) == 8
        assert len(b.engine.batches[-1]) == 8

    with_fleet(work)


def test_without_determinism_its_requests_go_to_another_one_as_new() -> None:
    async def work(a: Serving, b: Serving) -> None:
        engine = remote(a, b, deterministic=False)
        await engine.generate(asks(*range(8)))
        moved = set(a.engine.seen)
        await a.stop()
        assert [c.token_ids for c in await engine.generate(asks(*range(8)))] == [(r + 2,) for r in range(8)]
        assert set(b.engine.seen) == set(range(8))
        assert {id.rollout for id in b.engine.released[4:]} == moved  # "fresh": nothing cached is used
        await engine.generate(asks(9))
        assert b.engine.seen[-1] == 9
        await b.stop()
        with pytest.raises(EngineLost, match=r"took g5/r0/planner/0: a: .*; b: .*cannot be reached"):
            await engine.generate(asks(0))

    with_fleet(work)


def test_nobody_there_is_lost() -> None:
    with pytest.raises(EngineLost, match="no server of 'planner' .* took g5/r0/planner/0: none is alive"):
        asyncio.run(over(lambda: []).generate(asks(0)))


def test_a_replica_that_joins_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgrpo.engines.remote._REFRESH_S", 0.0)

    async def work(a: Serving, b: Serving) -> None:
        there = [a]
        engine = over(lambda: [serving.replica() for serving in there], deterministic=False)
        await engine.generate(asks(0, 1))
        assert (a.engine.seen, engine.max_calls) == ([0, 1], 1)
        there.append(b)
        for _ in range(200):
            await engine.generate(asks(*range(10, 14)))
            if b.engine.seen:
                break
            for request in asks(*range(10, 14)):
                engine.release(request.id)
        assert b.engine.seen and engine.max_calls == 2

    with_fleet(work)


def test_a_store_that_is_away_does_not_take_the_engines_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgrpo.engines.remote._REFRESH_S", 0.0)

    async def work(a: Serving) -> None:
        answers: list[Replica | None] = [a.replica()]

        def replicas() -> list[Replica]:
            if answers:
                return [answers.pop()]
            raise StoreUnavailable("the database is away")

        engine = over(replicas, deterministic=False)
        for _ in range(3):
            assert await engine.generate(asks(1))
        with pytest.raises(StoreUnavailable):  # who waits for new weights waits for the store
            await engine.load(1, "")

    with_fleet(work, count=1)


# ---------------------------------------------------------------- versions


def test_load_waits_until_the_version_is_served() -> None:
    async def work(a: Serving) -> None:
        engine = remote(a)
        loading = asyncio.create_task(engine.load(3, "weights/planner/v3"))
        await asyncio.sleep(0.05)
        assert not loading.done()
        await a.load(3, "weights/planner/v3")
        await loading
        assert {c.version for c in await engine.generate(asks(0))} == {3}

    with_fleet(work, count=1)


def test_load_says_who_is_behind_and_why_at_its_deadline() -> None:
    async def work(a: Serving, b: Serving, c: Serving) -> None:
        a.state = "v3: checksum differs"
        await c.stop()
        engine = remote(a, b, c, load_timeout_s=0.1)
        with pytest.raises(EngineLost) as lost:
            await engine.load(3, "weights/planner/v3")
        said = str(lost.value)
        assert said.startswith("no server of 'planner' had version 3 within 0.1 s: a at http://127.0.0.1:")
        assert (
            f"a at {a.url}: version 0, v3: checksum differs; b at {b.url}: version 0; c at {c.url}: no version," in said
        )
        assert "cannot be reached" in said and TOKEN not in said
        with pytest.raises(EngineLost, match="within 0.1 s: no server is alive"):
            await over(lambda: [], load_timeout_s=0.1).load(3, "")

    with_fleet(work, count=3)


@pytest.mark.parametrize("deterministic", [True, False])
def test_one_that_failed_to_load_finishes_its_trajectories_and_gets_no_new_ones(deterministic: bool) -> None:
    async def work(a: Serving, b: Serving) -> None:
        engine = remote(a, b, deterministic=deterministic)
        await engine.load(0, "")
        await engine.generate(asks(*range(8)))
        old = set(a.engine.seen)
        a.state = "v1: checksum differs"
        await b.load(1, "")
        await engine.load(1, "")
        await engine.generate(asks(*range(10, 18)))
        assert set(a.engine.seen) == old and set(range(10, 18)) < set(b.engine.seen)
        if not deterministic:
            versions = {r: c.version for r, c in enumerate(await engine.generate(asks(*range(8))))}
            assert versions == {r: int(r not in old) for r in range(8)}
        a.state = ""
        await a.load(1, "")
        await engine.load(1, "")
        await engine.generate(asks(*range(20, 28)))
        assert len(a.engine.batches[-1]) == 4  # it has caught up

    with_fleet(work)


def test_one_that_is_not_well_is_new_enough_only_where_there_is_no_other() -> None:
    """Where any version will do, so that a version alone keeps nobody out."""

    async def work(a: Serving, b: Serving) -> None:
        a.state = "version 3 could not be loaded: damaged"
        engine = remote(a, b, deterministic=False)
        await engine.load(0, "")
        await engine.generate(asks(*range(4)))
        assert (len(a.engine.seen), len(b.engine.seen)) == (0, 4)
        await b.stop()
        await engine.generate(asks(*range(4, 8)))
        assert len(a.engine.seen) == 4

    with_fleet(work)


def test_a_deterministic_load_waits_for_all_that_are_well() -> None:
    """Who takes part must not depend on which of two servers was a moment faster."""

    async def work(a: Serving, b: Serving) -> None:
        await a.load(1, "")
        loading = asyncio.create_task(remote(a, b).load(1, ""))
        await remote(a, b, deterministic=False).load(1, "")
        assert not loading.done()
        await b.load(1, "")
        await loading
        await a.load(2, "")
        await remote(a, b, load_timeout_s=0.2).load(2, "")  # one that never catches up is left out in the end

    with_fleet(work)


def test_a_deterministic_run_notices_a_server_that_started_again_at_the_same_address() -> None:
    async def work(a: Serving) -> None:
        engine = remote(a)
        await engine.load(0, "")
        await engine.generate(asks(0))
        a.instance = "another-start"
        with pytest.raises(EngineLost, match="restarted: it replied with version 0"):
            await engine.generate(asks(0))
        await engine.load(0, "")
        await engine.generate(asks(0))

    with_fleet(work, count=1)


def test_a_server_of_another_model_is_not_asked() -> None:
    async def work(a: Serving) -> None:
        replicas = [replace(a.replica(), name="x")]
        searcher = Remote("searcher", lambda: replicas, Client(TOKEN), deterministic=True, load_timeout_s=0.05)
        with pytest.raises(EngineLost, match="x at .*: no version, it serves 'planner'"):
            await searcher.load(0, "")

    with_fleet(work, count=1)


# ---------------------------------------------------------------- what crosses


def test_a_wrong_token_is_told_without_the_token() -> None:
    async def work(a: Serving) -> None:
        engine = over(lambda: [a.replica()], token="another-token-of-some-length", load_timeout_s=0.05)
        with pytest.raises(EngineLost, match="HTTP 401: this part needs its token: export MGRPO_TOKEN") as lost:
            await engine.load(0, "")
        assert TOKEN not in str(lost.value) and "another-token" not in str(lost.value)

    with_fleet(work, count=1)


def test_log_probabilities_keep_every_bit_on_their_way() -> None:
    """JSON's decimal digits are those of the float64 that was sent."""
    values = (-0.1, -1e-300, -0.3333333333333333, -9.80908925027372e-45, -123.45678901234567, 0.0, 1e-7)
    assert tuple(json.loads(json.dumps(values))) == values

    class Precise(Echo):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            return [Completion(tuple(range(len(values))), values, 0, "length") for _ in requests]

    async def main() -> list[Completion]:
        async with serving(Precise()) as found:
            return await remote(found).generate(asks(0))

    assert asyncio.run(main())[0].logprobs == values
