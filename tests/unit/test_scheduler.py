"""Calls of engines as they come: what meets in a batch, what is cut off, and what of it runs again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_recipe import REINFORCE, tiny
from tiny_team import Lookup, Recorder, agent, compact_chat, says

from mgrpo.agents import rollout as rollouts
from mgrpo.agents.delegate import Delegate
from mgrpo.agents.loop import Agent
from mgrpo.agents.rollout import Team, Watcher, run_groups
from mgrpo.agents.scheduler import Eager, Lockstep, Scheduler
from mgrpo.engines.base import Completion, Request, Sampling
from mgrpo.errors import EngineError, EngineLost, EngineTimeout
from mgrpo.gather import Gathered, gather
from mgrpo.tasks.expert import Gold
from mgrpo.types import Grade, Group, Task, Trajectory, TrajectoryId

SECONDS = 20.0  # longer than anything here takes


class Gated:
    """An engine whose calls end when they are told to, the oldest first."""

    def __init__(self, max_batch: int = 100, max_calls: int = 1) -> None:
        self.max_batch, self.max_calls = max_batch, max_calls
        self.calls: list[list[int]] = []
        self.open: list[asyncio.Future[None]] = []
        self.most = 0

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls.append([request.id.rollout for request in requests])
        gate = asyncio.get_running_loop().create_future()
        self.open.append(gate)
        self.most = max(self.most, len(self.open))
        try:
            await gate
        finally:
            self.open.remove(gate)
        return [Completion((request.id.rollout,), (-1.0,), 0, "stop") for request in requests]

    async def end(self, error: Exception | None = None) -> None:
        gate = self.open[0]
        gate.set_exception(error) if error is not None else gate.set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Desk:
    """Asks an engine for turns of rollouts 0, 1, 2, ... by one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.asked: dict[int, asyncio.Task[Completion]] = {}

    async def ask(self, engine: Any, *numbers: int) -> None:
        for i in numbers:
            request = Request(TrajectoryId(5, i, "planner", 0), (1,), Sampling(), (1,))
            self.asked[i] = asyncio.create_task(self.scheduler.generate(engine, request))
        await settle()

    def outcomes(self) -> dict[int, Any]:
        """Of what is over: the sampled token, or the error's class."""
        done = {i: task for i, task in self.asked.items() if task.done() and not task.cancelled()}
        return {i: type(t.exception()) if t.exception() else t.result().token_ids[0] for i, t in done.items()}


def eagerly(story: Callable[[Desk], Coroutine[Any, Any, None]], seconds: float = SECONDS) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            await story(Desk(Eager(seconds)))

    asyncio.run(main())


# ---------------------------------------------------------------- what meets in a batch


def test_what_gathers_while_an_engine_is_busy_is_its_next_batch() -> None:
    async def story(desk: Desk) -> None:
        engine = Gated()
        await desk.ask(engine, 0, 1)
        await desk.ask(engine, 2)
        await desk.ask(engine, 3, 4)
        assert engine.calls == [[0, 1]] and desk.outcomes() == {}
        await engine.end()
        assert engine.calls == [[0, 1], [2, 3, 4]] and desk.outcomes() == {0: 0, 1: 1}
        await engine.end()
        await desk.ask(engine, 5)
        assert engine.calls[2:] == [[5]]

    eagerly(story)


@pytest.mark.parametrize(
    ("max_batch", "max_calls", "calls"),
    [
        (2, 1, [[0, 1], [2, 3], [4, 5], [6]]),
        (2, 2, [[0, 1], [2, 3], [4, 5], [6]]),
        (1, 3, [[0], [1], [2], [3], [4], [5], [6]]),
        (3, 10, [[0, 1, 2], [3, 4, 5], [6]]),
    ],
)
def test_an_engine_has_as_many_calls_at_a_time_as_it_gains_from(
    max_batch: int, max_calls: int, calls: list[list[int]]
) -> None:
    async def story(desk: Desk) -> None:
        engine = Gated(max_batch, max_calls)
        await desk.ask(engine, *range(7))
        assert engine.calls == calls[:max_calls]
        while engine.open:
            await engine.end()
        assert engine.calls == calls and engine.most == min(max_calls, len(calls))
        assert desk.outcomes() == {i: i for i in range(7)}

    eagerly(story)


