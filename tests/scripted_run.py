"""The two loops of a run over a real store, without a model: a scripted team answers, a learner only counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiny_recipe import REINFORCE, table
from tiny_team import Recorder, compact_chat

from mgrpo.agents.loop import Agent
from mgrpo.agents.rollout import Team as ActingTeam
from mgrpo.agents.scheduler import Lockstep
from mgrpo.collecting import Collector
from mgrpo.config import Config, StageConfig, resolve
from mgrpo.config.windows import Window
from mgrpo.engines.base import Completion, Request
from mgrpo.errors import StoreTimeout
from mgrpo.learning import Learner
from mgrpo.report.reporter import Reporter
from mgrpo.session import Session
from mgrpo.store.base import Store, WeightVersion
from mgrpo.store.waiting import wait
from mgrpo.tasks.expert import Gold
from mgrpo.train import both_loops
from mgrpo.types import Reply

ANSWER = "<answer> Merova </answer>"
LIMITS = {"max_turns": 2, "max_tokens_per_turn": 10, "max_context": 160}
MODEL = {"type": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}


def plan(folder: Path, prompts: int, **options: Any) -> Config:
    """An agent alone, asked ``prompts`` questions named 0, 1, 2, ... in one stage; ``options`` replace whole keys.

    ``stage`` and ``rollout`` are those tables' keys.
    """
    for name, size in (("prompts", prompts), ("test", 2)):
        lines = [{"id": str(i), "question": "what is Tarn ?", "answer": "Merova"} for i in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    agent = {"role": "planner", "model": MODEL, "format": "compact", "tools": [], **LIMITS}
    defaults = {
        "agents": {"planner": agent},
        "tools": {},
        "tasks": {"type": "jsonl", "path": str(folder / "prompts.jsonl"), "id": "id"},
        "evaluation": {"questions": 2, "tasks": {"path": str(folder / "test.jsonl")}, "closed_book": False},
        "stages": [REINFORCE | {"num_generations": 2} | options.pop("stage", {})],
    }
    return resolve(table(**defaults | options))


def open_session(config: Config, folder: Path, name: str = "train") -> Session:
    """Of the process of `mgrpo train`, or under another name of one of several parts; it begins or goes on."""
    part, resume = name != "train", (folder / "config.toml").exists()
    reporter = Reporter(folder / "parts" / name if part else folder, config, quiet=True)
    return Session(config, folder, resume, reporter, name, part)


class ScriptedTeam:
    """In the place of a `Team` with models: every agent that acts is ``engine`` and answers at once."""

    def __init__(self, config: Config, script: Callable[[Request], Reply | str] = lambda request: ANSWER) -> None:
        self.config, self.engine = config, Recorder(script)
        self.served: list[tuple[str, int]] = []  # each time: owner and the oldest version that may act

    async def serve(self, owner: str, weights: WeightVersion | None, place: Any, oldest: int = 0) -> None:
        self.served.append((owner, oldest))

    async def wait_for_frozen(self) -> None: ...

    def acting(self, seed: int, *_: Any, **__: Any) -> ActingTeam:
        return ActingTeam(Agent("planner", compact_chat(), self.engine), max_retries=self.config.rollout.max_retries)

    def scheduler(self) -> Lockstep:
        return Lockstep(20.0)

    def expert(self, source: Any) -> Any:
        return Gold().build(source=source)


class Interrupted(Recorder):
    """Raises what it is given at its first calls, one error a call, and answers from then on."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(lambda request: ANSWER)
        self.errors = list(errors)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self.errors:
            raise self.errors.pop(0)
        return await super().generate(requests)


class CountingLearner(Learner):
    """Takes and publishes as a learner does, and learns nothing. ``steps`` are those that it took in its life."""

    def __init__(self, session: Session, owner: str = "planner") -> None:
        self.session, self.owner, self.config, self._lease = session, owner, session.config, None
        self.steps: list[tuple[int, tuple[str, ...]]] = []  # number of the step, names of its prompts

    async def begin(self) -> None:
        self.session.keep_alive()
        name = f"learn/{self.owner}"
        self._lease = await wait(partial(self.session.lease, name), "the lease", self.config.outage_timeout_s)
        if self.session.store.latest(self.owner) is None:
            first = WeightVersion(self.owner, 0, f"weights/{self.owner}/v0", "sha256:0", -1, "")
            self.session.store.publish(first, (), None, self._lease)

    def _learning(self, stage: StageConfig) -> tuple[str, ...]:
        return ()

    def publish(self, window: Window, metrics: Any) -> None:
        super().publish(window, metrics)
        self.steps.append((window.first_step, prompts_of(self.session.store, window.groups)))


def prompts_of(store: Store, groups: range) -> tuple[str, ...]:
    return tuple(store.group(id)[0].task.id for id in groups)


def trained_prompts(store: Store, owner: str = "planner") -> list[str]:
    """What each group that was trained on asked, in that order, by what is published."""
    return [name for p in store.publications(owner) for name in prompts_of(store, p.consumed)]


def collect_until_waiting(session: Session, most: int = 1000, team: ScriptedTeam | None = None) -> list[range]:
    """The cohorts that one collector is given, and commits, until it has to wait; at most so many."""
    acting: Any = team or ScriptedTeam(session.config)
    found: list[range] = []

    async def main() -> None:
        collector = Collector(session, acting)
        async for work in collector.work():
            gathered = await collector.gather(work, await collector.serve(work))
            await collector.commit(work, gathered, 0.0)
            session.release(work.lease)
            found.append(work.groups)
            if len(found) == most:
                return

    try:
        asyncio.run(main())
    except StoreTimeout:
        assert len(found) < most
    return found


def run_to_the_end(session: Session, team: ScriptedTeam | None = None) -> list[tuple[int, tuple[str, ...]]]:
    """Both loops in one process; the steps that the learner took."""
    acting: Any = team or ScriptedTeam(session.config)
    learner = CountingLearner(session)

    class Brief(Collector):
        async def evaluate_fully(self, when: str, step: int) -> None: ...

    asyncio.run(both_loops(Brief(session, acting), [learner]))
    return learner.steps
