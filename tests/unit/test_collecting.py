"""Which groups a collector is given, how far it may go ahead, and what becomes of its work when something is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_run import (
    ANSWER,
    CountingLearner,
    Interrupted,
    ScriptedTeam,
    collect_until_waiting,
    open_session,
    plan,
    run_to_the_end,
    trained_prompts,
)
from store_samples import Clock, weights
from tiny_recipe import REINFORCE, tiny
from tiny_team import Recorder

from mgrpo import collecting
from mgrpo.agents.loop import together
from mgrpo.collecting import Collector, Work
from mgrpo.config import Config
from mgrpo.engines.base import Completion, Request
from mgrpo.errors import EngineError, EngineLost, EngineTimeout, InfrastructureError, StoreTimeout, StoreUnavailable
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session
from mgrpo.store import ledger
from mgrpo.store.base import Lease, Store
from mgrpo.store.opening import open_store
from mgrpo.team import Team
from mgrpo.train import collect, learn

STAGE = {"steps": 2, "groups_per_step": 4}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is warned of."""
    said: list[str] = []
    monkeypatch.setattr(Reporter, "warn", lambda self, line: said.append(line))
    return said


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "LOST_PAUSE_S", 0.0)


def brief(folder: Path, prompts: int = 8, **options: Any) -> Config:
    """Waits are short: where one is due, a test waits for its end."""
    return plan(folder, prompts, **{"stage": STAGE, "store_timeout_s": 0.2, **options})


async def next_work(collector: Collector) -> Work:
    async for work in collector.work():
        return work
    raise AssertionError("nothing is left to collect")


def collector_of(session: Session) -> Collector:
    team: Any = ScriptedTeam(session.config)
    return Collector(session, team)


# ---------------------------------------------------------------- who collects what


@pytest.mark.parametrize(
    ("size", "cohorts"),
    [(None, [range(0, 4)]), (2, [range(0, 2), range(2, 4)]), (1, [range(i, i + 1) for i in range(4)])],
)
def test_groups_that_are_collected_together_are_so_many(size: int | None, cohorts: list[range], tmp_path: Path) -> None:
    with open_session(brief(tmp_path, rollout={"groups_per_lease": size}), tmp_path / "run") as session:
        assert collect_until_waiting(session) == cohorts  # of the first step; nobody trains on it


def test_collectors_share_a_step_and_none_gets_what_another_has(tmp_path: Path) -> None:
    config = brief(tmp_path, rollout={"groups_per_lease": 1})
    with open_session(config, tmp_path / "run", "a") as a, open_session(config, tmp_path / "run", "b") as b:

        async def main() -> list[Work]:
            return [await next_work(collector_of(session)) for session in (a, b, b, a)]

        works = asyncio.run(main())
        # One that comes back under its name takes up what it had; another name would have to wait.
        assert [work.groups.start for work in works] == [0, 1, 1, 0]


def test_work_in_progress_is_nobody_elses_until_it_is_given_back(tmp_path: Path) -> None:
    config = brief(tmp_path, rollout={"groups_per_lease": 2})
    run = tmp_path / "run"
    with open_session(config, run, "a") as a, open_session(config, run, "b") as b, open_session(config, run, "c") as c:

        async def main() -> None:
            first, second = await next_work(collector_of(a)), await next_work(collector_of(b))
            assert (first.groups, second.groups) == (range(0, 2), range(2, 4))
            with pytest.raises(StoreTimeout, match="waited 0.2 s for other collectors to commit groups 0 to 3"):
                await next_work(collector_of(c))
            b.release(second.lease)
            third = await next_work(collector_of(c))
            assert third.groups == second.groups and third.lease.fence > second.lease.fence

        asyncio.run(main())


def test_two_collectors_at_once_one_of_them_late_leave_every_group_once(tmp_path: Path) -> None:
    config = plan(tmp_path, 24, stage={"steps": 6, "groups_per_step": 4}, rollout={"groups_per_lease": 1})
    asked: dict[str, set[int]] = {}
    with open_session(config, tmp_path / "run", "a") as a, open_session(config, tmp_path / "run", "b") as b:
        learner = CountingLearner(a)

        class Brief(Collector):
            async def evaluate_fully(self, when: str, step: int) -> None: ...

        async def work(session: Session, from_group: int) -> None:
            while session.store.committed() < from_group:
                await asyncio.sleep(0.001)
            team: Any = ScriptedTeam(config)
            await collect(Brief(session, team))
            asked[session.name] = {request.id.group for batch in team.engine.batches for request in batch}

        async def main() -> None:
            await learner.begin()
            await together([work(a, 0), work(b, 6), learn(learner)])

        asyncio.run(main())
        assert sorted(trained_prompts(a.store), key=int) == [str(i) for i in range(24)]
    assert asked["a"] | asked["b"] == set(range(24)) and not asked["a"] & asked["b"] and asked["b"]


