"""What every store must do, see conftest.py for which there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from store_samples import commit, group, rewards_of, rollout, trajectory, turn, weights

from mgrpo.errors import UserError
from mgrpo.store.base import Counts, RunInfo, Store, WeightVersion
from mgrpo.store.records import encode
from mgrpo.types import Failure, Group, Reward, Rollout, Sample, TrajectoryId

Opener = Callable[[], Store]


# ---------------------------------------------------------------- collect


def test_an_empty_store_knows_nothing_and_says_so(store: Store) -> None:
    assert store.committed() == 0
    assert store.trained("planner") == 0
    assert store.latest("planner") is None
    assert store.take("planner", 0, 1) is None
    assert store.counts() == Counts()
    assert store.groups(0, 10) == [] and store.publications() == []
    with pytest.raises(KeyError, match="group 0 is not in the store"):
        store.group(0)


def test_a_group_comes_back_exactly_as_committed(store: Store) -> None:
    failed = Rollout(4, 2, (), Failure("EngineTimeout", "no answer in 120 s"))
    whole = group(4)
    whole = replace(whole, rollouts=(*whole.rollouts, failed))
    rewards = rewards_of(whole)
    store.commit([whole], rewards)
    assert store.group(4) == (whole, rewards)


def test_a_second_commit_of_the_same_id_changes_nothing(store: Store) -> None:
    first, other = group(0, (1, 2)), group(0, (3, 0))
    store.commit([first], rewards_of(first, value=0.1))
    store.commit([other, group(1)], rewards_of(other, group(1), value=0.9))
    assert store.group(0) == (first, rewards_of(first, value=0.1))
    assert store.counts().groups == 2 and store.counts().trajectories == 10
    own = tuple(s for s in samples_of(first, 0.1) if s.trajectory.id.agent == "searcher")
    assert [share.samples for share in store.take("searcher", 0, 1) or ()] == [own]


def samples_of(group: Group, value: float | None) -> list[Sample]:
    rewards = rewards_of(group, value=value)
    return [Sample(t, rewards[t.id]) for r in group.rollouts for t in r.trajectories]


def test_committed_stops_before_the_first_missing_group(store: Store) -> None:
    commit(store, 0, 1, 3)
    assert store.committed() == 2
    commit(store, 2)
    assert store.committed() == 4


def test_missing_names_the_groups_that_are_not_committed(store: Store) -> None:
    assert store.missing(range(3)) == [0, 1, 2]
    commit(store, 0, 1, 3, 7)
    assert store.missing(range(8)) == [2, 4, 5, 6]
    assert store.missing(range(3, 4)) == [] and store.missing(range(5, 5)) == []


def test_committing_nothing_is_allowed(store: Store) -> None:
    store.commit([], {})
    assert store.committed() == 0


ROOT = trajectory(TrajectoryId(1, 0, "planner", 0))
ORPHAN = trajectory(TrajectoryId(1, 0, "searcher", 0))


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([rollout(2, 0, 1)], "group 1 holds rollout 0 of group 2"),
        ([Rollout(1, 5, (ROOT,))], "g1/r5 holds g1/r0/planner/0"),
        ([Rollout(1, 0, (ORPHAN,))], "the parent g1/r0/planner/0 of g1/r0/searcher/0 is not in its rollout"),
        ([rollout(1, 0, 1), rollout(1, 0, 1)], "rollout indices of group 1 repeat: 0, 0"),
        ([Rollout(1, 0, (ROOT, ROOT))], "trajectory ids of g1/r0 repeat"),
    ],
)
def test_a_group_that_does_not_fit_together_is_refused_whole(
    store: Store, rollouts: list[Rollout], message: str
) -> None:
    groups = [group(0), replace(group(1), rollouts=tuple(rollouts))]
    with pytest.raises(ValueError, match=message):
        store.commit(groups, rewards_of(*groups))
    assert store.counts() == Counts()


def test_rewards_must_fit_the_groups(store: Store) -> None:
    good, rewards = group(0), rewards_of(group(0))
    lost = TrajectoryId(0, 1, "searcher", 1)
    with pytest.raises(ValueError, match="no reward for g0/r1/searcher/1"):
        store.commit([good], {id: reward for id, reward in rewards.items() if id != lost})
    with pytest.raises(ValueError, match="a reward for g9/r0/planner/0, which is in none of the groups"):
        store.commit([good], rewards | {TrajectoryId(9, 0, "planner", 0): Reward(1.0)})
    with pytest.raises(ValueError, match="the reward of g0/r1/searcher/1 is nan"):
        store.commit([good], rewards | {lost: Reward(float("nan"))})
    with pytest.raises(ValueError, match="group ids of one commit repeat: 0, 0"):
        store.commit([good, good], rewards)
    assert store.counts() == Counts()


def test_two_collectors_racing_for_the_same_ids_leave_one_attempt_of_each_group(opener: Opener) -> None:
    attempts = {"a": (2, 0), "b": (0, 3)}

    def collect(searches: tuple[int, ...]) -> None:
        store = opener()
        for id in range(20):
            whole = group(id, searches)
            store.commit([whole], rewards_of(whole))
        store.close()

    opener().close()
    threads = [threading.Thread(target=collect, args=(searches,)) for searches in attempts.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = opener()
    assert store.committed() == 20
    for id in range(20):
        assert store.group(id)[0] in [group(id, searches) for searches in attempts.values()]
    assert store.counts().trajectories == sum(len(g.trajectories) for g in store.groups(0, 20))
    store.close()


# ---------------------------------------------------------------- learn


def test_take_waits_until_every_group_is_there(store: Store) -> None:
    commit(store, 0, 2)
    assert store.take("planner", 0, 3) is None
    commit(store, 1)
    taken = store.take("planner", 0, 3)
    assert taken is not None and [len(share.samples) for share in taken] == [2, 2, 2]


def test_taking_four_of_ten_leaves_six(store: Store) -> None:
    """R-52."""
    commit(store, *range(10))
    taken = store.take("planner", 0, 4)
    assert taken is not None and [share.samples[0].trajectory.id.group for share in taken] == [0, 1, 2, 3]
    store.publish(weights(1), range(4))
    rest = store.take("planner", store.trained("planner"), 6)
    assert rest is not None and [share.samples[0].trajectory.id.group for share in rest] == [4, 5, 6, 7, 8, 9]


def test_take_gives_an_agent_its_own_rows_in_order_of_rollout_and_invocation(store: Store) -> None:
    shuffled = group(0, (2, 0, 11))
    shuffled = replace(shuffled, rollouts=shuffled.rollouts[::-1])
    store.commit([shuffled], rewards_of(shuffled))
    taken = store.take("searcher", 0, 1)
    assert taken is not None
    ids = [(s.trajectory.id.rollout, s.trajectory.id.invocation) for s in taken[0].samples]
    assert ids == [(0, 0), (0, 1), *((2, i) for i in range(11))]


def test_an_agent_that_was_not_called_takes_empty_groups(store: Store) -> None:
    commit(store, 0, 1)
    taken = store.take("verifier", 0, 2)
    assert taken is not None
    assert [(share.group, share.samples) for share in taken] == [(0, ()), (1, ())]


def test_take_tells_what_every_root_was_worth_and_nothing_else_of_it(store: Store) -> None:
    """A sub-agent's learner can count K and inherit from the planner, rollouts in which it was not called included."""
    whole = group(0, (2, 0, 1))
    worth = rewards_of(whole, value=0.25)
    lost = whole.rollouts[2].root.id
    store.commit([whole], {**worth, lost: Reward(None, cause="judge timed out")})
    (share,) = store.take("searcher", 0, 1) or ()
    assert share.roots == {0: 0.25, 1: 0.25, 2: None}
    assert {s.trajectory.id.agent for s in share.samples} == {"searcher"}