def test_an_engine_that_gains_a_place_is_sent_more() -> None:
    """A remote one counts its replicas, which come and go."""

    async def story(desk: Desk) -> None:
        engine = Gated(max_batch=1)
        await desk.ask(engine, 0, 1, 2, 3)
        engine.max_calls = 3
        await engine.end()
        assert engine.calls == [[0], [1], [2], [3]] and len(engine.open) == 3

    eagerly(story)


def test_engines_do_not_wait_for_each_other() -> None:
    async def story(desk: Desk) -> None:
        slow, quick = Gated(), Gated()
        await desk.ask(slow, 0)
        await desk.ask(quick, 1)
        await quick.end()
        await desk.ask(quick, 2)
        assert (slow.calls, quick.calls) == ([[0]], [[1], [2]]) and desk.outcomes() == {1: 1}

    eagerly(story)


# ---------------------------------------------------------------- what is cut off


def test_who_gives_up_before_it_was_sent_is_not_sent() -> None:
    async def story(desk: Desk) -> None:
        engine = Gated(max_batch=2)
        await desk.ask(engine, 0, 1, 2, 3, 4)
        for i in (2, 4):
            desk.asked[i].cancel()
        await settle()
        await engine.end()
        await engine.end()
        assert engine.calls == [[0, 1], [3]] and desk.outcomes() == {0: 0, 1: 1, 3: 3}

    eagerly(story)


@pytest.mark.parametrize("error", [None, EngineError("broken")])
def test_who_gives_up_after_it_was_sent_leaves_the_others_their_turns(error: Exception | None) -> None:
    async def story(desk: Desk) -> None:
        engine = Gated()
        await desk.ask(engine, 0, 1, 2)
        desk.asked[1].cancel()
        await desk.ask(engine, 3)
        await engine.end(error)
        await engine.end()
        assert engine.calls == [[0, 1, 2], [3]]
        expected: Any = {0: 0, 2: 2} if error is None else {0: EngineError, 2: EngineError}
        assert desk.outcomes() == expected | {3: 3}

    eagerly(story)


@pytest.mark.parametrize("error", [EngineError("full"), EngineLost("gone"), KeyError("a bug of ours")])
def test_an_error_is_that_of_every_request_of_its_batch_and_of_no_other(error: Exception) -> None:
    async def story(desk: Desk) -> None:
        engine = Gated(max_batch=2, max_calls=2)
        await desk.ask(engine, 0, 1, 2, 3, 4)
        await engine.end(error)
        await engine.end()
        await engine.end()
        assert desk.outcomes() == {0: type(error), 1: type(error), 2: 2, 3: 3, 4: 4}

    eagerly(story)


def test_a_batch_of_the_wrong_size_is_an_error_of_that_batch() -> None:
    class Short(Gated):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            return (await super().generate(requests))[: 1 if requests[0].id.rollout == 0 else None]

    async def story(desk: Desk) -> None:
        engine = Short(max_batch=2)
        await desk.ask(engine, 0, 1, 2, 3)
        await engine.end()
        await engine.end()
        assert desk.outcomes() == {0: EngineError, 1: EngineError, 2: 2, 3: 3}

    eagerly(story)


