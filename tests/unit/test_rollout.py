"""Groups of rollouts and the schedulers: batches, determinism, deadlines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_team import Lookup, Recorder, agent, compact_chat, says

from mgrpo.agents import rollout as rollouts
from mgrpo.agents.delegate import Delegate
from mgrpo.agents.loop import Agent
from mgrpo.agents.rollout import Team, Watcher, run_groups
from mgrpo.agents.scheduler import Lockstep
from mgrpo.engines.base import Completion, Request
from mgrpo.errors import EngineError, ToolError
from mgrpo.types import Corpus, Group, Task, ToolResult

ANSWER = "<answer> Merova </answer>"
TASKS = [(7, Task("a", "what is Tarn ?")), (3, Task("b", "what is Tarn ?"))]


def plan(request: Request) -> str:
    """One, two or three calls at once, by rollout; then an answer."""
    if len(request.messages) > 1:
        return ANSWER
    return " ".join(f"<call> searcher {place} </call>" for place in ("Tarn", "Merova", "Zubora")[: request.id.rollout])


def team(seconds: Any = 0.0, plan: Any = plan, **options: Any) -> Team:
    class Jittery(Lookup):
        async def __call__(self, arguments, context):  # type: ignore[no-untyped-def]
            await asyncio.sleep(seconds() if callable(seconds) else seconds)
            return ToolResult(f"{arguments['query']} p12")

    sub = agent(
        says("<call> search Tarn </call>", "<answer> Tarn <source> p12 </answer>"), Jittery(print), name="searcher"
    )
    return Team(agent(plan, Delegate(sub)), **options)


def engines(team: Team) -> tuple[Recorder, Recorder]:
    delegate = team.root.tools["searcher"]
    assert isinstance(delegate, Delegate)
    planner, searcher = team.root.engine, delegate.agent.engine
    assert isinstance(planner, Recorder) and isinstance(searcher, Recorder)
    return planner, searcher


def collect(team: Team, scheduler: Lockstep | None = None, k: int = 4, tasks: Any = TASKS) -> list[Group]:
    return asyncio.run(run_groups(tasks, team, k, lambda task: None, scheduler or Lockstep(5.0)))


def without_clock(groups: Sequence[Group]) -> str:
    assert groups == groups  # started and seconds do not take part in equality
    return repr([[[(t.id, t.parent, t.answer) for t in r.trajectories] for r in g.rollouts] for g in groups])


def test_groups_in_order_rollouts_by_index_root_first() -> None:
    groups = collect(team())
    assert [(g.id, g.task.id, len(g.rollouts)) for g in groups] == [(7, "a", 4), (3, "b", 4)]
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            assert (rollout.group, rollout.index, rollout.failure) == (group.id, index, None)
            assert rollout.root.parent is None and rollout.root.id.agent == "planner"
            assert len(rollout.children(rollout.root.id)) == index
            assert [t.id.invocation for t in rollout.trajectories[1:]] == list(range(index))


def test_lockstep_batches_are_whole_rounds_in_order_of_id() -> None:
    both = team()
    collect(both)
    planner, searcher = engines(both)
    assert [len(batch) for batch in planner.batches] == [8, 2, 6]  # rollout 0 calls no one, and errs; six wait
    assert [len(batch) for batch in searcher.batches] == [12, 12]
    for batch in (*planner.batches, *searcher.batches):
        assert [request.id for request in batch] == sorted(request.id for request in batch)


def test_lockstep_does_not_depend_on_timing() -> None:
    seen = []
    for seed in range(3):
        jitter = random.Random(seed)
        both = team(lambda jitter=jitter: jitter.random() * 0.01)
        groups = collect(both)
        ids = [[[request.id for request in batch] for batch in engine.batches] for engine in engines(both)]
        seen.append((without_clock(groups), ids))
    assert seen[0] == seen[1] == seen[2]


def test_agents_that_share_an_engine_share_its_batches() -> None:
    both = team()
    planner, searcher = engines(both)
    shared = Recorder(lambda request: (plan if request.id.agent == "planner" else says(*SUB))(request))
    delegate = both.root.tools["searcher"]
    assert isinstance(delegate, Delegate)
    sub = Agent("searcher", compact_chat(), shared, delegate.agent.tools)
    collect(Team(Agent("planner", compact_chat(), shared, {"searcher": Delegate(sub)})))
    assert [len(batch) for batch in shared.batches] == [8, 14, 12, 6]


SUB = ("<call> search Tarn </call>", "<answer> Tarn <source> p12 </answer>")


class Hanging(Recorder):
    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await asyncio.sleep(60)
        return []


def test_an_engine_that_hangs_meets_its_deadline() -> None:
    groups = collect(Team(Agent("planner", compact_chat(), Hanging(says()))), Lockstep(0.02), k=1)
    failure = groups[0].rollouts[0].failure
    assert failure is not None and failure.kind == "EngineTimeout"
    assert failure.message.startswith("no completion after 0.02 s for g")
    assert "g3/r0/planner/0" in failure.message and "g7/r0/planner/0" in failure.message


def test_a_batch_of_the_wrong_size_is_an_engine_error() -> None:
    class Short(Recorder):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            return (await super().generate(requests))[:-1]

    failure = collect(Team(Agent("planner", compact_chat(), Short(says(ANSWER)))))[0].rollouts[0].failure
    assert failure is not None and failure.message == "the engine returned 7 completions for 8 requests"


def test_a_rollout_that_takes_too_long_fails_alone() -> None:
    def one_slow(request: Request) -> str:
        slow = request.id.rollout == 1 and request.id.group == 7
        return "<call> search Tarn </call>" if slow and len(request.messages) == 1 else ANSWER

    slow = Lookup(lambda query, context: "late", seconds=30.0)
    groups = collect(Team(agent(one_slow, slow), rollout_timeout_s=0.3), Lockstep(5.0), k=2)
    late = groups[0].rollouts[1]
    assert late.failure is not None and late.failure.message == "rollout g7/r1 not over after 0.3 s"
    assert late.root.ending == "failure" and len(late.root.turns) == 1
    assert [r.failure for g in groups for r in g.rollouts if r is not late] == [None, None, None]


def test_a_rollout_that_ends_while_others_wait_lets_them_go_on() -> None:
    def uneven(request: Request) -> str:
        return ANSWER if len(request.messages) > 2 * request.id.rollout else "<call> search Tarn </call>"

    searching = agent(uneven, Lookup(lambda query, context: query))
    groups = collect(Team(searching))
    assert [len(r.root.turns) for g in groups for r in g.rollouts] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert [len(batch) for batch in searching.engine.batches] == [8, 6, 4, 2]  # type: ignore[attr-defined]


def test_an_engine_failure_of_the_root_is_the_rollouts() -> None:
    class Flaky(Recorder):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            if any(len(request.messages) > 1 for request in requests):
                raise EngineError("lost the connection")
            return await super().generate(requests)

    root = agent(says("<call> search Tarn </call>"), Lookup(lambda query, context: query))
    rollout = collect(Team(Agent("planner", compact_chat(), Flaky(says("<call> search Tarn </call>")), root.tools)))[0]
    assert {r.failure.kind for r in rollout.rollouts if r.failure} == {"EngineError"}
    assert all(r.root.ending == "failure" and len(r.root.turns) == 1 for r in rollout.rollouts)


def test_a_bug_ends_everything_and_the_scheduler_is_free_again() -> None:
    def bug(request: Request) -> str:
        raise KeyError("ours")

    scheduler = Lockstep(5.0)
    for tool in (bug, plan):
        try:
            groups = collect(team(plan=tool), scheduler)
        except KeyError as error:
            assert tool is bug and error.args == ("ours",)
    assert len(groups) == 2 and scheduler._active == 0


def test_each_rollout_gets_its_tasks_corpus_and_the_seed() -> None:
    seen: list[Any] = []
    look = Lookup(lambda query, context: str(seen.append((context.task.id, context.corpus, context.seed)) or "Tarn"))
    one = agent(says("<call> search Tarn </call>", ANSWER), look)
    corpora = {"a": Corpus("world a", {}), "b": Corpus("world b", {})}
    asyncio.run(run_groups(TASKS, Team(one), 1, lambda task: corpora[task.id], Lockstep(5.0), seed=11))
    assert sorted((task, corpus.name, seed) for task, corpus, seed in seen) == [
        ("a", "world a", 11),
        ("b", "world b", 11),
    ]


# ---------------------------------------------------------------- batches, retries, progress


def test_each_batch_of_an_engine_has_its_own_deadline() -> None:
    class Slow(Recorder):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            await asyncio.sleep(0.1)
            return await super().generate(requests)

    slow = Slow(says(ANSWER))
    slow.max_batch = 2
    groups = collect(Team(Agent("planner", compact_chat(), slow)), Lockstep(0.25))
    assert [len(batch) for batch in slow.batches] == [2, 2, 2, 2]  # 0.4 s in all
    assert not any(rollout.failure for group in groups for rollout in group.rollouts)


class Recovering(Recorder):
    """Broken for group 3 in its first ``broken`` calls."""

    def __init__(self, broken: int) -> None:
        super().__init__(says(ANSWER))
        self.broken = broken
        self.max_batch = 4

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = await super().generate(requests)
        if self.broken and requests[0].id.group == 3:
            self.broken -= 1
            raise EngineError("restarting")
        return completions


@pytest.mark.parametrize(("broken", "left"), [(0, False), (2, False), (3, True)])
def test_groups_that_were_cut_off_run_again_whole_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, broken: int, left: bool
) -> None:
    monkeypatch.setattr(rollouts, "FIRST_PAUSE_S", 0.01)
    engine, told = Recovering(broken), []
    watcher = Watcher(on_retry=lambda groups, first: told.append((groups, str(first))))
    team = Team(Agent("planner", compact_chat(), engine), max_retries=2)
    groups = asyncio.run(run_groups(TASKS, team, 4, lambda task: None, Lockstep(5.0), watcher=watcher))
    assert [group.id for group in groups] == [7, 3]
    assert [[r.failure is not None for r in group.rollouts] for group in groups] == [[False] * 4, [left] * 4]
    # what the engine wrote before it broke is an orphan; a rollout has the one trajectory of its last run.
    assert all(len(rollout.trajectories) == 1 for group in groups for rollout in group.rollouts)
    again = min(broken, 2)
    assert told == [(1, "EngineError: restarting")] * again
    assert [batch[0].id.group for batch in engine.batches] == [3, 7] + [3] * again


def test_a_broken_tool_cuts_nothing_off() -> None:
    def broken(query: str, context: Any) -> str:
        raise ToolError("no network")

    one = agent(says("<call> search Tarn </call>", ANSWER), Lookup(broken))
    groups = collect(Team(one, max_retries=2), k=1)
    assert groups[0].rollouts[0].failure is not None and len(one.engine.batches) == 2  # type: ignore[attr-defined]


def test_progress_counts_every_rollout_that_is_over() -> None:
    told: list[tuple[int, int]] = []
    watcher = Watcher(on_rollout=lambda done, total: told.append((done, total)))
    asyncio.run(run_groups(TASKS, team(), 4, lambda task: None, Lockstep(5.0), watcher=watcher))
    assert told == [(done, 8) for done in range(1, 9)]


def test_a_bug_of_an_engine_is_raised_where_its_requests_wait() -> None:
    incomplete = Recorder(says(ANSWER))
    del incomplete.max_batch
    with pytest.raises(AttributeError, match="max_batch"):
        collect(Team(Agent("planner", compact_chat(), incomplete)))