def test_an_unknown_reward_stays_unknown(store: Store) -> None:
    whole = group(0)
    store.commit([whole], rewards_of(whole, value=None))
    taken = store.take("planner", 0, 1)
    assert taken is not None
    assert taken[0].samples[0].reward == Reward(None, {"format": 1.0, "expert": None}, "judge timed out")
    assert {t.reward for t in store.groups(0, 1)[0].trajectories} == {None}


def test_publishing_moves_cursor_and_weights_together(store: Store) -> None:
    commit(store, *range(4))
    store.publish(weights(0), ())
    assert (store.trained("planner"), store.latest("planner")) == (0, weights(0))
    store.publish(weights(1), range(2), {"loss": 0.1 + 0.2, "entropy": float("inf")})
    assert (store.trained("planner"), store.latest("planner")) == (2, weights(1))
    assert (store.trained("searcher"), store.latest("searcher")) == (0, None)


def test_a_step_without_rows_consumes_and_keeps_the_version(store: Store) -> None:
    commit(store, *range(4))
    store.publish(weights(0), ())
    store.publish(weights(0, step=1), range(2), {"rows": 0.0})
    assert store.trained("planner") == 2
    assert store.latest("planner") == weights(0, step=1)
    assert [p.consumed for p in store.publications("planner")] == [range(0, 0), range(0, 2)]


def test_the_same_publication_again_changes_nothing(store: Store) -> None:
    commit(store, *range(4))
    for _ in range(2):
        store.publish(weights(0), ())
    for _ in range(2):
        store.publish(weights(1), [0, 1], {"loss": 1.0})
    assert [p.weights.version for p in store.publications("planner")] == [0, 1]
    assert store.trained("planner") == 2


