"""A judge over HTTP, a rule and a user's expert grade sub-agents while a team trains; an outage is unknown, never 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, completion, refusal, serving
from tiny_recipe import WARM_UP, table

from mgrpo.config import resolve
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.tasks.expert import Expert
from mgrpo.train import train
from mgrpo.types import Grade, Reward, Task, Trajectory

STAGE = WARM_UP | {"steps": 2, "weight_sync_steps": 1, "tasks": {"families": {"one_hop": 1}}}


class Strict(Expert):
    """Gives everybody the same grade."""

    def __init__(self, value: float) -> None:
        self._value = value

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        return Grade(self._value, grader="strict")


def run(folder: Path, expert: dict[str, Any], **rollout: Any) -> tuple[list[Reward], list[dict[str, Any]]]:
    """Rewards of all searchers of two steps of demonstrations, and the collect records."""
    config = resolve(table(stages=[STAGE], evaluation={}, expert=expert, rollout=rollout))
    train(config, folder, reporter=Reporter(folder, config, quiet=True))
    _, store = RunFolder(folder).open()
    found = []
    for id in range(store.committed()):
        group, rewards = store.group(id)
        found += [rewards[t.id] for r in group.rollouts for t in r.trajectories if t.parent is not None]
    assert store.trained("searcher") == store.committed() == 6
    store.close()
    return found, [record for record in read_metrics(folder) if record["kind"] == "collect"]


def judge(url: str) -> dict[str, Any]:
    engine = {"type": "openai", "model": "m", "base_url": url, "max_retries": 0, "timeout_s": 5.0}
    return {"type": "judge", "engine": engine, "concurrency": 1, "max_asks": 1, "prompt_price": 1.0}


def answers(good: int) -> list[Answer]:
    """So many replies of score 8 of 10, then an outage for ever."""
    return [completion('{"score": 8, "reason": "fine"}')] * good + [refusal(503, "overloaded")]


@pytest.mark.parametrize("unknown", ["renormalise", "exclude"])
def test_a_judge_that_goes_down_leaves_grades_unknown_with_their_cause(unknown: str, tmp_path: Path) -> None:
    with serving(*answers(2)) as server:
        rewards, records = run(tmp_path / "run", judge(server.base_url), unknown_reward=unknown)
    graded = [reward for reward in rewards if reward.parts["expert"] is not None]
    out = [reward for reward in rewards if reward.parts["expert"] is None]
    assert [reward.parts["expert"] for reward in graded] == [0.8, 0.8] and len(out) == 4
    for reward in out:  # format and the planner's answer are right: .1 + .4 of .5, or nothing is known
        assert reward.value == (1.0 if unknown == "renormalise" else None)
        assert unknown == "renormalise" or "503" in str(reward.cause)
    assert [reward.value for reward in graded] == [pytest.approx(0.1 + 0.4 + 0.5 * 0.8)] * 2
    assert sum(record["judge_calls"] for record in records) >= 6
    assert sum(record["judge_unknown"] for record in records) == 4
    assert sum(record["judge_cost"] for record in records) > 0


def test_a_rule_grades_what_the_searcher_read(tmp_path: Path) -> None:
    rewards, _ = run(tmp_path / "run", {"type": "rule", "rule": "grounded"})
    assert {reward.parts["expert"] for reward in rewards} == {1.0}


def test_an_expert_of_ones_own_is_named_by_import_path(tmp_path: Path) -> None:
    rewards, _ = run(tmp_path / "run", {"type": "test_experts_train:Strict", "value": 0.25})
    assert {reward.parts["expert"] for reward in rewards} == {0.25}