def test_a_call_that_misses_its_deadline_names_its_requests_and_makes_place() -> None:
    """The time is the call's own: those that waited for their turn meanwhile have all of theirs."""

    async def story(desk: Desk) -> None:
        engine = Gated(max_batch=2)
        await desk.ask(engine, 0, 1, 2)
        for i in (0, 1):
            with pytest.raises(EngineTimeout) as late:
                await desk.asked[i]
            assert str(late.value) == "no completion after 0.1 s for g5/r0/planner/0, g5/r1/planner/0"
        await settle()
        assert engine.calls == [[0, 1], [2]]
        await engine.end()
        assert desk.outcomes() == {0: EngineTimeout, 1: EngineTimeout, 2: 2}

    eagerly(story, seconds=0.1)


# ---------------------------------------------------------------- what runs again

ANSWER = "<answer> Merova </answer>"
TASKS = [(7, Task("a", "what is Tarn ?", "Merova")), (3, Task("b", "what is Tarn ?", "Merova"))]
Member = tuple[int, int]


class Breaking(Recorder):
    """Has no answer for some rollouts, so many times each; one request a call, so that others do not suffer."""

    def __init__(self, times: dict[Member, int], error: type[Exception] = EngineError) -> None:
        super().__init__(says(ANSWER))
        self.max_batch, self.times, self.error = 1, dict(times), error
        self.asked: Counter[Member] = Counter()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = await super().generate(requests)
        member = requests[0].id.group, requests[0].id.rollout
        self.asked[member] += 1
        if self.asked[member] <= self.times.get(member, 0):
            raise self.error(f"no answer for {requests[0].id}")
        return completions