def test_a_second_learner_of_an_agent_is_told_so(store: Store) -> None:
    commit(store, *range(4))
    store.publish(weights(1), range(2))
    with pytest.raises(UserError, match=r"'planner' already consumed groups 0\.\.1 .* another learner"):
        store.publish(replace(weights(1), checksum="sha256:other"), range(2))
    with pytest.raises(UserError, match="publishes version 0 after version 1"):
        store.publish(weights(0), range(2, 4))
    assert store.trained("planner") == 2 and store.latest("planner") == weights(1)


@pytest.mark.parametrize(
    ("version", "consumed", "message"),
    [
        (weights(2), range(3, 4), "cannot consume groups 3..3: its next group is 2"),
        (weights(2), range(2, 5), "cannot consume groups 2..4: not all are committed"),
        (weights(2), [2, 3, 3], "must follow each other without a gap"),
        (weights(2), [3, 2], "must follow each other without a gap"),
        (replace(weights(1), checksum="sha256:other"), range(2, 4), "version 1 of 'planner' names other weights"),
    ],
)
def test_a_publication_that_does_not_fit_leaves_nothing(
    store: Store, version: WeightVersion, consumed: range | list[int], message: str
) -> None:
    commit(store, *range(4))
    store.publish(weights(1), range(2))
    with pytest.raises(ValueError, match=message):
        store.publish(version, consumed)
    assert store.trained("planner") == 2 and store.latest("planner") == weights(1)


def test_a_run_goes_on_after_what_was_trained_not_after_what_was_collected(opener: Opener) -> None:
    """R-46."""
    store = opener()
    commit(store, *range(4))
    store.publish(weights(1), range(2))
    store.close()
    again = opener()
    assert again.committed() == 4 and again.trained("planner") == 2
    taken = again.take("planner", again.trained("planner"), 2)
    assert taken is not None and [share.samples[0].trajectory.id.group for share in taken] == [2, 3]
    again.close()


def test_a_share_says_how_many_bytes_its_samples_took_and_no_other_agents(store: Store) -> None:
    groups = [group(0, (0, 1)), group(1, (3, 2))]
    worth = rewards_of(*groups)
    store.commit(groups, worth)
    for agent in ("planner", "searcher", "verifier"):
        own = [[t for r in g.rollouts for t in r.trajectories if t.id.agent == agent] for g in groups]
        expected = [sum(len(encode(Sample(t, worth[t.id]))) for t in found) for found in own]
        assert [share.bytes for share in store.take(agent, 0, 2) or ()] == expected
    assert expected == [0, 0]


# ---------------------------------------------------------------- read


def test_the_reader_knows_its_run(store: Store, run_info: RunInfo) -> None:
    assert store.run == run_info and store.run.created > 0


def test_publications_carry_metrics_exactly_and_agent_by_agent(store: Store) -> None:
    commit(store, 0)
    store.publish(weights(0, "searcher"), ())
    store.publish(weights(0), ())
    store.publish(weights(1), range(1), {"loss": 0.1 + 0.2, "lr": 5e-324})
    published = store.publications()
    assert [(p.weights.agent, p.weights.version) for p in published] == [
        ("planner", 0),
        ("planner", 1),
        ("searcher", 0),
    ]
    assert published[1].metrics == {"loss": 0.1 + 0.2, "lr": 5e-324}
    assert published[1].created > 0


def test_summaries_show_the_tree_the_reward_and_the_versions_of_sampled_tokens_only(store: Store) -> None:
    root = trajectory(TrajectoryId(3, 0, "planner", 0), turn(4), turn(-1, tokens=0), turn(6, tokens=2))
    silent = trajectory(TrajectoryId(3, 0, "searcher", 0), turn(-1, tokens=0))
    broken = replace(
        silent, id=TrajectoryId(3, 0, "searcher", 1), ending="failure", failure=Failure("ToolError", "503")
    )
    whole = replace(group(3), rollouts=(Rollout(3, 0, (root, silent, broken), Failure("ToolError", "503")),))
    store.commit([whole], rewards_of(whole))
    (summary,) = store.groups(0, 10)
    assert (summary.id, summary.task, summary.rollouts, summary.failed_rollouts) == (3, whole.task, 1, 1)
    shown = [(str(t.id), t.sampled_tokens, t.min_version, t.max_version, t.failure) for t in summary.trajectories]
    assert shown == [
        ("g3/r0/planner/0", 5, 4, 6, None),
        ("g3/r0/searcher/0", 0, None, None, None),
        ("g3/r0/searcher/1", 0, None, None, "ToolError"),
    ]
    assert [t.parent for t in summary.trajectories] == [None, root.id, root.id]
    assert [t.ending for t in summary.trajectories] == ["answer", "answer", "failure"]
    assert store.counts() == Counts(1, 1, 1, 3, 5)


def test_one_handle_sees_what_another_committed(opener: Opener) -> None:
    writer, reader = opener(), opener()
    assert reader.committed() == 0
    commit(writer, 0)
    assert reader.committed() == 1 and reader.group(0)[0] == group(0)
    writer.close()
    reader.close()
