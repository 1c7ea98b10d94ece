"""A run whose engines or graders are broken stops, says so, and keeps its data."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import REINFORCE, tiny

from mgrpo.agents import rollout as rollouts
from mgrpo.config import Config
from mgrpo.engines.base import Completion, Request
from mgrpo.engines.local import Local
from mgrpo.errors import EngineError, GraderError, InfrastructureError
from mgrpo.report.metrics_log import read_metrics
from mgrpo.report.reporter import Reporter
from mgrpo.run import RunFolder
from mgrpo.tasks.world import WorldSource
from mgrpo.train import train
from mgrpo.types import Grade, Task, Trajectory

EVALUATION = {"questions": 2, "tasks": {"split": "test"}}
RL = tiny(stages=[REINFORCE], reward="tiny_recipe:token_reward", evaluation=EVALUATION)
GENERATE, GRADE = Local.generate, WorldSource.grade


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "FIRST_PAUSE_S", 0.01)


def run(folder: Path, config: Config, resume: bool = False) -> dict[str, Any]:
    return train(config, folder, resume, Reporter(folder, config, quiet=True))


def committed(folder: Path) -> int:
    _, store = RunFolder(folder).open()
    try:
        return store.committed()
    finally:
        store.close()


def test_a_dead_engine_stops_the_run_keeps_the_tasks_and_can_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def dead(self: Local, requests: Sequence[Request]) -> list[Completion]:
        calls.append(len(requests))
        raise EngineError("no such server")

    monkeypatch.setattr(Local, "generate", dead)
    with pytest.raises(InfrastructureError, match="all 2 rollouts of groups 0 to 1 .* EngineError: no such server"):
        run(tmp_path / "run", RL)
    assert calls == [2, 2, 2]  # the first try and two more, of two questions
    assert committed(tmp_path / "run") == 0
    monkeypatch.setattr(Local, "generate", GENERATE)
    run(tmp_path / "run", RL, resume=True)
    assert committed(tmp_path / "run") == 8


def test_an_engine_that_recovers_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = iter([True])

    async def restarting(self: Local, requests: Sequence[Request]) -> list[Completion]:
        if requests[0].id.agent == "planner" and len(requests) == 6 and next(broken, False):  # a training step's
            raise EngineError("restarting")
        return await GENERATE(self, requests)

    monkeypatch.setattr(Local, "generate", restarting)
    run(tmp_path / "run", RL)
    collected = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "collect"]
    assert [r["retried_groups"] for r in collected] == [2, 0, 0, 0]
    assert [r["failed_rollouts"] for r in collected] == [0, 0, 0, 0]


def test_a_broken_grader_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Any, task: Task, trajectory: Trajectory) -> Grade:
        if trajectory.id.rollout == 1:
            raise GraderError("the judge is down")
        if trajectory.id.rollout == 2:
            await asyncio.sleep(60)
        return await GRADE(self, task, trajectory)

    monkeypatch.setattr(WorldSource, "grade", broken)
    config = tiny(stages=[REINFORCE | {"steps": 1}], rollout={"grade_timeout_s": 0.05}, evaluation=EVALUATION)
    run(tmp_path / "run", config)
    _, store = RunFolder(tmp_path / "run").open()
    (group, rewards), _ = store.group(0), store.close()
    assert [rewards[r.root.id].parts["correct"] is None for r in group.rollouts] == [False, True, True]


def test_engines_are_closed_when_the_run_is_over_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    async def close(self: Local) -> None:
        closed.append(self)

    async def bug(self: Local, requests: Sequence[Request]) -> list[Completion]:
        raise KeyError("ours")

    monkeypatch.setattr(Local, "close", close)
    monkeypatch.setattr(Local, "generate", bug)
    with pytest.raises(KeyError, match="ours"):
        run(tmp_path / "run", RL)
    assert len(closed) == 2