# ---------------------------------------------------------------- how far ahead


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_collectors_are_at_most_max_staleness_steps_ahead_of_the_slowest_learner(
    staleness: int, tmp_path: Path
) -> None:
    config = brief(tmp_path, stage={"steps": 8, "groups_per_step": 2}, max_staleness=staleness)
    with open_session(config, tmp_path / "run") as session:
        store = session.store
        store.publish(weights(0), ())
        assert len(collect_until_waiting(session)) == 1 + staleness
        for version in (1, 2):
            store.publish(weights(version), range(2 * version - 2, 2 * version))
            assert collect_until_waiting(session) == [range(2 * (version + staleness), 2 * (version + staleness) + 2)]


def test_a_stage_begins_when_the_one_before_is_trained_on(tmp_path: Path) -> None:
    stages = [REINFORCE | {"name": name, "steps": 2, "num_generations": 2} for name in ("simple", "hard")]
    with open_session(brief(tmp_path, stages=stages, max_staleness=3), tmp_path / "run") as session:
        session.store.publish(weights(0), ())
        assert collect_until_waiting(session) == [range(0, 2), range(2, 4)]
        session.store.publish(weights(1), range(0, 2))
        assert collect_until_waiting(session) == []
        session.store.publish(weights(2), range(2, 4))
        assert collect_until_waiting(session) == [range(4, 6), range(6, 8)]


def test_who_waits_too_long_says_which_learners_are_behind(tmp_path: Path) -> None:
    config = tiny(stages=[REINFORCE], store_timeout_s=0.1)
    with open_session(config, tmp_path) as session:
        windows = list(session.windows(0))
        for agent in ("planner", "searcher"):
            session.store.publish(weights(0, agent), ())
        assert collect_until_waiting(session, 1) == [windows[0].groups]
        session.store.publish(weights(1), windows[0].groups)
        expected = "waited 0.1 s for the learners searcher to have trained on all groups before 2"
        with pytest.raises(StoreTimeout, match=expected):
            asyncio.run(next_work(collector_of(session)))


@pytest.mark.parametrize(
    ("staleness", "policy", "oldest"),
    [(0, "drop", [0, 1, 2]), (2, "drop", [0, 0, 0, 0, 0]), (2, "wait", [0, 0, 0, 1, 2])],
)
def test_engines_are_waited_for_until_they_are_as_new_as_staleness_asks(
    staleness: int, policy: str, oldest: list[int], tmp_path: Path
) -> None:
    """Every step trained is a version more, so what samples now must not be too old when its turn comes."""
    config = brief(tmp_path, stage={"steps": 8, "groups_per_step": 2}, max_staleness=staleness, stale_policy=policy)
    with open_session(config, tmp_path / "run") as session:
        team = ScriptedTeam(config)
        session.store.publish(weights(0), ())
        for version in (1, 2, 3):
            collect_until_waiting(session, team=team)
            session.store.publish(weights(version), range(2 * version - 2, 2 * version))
        assert team.served == [("planner", version) for version in oldest]


# ---------------------------------------------------------------- what is lost


def steal(store: Store, clock: Clock, name: str) -> Lease:
    """What becomes of a lease whose owner was not heard of for long."""
    clock.now += 1e4
    lease = store.lease(name, "thief", 1.0)
    assert lease is not None
    return lease


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ledger, "clock", made)
    return made


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Another process's hold on the store of the run."""
    opened: list[Store] = []

    def open_once() -> Store:
        if not opened:
            opened.append(open_store(tmp_path / "run" / "store.db"))
        return opened[0]

    yield open_once
    for store in opened:
        store.close()


def test_work_whose_lease_was_lost_is_refused_and_collected_again(
    tmp_path: Path, clock: Clock, other: Callable[[], Store], warnings: list[str]
) -> None:
    once = threading.Event()

    def script(request: Request) -> str:
        if not once.is_set() and request.id.group >= 4:  # in the middle of the second step
            once.set()
            other().release(steal(other(), clock, "collect/4"))
        return ANSWER

    config = plan(tmp_path, 8, stage=STAGE)
    team = ScriptedTeam(config, script)
    with open_session(config, tmp_path / "run") as session:
        run_to_the_end(session, team)
        assert sorted(trained_prompts(session.store)) == [str(i) for i in range(8)]
        assert session.store.counts().groups == 8
    asked = [request.id.group for batch in team.engine.batches for request in batch]
    assert [asked.count(group) for group in range(8)] == [2] * 4 + [4] * 4
    (said,) = warnings
    assert said.startswith("groups 4 to 7 go back: train lost its lease 'collect/4', which was given back")


