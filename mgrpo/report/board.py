"""What the display shows, as one frozen value that every event replaces; a drawing thread never sees half of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgrpo.report.alarms import Alarm

SUCCESSES_KEPT = 30
ALARMS_KEPT = 3

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """Other long work, such as an evaluation: ``done`` of ``total``. ``started`` is on the display's clock."""

    what: str
    done: int
    total: int
    started: float


@dataclass(frozen=True, slots=True)
class PartLine:
    """One process of a run that has several."""

    name: str
    state: str  # running, starts again in 2 s, complete, stopped, elsewhere
    pid: int | None = None
    version: int | None = None  # of the weights that it serves
    quiet_s: float | None = None  # since it last wrote to its log or metrics
    says: str = ""  # its last line, or what it says is not well
    restarts: int = 0
    died: str = ""  # why, the last time


@dataclass(frozen=True, slots=True)
class Board:
    """Times are in seconds on the display's clock. ``step`` counts from 0 over the run, ``done`` within the stage."""

    run: str
    started: float
    stage: str = ""
    demonstrations: bool = False  # the teacher collects in this stage
    steps: int = 0
    first_step: int = 0
    total_steps: int = 0
    stage_started: float = 0.0
    done_before: int = 0  # of this stage, by an earlier process
    done: int = 0
    team: Metrics = field(default_factory=dict)
    successes: tuple[float | None, ...] = ()
    agents: Mapping[str, Metrics] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)  # of the gradient mass, by agent
    evaluations: Mapping[str, float | None] = field(default_factory=dict)
    work: Work | None = None
    alarms: tuple[Alarm, ...] = ()
    parts: tuple[PartLine, ...] = ()  # of a run that has several processes

    def staged(
        self, name: str, steps: int, first_step: int, total_steps: int, demonstrations: bool, now: float
    ) -> Board:
        """A new stage begins; what is shown of the last one goes."""
        return Board(
            self.run,
            self.started,
            name,
            demonstrations,
            steps,
            first_step,
            total_steps,
            now,
            agents={agent: {"from_version": metrics.get("from_version")} for agent, metrics in self.agents.items()},
            evaluations=self.evaluations,
            alarms=self.alarms,
            parts=self.parts,
        )

    def resumed(self, now: float) -> Board:
        """All that was done so far is an earlier process's, and tells nothing about this one's pace."""
        return replace(self, stage_started=now, done_before=self.done)

    def collected(self, step: int, metrics: Metrics) -> Board:
        before = self._before(step)
        successes = (*self.successes, metrics.get("success"))[-SUCCESSES_KEPT:]
        return replace(
            self, team=metrics, successes=successes, work=None, done_before=before, done=max(before, self.done)
        )

    def learned(self, step: int, agent: str, metrics: Metrics, shares: Mapping[str, float] | None = None) -> Board:
        """``shares`` are the step's, once every agent has told; until then those of the step before stand."""
        before = self._before(step)
        agents = {**self.agents, agent: {**metrics, "step": step}}
        slowest = min(int(known["step"]) for known in agents.values() if "step" in known)
        done = max(before, slowest - self.first_step + 1)
        return replace(self, agents=agents, shares=shares or self.shares, work=None, done_before=before, done=done)

    def evaluated(self, name: str, metrics: Metrics) -> Board:
        return replace(self, evaluations={**self.evaluations, name: metrics.get("success")}, work=None)

    def worked(self, what: str, done: int, total: int, now: float) -> Board:
        if done >= total:
            return replace(self, work=None)
        same = self.work is not None and self.work.what == what
        started = self.work.started if self.work is not None and same else now
        return replace(self, work=Work(what, done, total, started))

    def alarmed(self, alarm: Alarm) -> Board:
        return replace(self, alarms=(*self.alarms, alarm)[-ALARMS_KEPT:])

    def seconds_left(self, now: float) -> float | None:
        """Of this stage, at its average pace in this process; None before its first step is done."""
        here = self.done - self.done_before
        return (now - self.stage_started) / here * (self.steps - self.done) if here > 0 else None

    def _before(self, step: int) -> int:
        """A resumed stage starts in its middle: the first event tells where."""
        first_event = not self.team and not any(len(metrics) > 1 for metrics in self.agents.values())
        return step - self.first_step if first_event else self.done_before
