"""Faults that other trainers have had when a rollout, a judge, a whole step or a gradient breaks, and what is right.

Beside these: dynamic sampling that finds nothing (R-58) in golden/test_field_sampling.py, the judge by itself (R-60)
in unit/test_judge.py, every optimiser and every kind of non-number (R-62) in unit/test_policy_update.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linear_policy import noting_policy
from one_question import QUESTION, Attempt, Call, Desk, alone, group_of, raw_rewards, recipe, stage_of
from scripted_run import ScriptedTeam, open_session, plan, run_to_the_end, trained_prompts
from tiny_models import tiny_model
from tiny_rows import POLICY_LOSS, SFT_LOSS, batches, random_rows
from tiny_team import Lookup, Recorder, compact_chat, turn_of
from torch import Tensor

from mgrpo.agents import rollout as rollouts
from mgrpo.agents.loop import Agent
from mgrpo.agents.rollout import Team, Watcher
from mgrpo.config import Config, resolve
from mgrpo.config.windows import windows
from mgrpo.engines.base import Completion, Request
from mgrpo.errors import EngineError, InfrastructureError, NonFiniteGradients, ToolError
from mgrpo.evaluate import reward
from mgrpo.gather import Gathered, gather
from mgrpo.policy.update import Policy, Schedule
from mgrpo.store.base import RunInfo
from mgrpo.store.opening import open_store
from mgrpo.tasks.judge import Judge, Settings
from mgrpo.team import task_source
from mgrpo.train import update
from mgrpo.types import Grade, Group, Reward, Sample, Share, Task, Trajectory, TrajectoryId

Worths = Mapping[TrajectoryId, Reward]


def shares_of(groups: Sequence[Group], worths: Worths, agent: str = "planner") -> list[Share]:
    return [
        Share(
            group.id,
            tuple(Sample(t, worths[t.id]) for r in group.rollouts for t in r.trajectories if t.id.agent == agent),
            {rollout.index: worths[rollout.root.id].value for rollout in group.rollouts},
        )
        for group in groups
    ]


def step_on(config: Config, policy: Policy, shares: Sequence[Share], agent: str = "planner") -> dict[str, float]:
    """One step of an agent's weights; its metrics."""
    window = next(window for window in windows(config) if window.stage == stage_of(config))
    desk: Any = Desk(config, agent, policy)
    return update(desk, window, {agent: shares}, 0, 0)[agent]


def moved_policy() -> Policy:
    """With moments that are not 0."""
    policy = Policy(tiny_model())
    policy.begin(Schedule(1e-3, 10))
    policy.update(batches(random_rows()), SFT_LOSS, 0)
    return policy


def state(policy: Policy) -> list[Tensor]:
    """Copies of all weights and of all that the optimiser keeps."""
    moments = [t for o in policy.optimizers for own in o.state_dict()["state"].values() for t in own.values()]
    return [t.detach().clone() for t in (*policy.model.parameters(), *moments)]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---------------------------------------------------------------- a step that teaches nothing


@pytest.mark.parametrize("worth", [None, 0.0, 1.0])
def test_a_step_without_anything_to_learn_is_skipped_and_changes_nothing(worth: float | None) -> None:
    """R-58: every reward unknown, or all alike: no loss, weights and moments bit for bit as they were."""
    config, policy = resolve(recipe("m_grpo")), moved_policy()
    groups = [group_of(alone(QUESTION), id)[0] for id in range(3)]
    worths = {t.id: Reward(worth, cause="outage") for g in groups for r in g.rollouts for t in r.trajectories}
    before = state(policy)
    metrics = step_on(config, policy, shares_of(groups, worths))
    assert same(state(policy), before) and len(before) == 4 * len(list(policy.model.parameters()))
    assert "loss" not in metrics and "grad_norm" not in metrics
    assert metrics.get("zero_variance_groups") == (None if worth is None else 3.0)
    mixed = dict(worths) | {groups[0].rollouts[k].root.id: Reward(float(k % 2)) for k in range(4)}
    assert "loss" in step_on(config, policy, shares_of(groups, mixed)) and not same(state(policy), before)


class Breaking(Recorder):
    """Answers by rollout; None is a broken engine. One request a call, so that others do not suffer."""

    def __init__(self, answers: Sequence[str | None], groups: Sequence[int] | None = None) -> None:
        super().__init__(lambda request: str(answers[request.id.rollout]))
        self.answers, self.groups, self.max_batch = answers, groups, 1

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = await super().generate(requests)
        id = requests[0].id
        if self.answers[id.rollout] is None and (self.groups is None or id.group in self.groups):
            raise EngineError(f"no answer for {id}")
        return completions