def test_what_another_committed_meanwhile_stays_as_it_is(
    tmp_path: Path, clock: Clock, other: Callable[[], Store], warnings: list[str]
) -> None:
    """A collector that slept through its lease and wakes up."""
    config = brief(tmp_path)
    with open_session(config, tmp_path / "run", "sleeper") as session, open_session(config, tmp_path / "run", "b") as b:

        async def main() -> None:
            collector = collector_of(session)
            work = await next_work(collector)
            gathered = await collector.gather(work, await collector.serve(work))
            clock.now += 1e4
            theirs = ScriptedTeam(config, lambda request: "<answer> Tarn </answer>")
            assert await asyncio.to_thread(collect_until_waiting, b, 1000, theirs) == [work.groups]
            with collector.surviving(work):
                await collector.commit(work, gathered, 0.0)

        asyncio.run(main())
        (group, _) = session.store.group(0)
        assert {r.root.answer.answer for r in group.rollouts if r.root.answer} == {"Tarn"}
    assert len(warnings) == 1 and "sleeper lost its lease 'collect/0'" in warnings[0]


def test_work_whose_engine_was_lost_is_collected_again(tmp_path: Path, warnings: list[str]) -> None:
    config = plan(tmp_path, 8, stage=STAGE)
    team = ScriptedTeam(config)
    team.engine = Interrupted(EngineLost("no server of 'planner' is left"), EngineLost("again"))
    with open_session(config, tmp_path / "run") as session:
        run_to_the_end(session, team)
        assert sorted(trained_prompts(session.store)) == [str(i) for i in range(8)]
    assert warnings == ["groups 0 to 3 go back: no server of 'planner' is left", "groups 0 to 3 go back: again"]


def test_an_engine_that_is_lost_again_and_again_ends_the_collector_at_the_deadline(
    tmp_path: Path, warnings: list[str]
) -> None:
    config = plan(tmp_path, 8, stage=STAGE, outage_timeout_s=0.2)
    team = ScriptedTeam(config)
    team.engine = Interrupted(*[EngineLost("it takes nothing")] * 100_000)
    said = "engines were lost again and again for 0.2 s, the last time: it takes nothing"
    with open_session(config, tmp_path / "run") as session:
        with pytest.raises(EngineTimeout, match=said):
            run_to_the_end(session, team)
        assert warnings and session.store.lease("collect/0", "another", 1.0) is not None


def test_a_question_that_breaks_every_rollout_counts_as_seen_but_several_in_a_row_end_the_collector(
    tmp_path: Path,
) -> None:
    """R-58: the run goes on, and a resumed one does not meet the same question for ever."""

    class Breaking(Recorder):
        broken = range(1, 2)

        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            if requests[0].id.group in self.broken:
                raise EngineError("this prompt kills it")
            return await super().generate(requests)

    config = plan(tmp_path, 8, stage=STAGE, rollout={"groups_per_lease": 1, "max_retries": 0})
    team = ScriptedTeam(config)
    team.engine = Breaking(lambda request: ANSWER)
    with open_session(config, tmp_path / "run") as session:
        run_to_the_end(session, team)
        assert sorted(trained_prompts(session.store)) == [str(i) for i in range(8)]
        assert [{r.value is None for r in session.store.group(i)[1].values()} for i in (0, 1, 2)] == [
            {False},
            {True},
            {False},
        ]
    team.engine.broken = range(1, 8)
    with open_session(config, tmp_path / "another") as session:
        with pytest.raises(InfrastructureError, match="this prompt kills it"):
            run_to_the_end(session, team)
        assert session.store.committed() == 3


def test_an_engine_that_never_comes_ends_the_collector_with_its_words(tmp_path: Path) -> None:
    class Never:
        max_batch = max_calls = 8

        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            raise AssertionError("nobody serves")

        async def load(self, version: int, handle: str) -> None:
            raise EngineLost(f"no server of 'planner' had version {version} within 0.1 s: no server is alive")

        def release(self, id: object) -> None: ...

        async def close(self) -> None: ...

    config = plan(tmp_path, 8, stage=STAGE)
    with open_session(config, tmp_path / "run") as session:
        session.store.publish(weights(0), ())
        with (
            Team(config, session.folder.models(config), {"planner": Never()}, {}) as team,
            pytest.raises(EngineTimeout, match="no server of 'planner' had version 0 within 0.1 s: no server is alive"),
        ):
            asyncio.run(collect(Collector(session, team)))
        assert session.store.lease("collect/0", "another", 1.0) is not None


def test_leases_are_kept_alive_through_an_outage_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is shorter than the lease costs nothing; another that was lost is renewed no more."""
    told: list[str] = []

    class Away:
        def __init__(self, store: Store) -> None:
            self._store, self.away = store, 2

        def renew(self, lease: Lease, seconds: float) -> None:
            self.away -= 1
            if self.away >= 0:
                raise StoreUnavailable("no connection")
            self._store.renew(lease, seconds)
            told.append(lease.name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    with open_session(brief(tmp_path, lease_s=0.06), tmp_path / "run") as session:
        store: Any = Away(session.store)
        session.store = store

        async def main() -> None:
            session.keep_alive()
            lost, kept = session.lease("collect/0"), session.lease("learn/planner")
            assert lost is not None and kept is not None
            store.release(lost)
            while told.count("learn/planner") < 3:
                await asyncio.sleep(0.005)

        asyncio.run(asyncio.wait_for(main(), 20))
    assert "collect/0" not in told
