"""For any groups whatsoever: what goes in comes out, once, in order of key."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgrpo.errors import UserError
from mgrpo.store.base import RunInfo, Store, WeightVersion
from mgrpo.store.opening import open_store
from mgrpo.types import (
    Failure,
    Findings,
    Group,
    Parent,
    Reply,
    Reward,
    Rollout,
    Sample,
    Share,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
)

LIGHT = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
AGENTS = ("planner", "searcher", "Ärztin-2")


@contextmanager
def new_store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "s.db", RunInfo(0))
        yield store
        store.close()


# ---------------------------------------------------------------- any group

texts = st.text(max_size=8)
reals = st.floats(allow_nan=False)
tokens = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | reals | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
failures = st.none() | st.builds(Failure, texts, texts)
findings = st.builds(Findings, texts, texts, st.lists(texts, max_size=2).map(tuple))
replies = st.builds(
    Reply,
    texts,
    st.lists(st.builds(ToolCall, texts, json_objects), max_size=2).map(tuple),
    st.none() | findings,
    st.none() | texts,
)
rewards = st.builds(
    Reward, st.none() | st.floats(-1e9, 1e9), st.dictionaries(texts, st.none() | reals, max_size=3), st.none() | texts
)


@st.composite
def turns(draw: Callable[..., Any]) -> Turn:
    sampled = draw(tokens)
    return Turn(
        context_ids=draw(tokens),
        token_ids=sampled,
        logprobs=tuple(draw(st.lists(reals, min_size=len(sampled), max_size=len(sampled)))),
        version=draw(st.integers(-1, 2**40)),
        stop_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(texts),
        reply=draw(replies),
        results=tuple(draw(st.lists(st.builds(ToolResult, texts, st.none() | texts, failures), max_size=2))),
        new_row=draw(st.booleans()),
        forced=draw(st.booleans()),
        started=draw(reals),
        seconds=draw(reals),
    )


@st.composite
def rollouts(draw: Callable[..., Any], group: int, index: int) -> Rollout:
    keys = draw(st.lists(st.tuples(st.sampled_from(AGENTS), st.integers(0, 20)), max_size=4, unique=True))
    ids = [TrajectoryId(group, index, agent, invocation) for agent, invocation in keys]
    trajectories = [
        Trajectory(
            id=id,
            task=draw(texts),
            turns=tuple(draw(st.lists(turns(), max_size=2))),
            ending=draw(st.sampled_from(["answer", "max_turns", "max_context", "failure"])),
            answer=draw(st.none() | findings),
            parent=None if id == ids[0] else Parent(draw(st.sampled_from(ids)), draw(st.integers(0, 9)), 0),
            context=draw(texts),
            failure=draw(failures),
        )
        for id in ids
    ]
    return Rollout(group, index, tuple(trajectories), draw(failures))


@st.composite
def rewarded_groups(draw: Callable[..., Any], id: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
    indices = draw(st.lists(st.integers(0, 30), max_size=3, unique=True))
    task = Task(draw(texts), draw(texts), draw(st.none() | texts), draw(st.integers(0, 9)), draw(json_objects))
    group = Group(id, task, tuple(draw(rollouts(id, index)) for index in indices))
    return group, {t.id: draw(rewards) for r in group.rollouts for t in r.trajectories}


def times(group: Group) -> list[tuple[float, float]]:
    """Fields that equality of turns leaves out."""
    return [(turn.started, turn.seconds) for r in group.rollouts for t in r.trajectories for turn in t.turns]


# ---------------------------------------------------------------- laws


@LIGHT
@given(rewarded_groups(5))
def test_any_group_comes_back_exactly(rewarded: tuple[Group, dict[TrajectoryId, Reward]]) -> None:
    group, rewards = rewarded
    with new_store() as store:
        store.commit([group], rewards)
        store.commit([group], rewards)
        found, found_rewards = store.group(5)
        assert (found, found_rewards) == (group, rewards)
        assert repr(found) == repr(group) and times(found) == times(group)
        for agent in AGENTS:
            expected = [Sample(t, rewards[t.id]) for r in group.rollouts for t in r.trajectories if t.id.agent == agent]
            expected.sort(key=lambda sample: sample.trajectory.id)
            roots = {r.index: rewards[r.root.id].value for r in group.rollouts if r.trajectories}
            assert store.take(agent, 5, 1) == [Share(5, tuple(expected), roots)]
        (summary,) = store.groups(5, 1)
        assert {t.id: t.reward for t in summary.trajectories} == {id: reward.value for id, reward in rewards.items()}


def plain(id: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
    ids = [TrajectoryId(id, 0, "planner", 0), *(TrajectoryId(id, 0, "searcher", i) for i in range(id % 3))]
    nodes = [Trajectory(i, "t", (), "answer", None, None if i == ids[0] else Parent(ids[0], 0, 0)) for i in ids]
    return Group(id, Task("t", "q"), (Rollout(id, 0, tuple(nodes)),)), {i: Reward(id / 7) for i in ids}


@LIGHT
@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=4), st.integers(1, 8))
def test_order_is_by_key_whatever_the_order_of_arrival(arrivals: list[int], repeats: list[int], batch: int) -> None:
    order = arrivals + repeats
    with new_store() as store:
        for start in range(0, len(order), batch):
            some = [plain(id) for id in dict.fromkeys(order[start : start + batch])]
            store.commit([group for group, _ in some], {id: r for _, rewards in some for id, r in rewards.items()})
        assert store.committed() == 8 and store.counts().groups == 8
        taken = store.take("searcher", 0, 8)
        assert taken is not None
        ids = [[s.trajectory.id for s in share.samples] for share in taken]
        assert ids == [[TrajectoryId(g, 0, "searcher", i) for i in range(g % 3)] for g in range(8)]
        assert [summary.id for summary in store.groups(0, 8)] == list(range(8))


@LIGHT
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 4)), max_size=12))
def test_every_group_is_consumed_once_in_order(attempts: list[tuple[int, int, int]]) -> None:
    """Publish anything, accepted or refused: what was consumed tiles 0..trained-1 and versions never fall."""
    with new_store() as store:
        some = [plain(id) for id in range(8)]
        store.commit([group for group, _ in some], {id: r for _, rewards in some for id, r in rewards.items()})
        for version, first, count in attempts:
            before = store.trained("a")
            try:
                store.publish(WeightVersion("a", version, f"w/{version}", "c", 0, "rl"), range(first, first + count))
            except (ValueError, UserError):
                assert store.trained("a") == before
        published = store.publications("a")
        assert [id for p in published for id in p.consumed] == list(range(store.trained("a")))
        versions = [p.weights.version for p in published]
        assert versions == sorted(versions)
        assert store.trained("a") <= 8