def run(engine: Recorder, scheduler: Scheduler, k: int = 4, **options: Any) -> list[Group]:
    team = Team(Agent("planner", compact_chat(), engine), **options)
    return asyncio.run(run_groups(TASKS, team, k, lambda task: None, scheduler))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait."""
    monkeypatch.setattr(rollouts, "FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize("whole", [False, True])
def test_only_rollouts_that_were_cut_off_run_again_unless_batches_must_repeat(at_once: None, whole: bool) -> None:
    engine = Breaking({(3, 1): 1, (3, 2): 2})
    groups = run(engine, Lockstep(SECONDS) if whole else Eager(SECONDS), max_retries=3)
    assert [[r.index for r in group.rollouts] for group in groups] == [[0, 1, 2, 3]] * 2
    assert not any(rollout.failure for group in groups for rollout in group.rollouts)
    assert [engine.asked[7, i] for i in range(4)] == [1, 1, 1, 1]
    assert [engine.asked[3, i] for i in range(4)] == ([3, 3, 3, 3] if whole else [1, 2, 3, 1])


def test_rollouts_that_were_finished_stay_as_they_are(at_once: None) -> None:
    texts = iter(range(100))
    engine = Breaking({(3, 2): 1})
    engine._script = lambda request: f"<answer> Merova {next(texts)} </answer>"
    seen: list[list[Group]] = []
    real = rollouts._run_once

    async def noted(*arguments: Any, **options: Any) -> list[Group]:
        seen.append(await real(*arguments, **options))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "_run_once", noted)
        groups = run(engine, Eager(SECONDS), max_retries=3)
    first, second = seen
    assert [group.id for group in second] == [3] and [r.index for r in second[0].rollouts] == [2]
    kept = [rollout for rollout in first[1].rollouts if rollout.index != 2]
    assert groups[0] is first[0]
    expected = [*kept[:2], *second[0].rollouts, kept[2]]
    assert all(mine is theirs for mine, theirs in zip(groups[1].rollouts, expected, strict=True))


def test_a_rollout_that_is_not_over_in_time_runs_again_alone(at_once: None) -> None:
    calls: Counter[Member] = Counter()

    class Slow(Breaking):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            member = requests[0].id.group, requests[0].id.rollout
            calls[member] += 1
            await asyncio.sleep(SECONDS if member == (7, 3) and calls[member] == 1 else 0)
            return await super().generate(requests)

    slow = Slow({})
    slow.max_calls = 8
    groups = run(slow, Eager(SECONDS), max_retries=1, rollout_timeout_s=1.0)
    assert not any(rollout.failure for group in groups for rollout in group.rollouts)
    assert calls[7, 3] == 2 and sum(calls.values()) == 9


# ---------------------------------------------------------------- what is accepted in the end


def gathered(times: dict[Member, int], k: int = 4, **options: Any) -> Gathered:
    rollout = {"max_retries": 1, "scheduler": "eager", **options}
    config = tiny(rollout=rollout, stages=[REINFORCE | {"num_generations": k}])
    engine = Breaking(times)
    acting = Team(Agent("planner", compact_chat(), engine), max_retries=1)
    team: Any = SimpleNamespace(
        config=config, scheduler=lambda: Eager(SECONDS), expert=lambda source: Gold().build(source=source)
    )

    class Questions:
        def corpus(self, task: Task) -> None:
            return None

        async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
            return Grade(1.0)

    source: Any = Questions()
    tasks = dict(TASKS)
    return asyncio.run(gather(team, acting, source, config.stages[0], [7, 3], lambda id, _: tasks[id], Watcher()))


FOR_EVER = 100


@pytest.mark.parametrize(("broken", "short"), [(0, False), (2, False), (3, True), (4, True)])
def test_a_group_with_fewer_rollouts_than_declared_is_accepted_and_teaches_nothing(
    at_once: None, broken: int, short: bool
) -> None:
    found = gathered({(3, i): FOR_EVER for i in range(broken)}, min_rollouts=2)
    assert [len(group.rollouts) for group in found.groups] == [4, 4]
    assert found.counts.get("short_groups", 0.0) == float(short)
    whole = {id.rollout: reward.value for id, reward in found.rewards.items() if id.group == 7}
    assert whole == dict.fromkeys(range(4), whole[0]) and whole[0] is not None
    own = {id.rollout: reward for id, reward in found.rewards.items() if id.group == 3}
    assert [own[i].value is None for i in range(4)] == [short or i < broken for i in range(4)]
    if short:
        assert {r.cause for r in own.values()} == {"fewer than 2 of 4 rollouts were not cut off"}
    else:
        assert all((own[i].cause or "").startswith("EngineError: no answer for g3") for i in range(broken))


def test_the_minimum_is_never_more_than_there_are(at_once: None) -> None:
    found = gathered({(3, 0): FOR_EVER}, k=2, min_rollouts=5)
    assert found.counts["short_groups"] == 1.0
    assert gathered({}, k=2, min_rollouts=5).counts.get("short_groups") is None


# ---------------------------------------------------------------- an engine that is gone


@pytest.mark.parametrize("scheduler", [Eager, Lockstep])
def test_a_lost_engine_is_no_rollouts_failure_but_ends_them_all(
    at_once: None, scheduler: Callable[[float], Scheduler]
) -> None:
    engine, own = Breaking({(3, 1): 1}, EngineLost), scheduler(SECONDS)
    with pytest.raises(EngineLost, match="no answer for g3/r1/planner/0"):
        run(engine, own, max_retries=3)
    assert engine.asked[3, 1] == 1  # not asked again
    groups = run(engine, scheduler(SECONDS), max_retries=3)
    assert not any(rollout.failure for group in groups for rollout in group.rollouts)


def test_so_does_the_engine_of_a_sub_agent(at_once: None) -> None:
    class Gone(Recorder):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            raise EngineLost("no server of 'searcher' is left")

    searcher = Agent("searcher", compact_chat(), Gone(says(ANSWER)))
    other = Lookup(lambda query, context: query)
    root = agent(says("<call> searcher Tarn </call> <call> search Tarn </call>", ANSWER), Delegate(searcher), other)
    with pytest.raises(EngineLost, match="no server of 'searcher' is left"):
        asyncio.run(run_groups(TASKS, Team(root, max_retries=3), 2, lambda task: None, Eager(SECONDS)))
