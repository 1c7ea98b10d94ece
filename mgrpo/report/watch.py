"""What a run remembers of its current stage, and the alarms that this history calls for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from mgrpo.config import Config
from mgrpo.report import alarms
from mgrpo.report.alarms import Alarm, AlarmBell
from mgrpo.report.shares import agent_shares, invocation_shares

Metrics = Mapping[str, Any]
V = TypeVar("V")
HELD_OUT = "dev"  # the evaluation that stands beside training


class Watch:
    """Hears every record of the current stage and answers with the alarms that are news.

    Records are kept by step, so that a step done again after a resume counts once.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._bell = AlarmBell()
        self.begin("", range(0), ())

    def begin(self, stage: str, steps: range, records: Iterable[Metrics]) -> None:
        """A stage begins, or goes on: ``records`` hold what earlier processes told, so that its start is known."""
        self._steps = steps
        self._collected: dict[int, Metrics] = {}
        self._learned: dict[str, dict[int, Metrics]] = {}
        self._shares: dict[int, dict[str, float]] = {}
        self._calls: dict[str, dict[int, dict[int, float]]] = {}
        self._held_out: dict[int, Metrics] = {}
        plan = next((own for own in self._config.stages if own.name == stage), None)
        self._acts = plan is not None and plan.collect == "team"
        self._learners = self._config.trained(plan) if plan is not None else ()
        for record in records:
            step = int(record["step"])
            if record.get("stage") == stage and step in range(steps.start, steps.stop + 1):
                self._remember(str(record["kind"]), step, record)

    def heard(self, record: Metrics) -> list[Alarm]:
        """Of any record of metrics.jsonl."""
        kind, step = record["kind"], int(record["step"])
        if kind == "collect":
            return self.collected(step, record)
        if kind == "learn":
            return self.learned(step, str(record["agent"]), record)
        return self.evaluated(str(record["name"]), step, record) if kind == "evaluate" else []

    def collected(self, step: int, metrics: Metrics) -> list[Alarm]:
        """Of the groups of ``step``. What an earlier process told of later steps is forgotten: they come again."""
        self._collected = {known: m for known, m in self._collected.items() if known < step}
        self._remember("collect", step, metrics)
        history = list(self._collected.values())
        found = {"failed_rollouts": alarms.failed_rollouts(history)}
        if self._acts:
            if any(tool in self._config.agents for tool in self._config.agents[self._config.planner].tools):
                found["lazy_planner"] = alarms.lazy_planner(history)
            if len(subagents := self._config.subagents) > 1:
                found |= {f"idle_agent/{agent}": alarms.idle_agent(history, agent) for agent in subagents}
            found |= {f"invalid_format/{a}": alarms.invalid_format(history, a) for a in self._config.agents}
        return self._news(found)

    def learned(self, step: int, agent: str, metrics: Metrics) -> list[Alarm]:
        """Of ``agent``'s update with the groups of ``step``."""
        self._remember("learn", step, {**metrics, "agent": agent})
        found = {f"skipped_steps/{agent}": alarms.skipped_steps(metrics, agent)}
        if self._acts:
            history = _until(step, self._learned[agent])
            found[f"entropy_collapse/{agent}"] = alarms.entropy_collapse(history, agent)
            found[f"logprob_mismatch/{agent}"] = alarms.logprob_mismatch(history, agent)
            calls = _until(step, self._calls.get(agent, {}))
            found[f"call_capture/{agent}"] = alarms.call_capture(calls, _until(step, self._collected), agent)
            if step in self._shares:
                found["gradient_capture"] = alarms.gradient_capture(_until(step, self._shares))
        return self._news(found)

    def evaluated(self, name: str, step: int, metrics: Metrics) -> list[Alarm]:
        """Of the weights after ``step`` steps."""
        self._remember("evaluate", step, {**metrics, "name": name})
        if name != HELD_OUT or not self._acts:
            return []
        held_out = [(known - self._steps.start, m) for known, m in sorted(self._held_out.items()) if known <= step]
        history = _until(step, self._collected)
        return self._news({"flat_held_out": alarms.flat_held_out(history, held_out, self._config.planner)})

    def shares(self, step: int) -> dict[str, float]:
        """Of the gradient mass by agent; empty until every agent that learns has told of ``step``."""
        return self._shares.get(step, {})

    def _remember(self, kind: str, step: int, metrics: Metrics) -> None:
        if kind == "collect":
            self._collected[step] = metrics
        elif kind == "learn":
            self._remember_learned(step, str(metrics["agent"]), metrics)
        elif kind == "evaluate" and metrics["name"] == HELD_OUT:
            self._held_out[step] = metrics

    def _remember_learned(self, step: int, agent: str, metrics: Metrics) -> None:
        self._learned.setdefault(agent, {})[step] = metrics
        told = {name: steps[step] for name, steps in self._learned.items() if step in steps}
        if set(self._learners) <= told.keys() and (shares := agent_shares(told)):
            self._shares[step] = shares
        if calls := invocation_shares(metrics):
            self._calls.setdefault(agent, {})[step] = calls

    def _news(self, found: Mapping[str, Alarm | None]) -> list[Alarm]:
        rung = (self._bell.ring(name, alarm) for name, alarm in found.items())
        return [alarm for alarm in rung if alarm is not None]


def _until(newest: int, records: Mapping[int, V]) -> list[V]:
    """In order of step; after a resume there may be later ones, which are not true any more."""
    return [records[step] for step in sorted(records) if step <= newest]