RIGHT, WRONG = "<answer> Merova </answer>", "<answer> Tarn p12 </answer>"


def test_where_every_rollout_is_lost_the_run_ends_after_bounded_tries_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-58: it does not use up its questions; resumed, it asks the same ones."""
    monkeypatch.setattr(rollouts, "FIRST_PAUSE_S", 0.0)
    config = plan(tmp_path, 4, stage={"steps": 2, "groups_per_step": 2}, rollout={"max_retries": 3})
    with open_session(config, tmp_path / "run") as session:
        team = ScriptedTeam(config)
        team.engine = Breaking([None, None])
        with pytest.raises(
            InfrastructureError, match="all 4 rollouts of groups 0 to 1 were lost, first by EngineError"
        ):
            run_to_the_end(session, team)
        asked = [request.id for batch in team.engine.batches for request in batch]
        assert {id: asked.count(id) for id in asked} == {
            TrajectoryId(g, k, "planner", 0): 4 for g in (0, 1) for k in (0, 1)
        }
        assert session.store.counts().groups == session.store.trained("planner") == 0
    with open_session(config, tmp_path / "run") as session:
        run_to_the_end(session)
        assert sorted(trained_prompts(session.store)) == ["0", "1", "2", "3"]


def test_a_group_of_which_nothing_is_left_teaches_nothing_and_counts_as_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-58: beside another group that is well."""
    monkeypatch.setattr(rollouts, "FIRST_PAUSE_S", 0.0)
    config = plan(tmp_path, 4, stage={"steps": 2, "groups_per_step": 2}, rollout={"max_retries": 1})
    with open_session(config, tmp_path / "run") as session:
        team = ScriptedTeam(config)
        team.engine = Breaking([None, None], groups=[1])
        run_to_the_end(session, team)
        group, worths = session.store.group(1)
        assert {r.failure.kind for r in group.rollouts if r.failure} == {"EngineError"}
        assert [worth.value for worth in worths.values()] == [None, None]
        assert sorted(trained_prompts(session.store)) == ["0", "1", "2", "3"]


# ---------------------------------------------------------------- one rollout that breaks


def gathered(config: Config, agent: Agent) -> Gathered:
    """One group of the recipe's K rollouts."""
    team: Any = ScriptedTeam(config)
    source = task_source(config, {}, "tasks")
    acting, stage = Team(agent, max_retries=0), config.stages[0]
    return asyncio.run(gather(team, acting, source, stage, [0], lambda id, _: source.task(id), Watcher()))


def broken_tool(query: str, context: Any) -> str:
    raise ToolError("the search service is down")


def by_engine(answers: Sequence[str | None]) -> Agent:
    return Agent("planner", compact_chat(), Breaking(answers))


def by_tool(answers: Sequence[str | None]) -> Agent:
    """A rollout whose tool breaks answers all the same, rightly: it must not count."""

    def script(request: Request) -> str:
        known = answers[request.id.rollout]
        return known if known is not None else ("<call> search Tarn </call>", RIGHT)[turn_of(request)]

    return Agent("planner", compact_chat(), Recorder(script), {"search": Lookup(broken_tool)})


@pytest.mark.parametrize(("breaking", "kind"), [(by_engine, "EngineError"), (by_tool, "ToolError")])
def test_a_group_of_four_with_one_broken_rollout_is_a_group_of_three(breaking: Any, kind: str, tmp_path: Path) -> None:
    """R-59: the others finish, its failure is on record, and loss, baseline and gradient are those of the three."""
    found = {}
    for answers in ([RIGHT, None, RIGHT, WRONG], [RIGHT, RIGHT, WRONG]):
        folder = tmp_path / str(len(answers))
        folder.mkdir()
        config = plan(folder, 2, stage={"num_generations": len(answers)})
        got = gathered(config, breaking(answers))
        store = open_store(folder / "s.db", RunInfo(0))
        store.commit(got.groups, got.rewards)
        (share,) = store.take("planner", 0, 1) or ()
        (summary,) = store.groups(0, 1)
        store.close()
        table = torch.randn(60, 60, generator=torch.manual_seed(0), dtype=torch.float64)
        policy, gradients = noting_policy(table)
        found[len(answers)] = step_on(config, policy, [share]), gradients, share, summary
    (four, gradients, share, summary), (three, expected, others, _) = found[4], found[3]
    assert [t.failure for t in summary.trajectories] == [None, kind, None, None]
    assert [t.ending for t in summary.trajectories if t.failure is None] == ["answer"] * 3
    assert (
        share.roots[1] is None and share.samples[1].reward.cause is not None and kind in share.samples[1].reward.cause
    )
    assert [value for value in share.roots.values() if value is not None] == list(others.roots.values())
    assert four == three and four["rows"] == 3.0 and four["reward_mean"] == pytest.approx((1.0 + 1.0 + 0.1) / 3)
    assert len(gradients) == len(expected) == 1 and torch.equal(gradients[0], expected[0])
    assert bool(gradients[0].any())


