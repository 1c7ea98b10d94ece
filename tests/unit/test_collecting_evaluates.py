"""Evaluations of a run: each is made once, whoever collects and whatever is lost meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_run import CountingLearner, ScriptedTeam, open_session, plan

from mgrpo import collecting
from mgrpo.agents.loop import together
from mgrpo.collecting import Collector
from mgrpo.config import Config
from mgrpo.errors import EngineLost
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session
from mgrpo.train import collect, learn


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and steps of the evaluations that were made, instead of making them."""
    made: list[tuple[str, int]] = []

    async def note(self: Collector, name: str, step: int, split: str, questions: int, **_: Any) -> Any:
        made.append((name, step))
        await asyncio.sleep(0.01)
        return collecting.Evaluation((), {}, {})

    monkeypatch.setattr(Collector, "_evaluate", note)
    return made


def evaluating(folder: Path) -> Config:
    test = {"path": str(folder / "test.jsonl")}
    evaluation = {"questions": 2, "tasks": test, "dev_tasks": test, "closed_book": False, "every": 2}
    stage = {"steps": 6, "groups_per_step": 2}
    return plan(folder, 12, stage=stage, evaluation=evaluation, rollout={"groups_per_lease": 1})


def run_with(*sessions: Session) -> None:
    """One learner, and a collector of each session."""

    async def main() -> None:
        learner = CountingLearner(sessions[0])
        await learner.begin()
        teams: list[Any] = [ScriptedTeam(session.config) for session in sessions]
        await together([learn(learner), *(collect(Collector(s, t)) for s, t in zip(sessions, teams, strict=True))])

    asyncio.run(main())


EXPECTED = [("after", 6), ("after_greedy", 6), ("before", 0), ("before_greedy", 0), ("dev", 2), ("dev", 4)]


def test_every_evaluation_is_made_once_by_one_of_the_collectors(
    tmp_path: Path, evaluated: list[tuple[str, int]]
) -> None:
    config = evaluating(tmp_path)
    with open_session(config, tmp_path / "run", "a") as a, open_session(config, tmp_path / "run", "b") as b:
        run_with(a, b)
        assert sorted(evaluated) == EXPECTED
        run_with(b)  # one that comes when all is over
    with open_session(config, tmp_path / "run", "a") as again:
        run_with(again)
    assert sorted(evaluated) == EXPECTED


def test_the_last_evaluation_begins_again_where_its_engine_is_lost(
    tmp_path: Path, evaluated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, real = iter([True, False]), Collector.evaluate_fully

    async def lost(self: Collector, when: str, step: int) -> None:
        if when == "after" and next(fails):
            raise EngineLost("no server of 'planner' is left")
        await real(self, when, step)

    warnings: list[str] = []
    monkeypatch.setattr(Reporter, "warn", lambda self, line: warnings.append(line))
    monkeypatch.setattr(collecting, "LOST_PAUSE_S", 0.0)
    monkeypatch.setattr(Collector, "evaluate_fully", lost)
    with open_session(evaluating(tmp_path), tmp_path / "run") as session:
        run_with(session)
        assert session.store.done("evaluate/after")
    assert sorted(evaluated) == EXPECTED
    assert warnings == ["the last evaluation begins again: no server of 'planner' is left"]
