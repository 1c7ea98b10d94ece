"""Sub-agents of a team that learns from its own rollouts: graded by a judge that goes down for a while, or a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, completion, refusal, serving
from tiny_recipe import REINFORCE, table, train_briefly, warmed_team

from mgrpo.config import resolve
from mgrpo.run import RunFolder
from mgrpo.tasks.expert import Expert
from mgrpo.types import Grade, Reward, Task, Trajectory

STEPS, GROUPS, K = 2, 2, 8
STAGE = REINFORCE | {"steps": STEPS, "groups_per_step": GROUPS, "num_generations": K}
FORMAT, CORRECT_MAIN, EXPERT = 0.1, 0.4, 0.5  # b of equation (5)
SCORE = 0.8
GOOD: Answer = completion('{"score": 8, "reason": "fine"}')
DOWN: Answer = refusal(503, "overloaded")


def half(task: Task, trajectory: Trajectory) -> float | None:
    """A rule that grades every other invocation's work, by its group and rollout."""
    return None if (trajectory.id.group + trajectory.id.rollout) % 2 else 0.5


class Strict(Expert):
    """Gives everybody the same grade."""

    def __init__(self, value: float) -> None:
        self._value = value

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        return Grade(self._value, grader="strict")


class Run:
    """A finished run: what every searcher did and got, with the planner's correctness, and its records by step."""

    def __init__(self, folder: Path, expert: dict[str, Any], **rollout: Any) -> None:
        made = table(stages=[STAGE])
        for name, model in warmed_team().items():
            made["agents"][name]["model"] = model
        made["agents"]["searcher"]["max_turns"] = 6
        records = train_briefly(resolve(made | {"expert": expert, "rollout": rollout}), folder)
        self.collected = [record for record in records if record["kind"] == "collect"]
        self.learned = [r for r in records if r["kind"] == "learn" and r["agent"] == "searcher"]
        self.work: list[tuple[Trajectory, Reward, float]] = []
        _, store = RunFolder(folder).open()
        assert store.trained("searcher") == store.trained("planner") == store.committed() == STEPS * GROUPS
        for id in range(STEPS * GROUPS):
            group, rewards = store.group(id)
            for rollout_ in group.rollouts:
                root = rewards[rollout_.root.id].parts
                correct = (root["correct"] or 0.0) if rollout_.root.valid_format else 0.0
                self.work += [(t, rewards[t.id], correct) for t in rollout_.trajectories if t.parent is not None]
        store.close()

    def rows(self, step: int) -> int:
        """How many searchers have a known reward in a step."""
        return sum(reward.value is not None for t, reward, _ in self.work if t.id.group // GROUPS == step)


def judge(url: str) -> dict[str, Any]:
    engine = {"type": "openai", "model": "m", "base_url": url, "max_retries": 0, "timeout_s": 30.0}
    return {"type": "judge", "engine": engine, "concurrency": 1, "max_asks": 1, "prompt_price": 1.0}


def check_value(trajectory: Trajectory, reward: Reward, correct_main: float, unknown: str) -> None:
    """Equation (5), with the judge's part or without."""
    known = FORMAT + CORRECT_MAIN * correct_main
    if not trajectory.valid_format:
        assert reward.value == 0.0
    elif reward.parts["expert"] is not None:
        assert reward.value == pytest.approx(known + EXPERT * SCORE)
    elif unknown == "renormalise":
        assert reward.value == pytest.approx(known / (FORMAT + CORRECT_MAIN))
    else:
        assert reward.value is None and reward.cause is not None and "503" in reward.cause


@pytest.mark.parametrize("unknown", ["renormalise", "exclude"])
def test_an_outage_of_the_judge_is_unknown_and_training_goes_on(unknown: str, tmp_path: Path) -> None:
    options = {"unknown_reward": "exclude"} if unknown == "exclude" else {}  # renormalise is the default
    with serving(*[GOOD] * 2, *[DOWN] * 6, GOOD) as server:
        run = Run(tmp_path / "run", judge(server.base_url), **options)
    answered = [t.answer is not None for t, _, _ in run.work]
    assert any(answered) and not all(answered)
    for trajectory, reward, correct_main in run.work:
        assert reward.parts["expert"] in ((SCORE, None) if trajectory.answer is not None else (0.0,))
        check_value(trajectory, reward, correct_main, unknown)
    valid = [reward for t, reward, _ in run.work if t.valid_format]
    ungraded = [reward for reward in valid if reward.parts["expert"] is None]
    assert 0 < len(ungraded) < len(valid)  # before it and after it there are grades
    assert run.work[-1][0].id.group == STEPS * GROUPS - 1 and valid[-1].parts["expert"] == SCORE
    for step in range(STEPS):
        assert run.learned[step]["rows"] == run.rows(step) > 0
    lost = sum(reward.value is None for _, reward, _ in run.work)
    assert lost == (len(ungraded) if unknown == "exclude" else 0)


def test_what_a_judge_was_asked_and_cost_is_counted_by_step(tmp_path: Path) -> None:
    with serving(*[GOOD] * 2, *[DOWN] * 6, GOOD) as server:
        run = Run(tmp_path / "run", judge(server.base_url))
        asked = len(server.requests)
    total = {name: sum(record[f"judge_{name}"] for record in run.collected) for name in ("calls", "cached", "unknown")}
    assert total["calls"] == asked
    assert total["calls"] + total["cached"] == sum(t.answer is not None for t, _, _ in run.work)
    assert total["unknown"] == sum(reward.parts["expert"] is None for _, reward, _ in run.work)
    paid = asked - 6  # 100 tokens each, at 1 per million
    assert sum(record["judge_cost"] for record in run.collected) == pytest.approx(paid * 100 / 1e6)
    assert all(record["judge_calls"] > 0 for record in run.collected)


def test_a_rule_of_ones_own_grades_and_what_it_leaves_open_is_unknown(tmp_path: Path) -> None:
    rule = {"type": "rule", "rule": "test_judge_trains:half"}
    run = Run(tmp_path / "run", rule, unknown_reward="exclude")
    for trajectory, reward, _ in run.work:
        grade = half(Task("t", "q"), trajectory)
        assert reward.parts["expert"] == grade
        if trajectory.valid_format:
            assert (reward.value is None) == (grade is None)
            assert grade is not None or "returned None" in str(reward.cause)
    assert any(t.valid_format and reward.value is None for t, reward, _ in run.work)
    assert [record["rows"] for record in run.learned] == [run.rows(step) for step in range(STEPS)]


def test_an_expert_of_ones_own_is_named_by_import_path(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"type": "test_judge_trains:Strict", "value": 0.25})
    assert {reward.parts["expert"] for _, reward, _ in run.work} == {0.25}