# ---------------------------------------------------------------- judges that hang


class Hanging:
    """A chat engine that never replies."""

    identity = model = "judge-1"
    retries = 0

    async def chat(self, messages: object) -> Any:
        await asyncio.sleep(600)

    async def close(self) -> None: ...


class Graded:
    """A task source that knows what each root is worth; one of them it never finds out."""

    def __init__(self, grades: Mapping[TrajectoryId, Grade], hangs: int | None = None) -> None:
        self.grades, self.hangs = grades, hangs

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        if trajectory.id.rollout == self.hangs:
            await asyncio.sleep(600)
        return self.grades[trajectory.id]


def rewarded(config: Config, group: Group, source: Graded) -> Worths:
    engine: Any = {"type": "openai", "model": "judge-1", "base_url": "http://127.0.0.1:1/v1"}
    judge = Judge(Settings.model_construct(engine=engine, deadline_s=0.05), Hanging())
    team: Any = SimpleNamespace(config=config, expert=lambda source: judge)
    return asyncio.run(reward(team, source, [group]))  # type: ignore[arg-type]


@pytest.mark.parametrize("unknown", ["exclude", "renormalise"])
def test_a_judge_that_hangs_gives_no_grade_with_its_cause_and_the_step_is_taken(unknown: str) -> None:
    """R-60: None and GraderError within the deadline, never 0; what else is known is learned from."""
    config = resolve(recipe("m_grpo", rollout={"unknown_reward": unknown}))
    group, grades = group_of(QUESTION)
    worths = rewarded(config, group, Graded(grades))
    judged = {id: worth for id, worth in worths.items() if id.agent == "searcher" and id.rollout != 1}
    assert len(judged) == 2 and all(worth.parts["expert"] is None for worth in judged.values())
    for worth in judged.values():
        if unknown == "exclude":
            assert worth.value is None
            assert worth.cause == "expert unknown: GraderError: judge judge-1 gave no grade within 0.05 s"
        else:
            assert worth.value == pytest.approx(1.0)  # format and the planner's right answer, rescaled
    metrics = step_on(config, moved_policy(), shares_of([group], worths))
    assert metrics["rows"] == 4.0 and "loss" in metrics
    expected = raw_rewards(config, group, grades)
    assert all(worths[id] == expected[id] for id in worths if id.agent == "planner")


def test_a_root_whose_grader_hangs_is_unknown_and_the_others_are_learned_from() -> None:
    """R-60."""
    config = resolve(recipe("m_grpo", rollout={"grade_timeout_s": 0.1}))
    group, grades = group_of((Attempt(True, (1,)), Attempt(False, (2,)), Attempt(True, (3,), (Call(0.5, (1,)),))))
    worths = rewarded(config, group, Graded(grades, hangs=0))
    unknown = worths[TrajectoryId(0, 0, "planner", 0)]
    assert unknown.value is None
    assert unknown.cause == "correct unknown: GraderError: no grade of g0/r0/planner/0 after 0.1 s"
    metrics = step_on(config, moved_policy(), shares_of([group], worths))
    assert metrics["rows"] == 2.0 and "loss" in metrics


# ---------------------------------------------------------------- a gradient that is none


def test_a_nan_in_one_parameters_gradient_skips_the_step_and_the_kth_in_a_row_ends_the_run() -> None:
    """R-62: weights and Adam's moments stay bit for bit, the counter grows by one, k in a row are too many."""
    policy, rows = moved_policy(), batches(random_rows())
    policy.schedule = Schedule(1e-3, 10, max_skipped_steps=3)
    before = state(policy)
    victim = next(policy.model.parameters())
    hook = victim.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([2]), float("nan")))
    for skipped in (1, 2):
        metrics = policy.update(rows, POLICY_LOSS, skipped)
        assert metrics["skipped_steps"] == 1.0 and metrics["learning_rate"] == 0.0
        assert same(state(policy), before) and policy.state()["skipped"] == skipped
    with pytest.raises(NonFiniteGradients, match="3 optimiser steps in a row"):
        policy.update(rows, POLICY_LOSS, 3)
    assert same(state(policy), before)
    hook.remove()
    assert policy.update(rows, POLICY_LOSS, 4)["skipped_steps"] == 0.0 == policy.state()["skipped"]
    assert not same(state(policy), before)
