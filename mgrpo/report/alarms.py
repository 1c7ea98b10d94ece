"""What a person should look at: small rules over the metrics of the current stage.

A rule is a pure function of the history so far and returns its alarm or None. `AlarmBell` rings once per episode of
trouble, not at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, Any]

WINDOW = 3  # steps that are averaged, so that one unlucky step rings nothing
ZERO_CALLS = 0.5  # share of rollouts without a call
CALLS_LEFT = 0.25  # share of the calls at the stage's start
FAILED = 0.1  # share of rollouts
INVALID_RISE = 0.3  # of the share of trajectories with invalid format, above the stage's best
QUIET_CHECKS = 5  # checks without trouble that end an episode


@dataclass(frozen=True, slots=True)
class Alarm:
    """``name`` identifies the trouble, e.g. ``lazy_planner`` or ``invalid_format/searcher``."""

    name: str
    message: str


def lazy_planner(collected: Sequence[Metrics]) -> Alarm | None:
    """The planner stops delegating, after which its sub-agents get no rows and never learn again.

    ``collected`` holds `rollout_metrics` of the stage's steps in order, of a team whose planner has sub-agents. Rings
    when more than half of the recent rollouts made no call, or calls fell under a quarter of the stage's start.
    """
    zero, calls = _recent(collected, "zero_call_fraction"), _recent(collected, "calls_per_rollout")
    start = _mean(_known(collected, "calls_per_rollout")[:WINDOW])
    advice = "warm the team up longer, weigh the sub-answer more, or lower the planner's learning rate"
    if zero is not None and zero > ZERO_CALLS:
        text = f"the planner delegates nothing in {zero:.0%} of rollouts; sub-agents without calls do not learn"
        return Alarm("lazy_planner", f"{text}: {advice}")
    if calls is not None and start is not None and calls < CALLS_LEFT * start:
        text = f"the planner makes {calls:.2f} calls per rollout, {start:.2f} at the start of the stage"
        return Alarm("lazy_planner", f"{text}: {advice}")
    return None


def invalid_format(collected: Sequence[Metrics], agent: str) -> Alarm | None:
    """An agent unlearns its call format: the share of invalid trajectories rose well above the stage's best."""
    shares = _known(collected, f"invalid_format/{agent}")
    means = [sum(shares[i : i + WINDOW]) / WINDOW for i in range(len(shares) - WINDOW + 1)]
    if not means or means[-1] <= min(means) + INVALID_RISE:
        return None
    text = f"{means[-1]:.0%} of {agent}'s trajectories have an invalid format, {min(means):.0%} at its best"
    return Alarm(f"invalid_format/{agent}", f"{text}: lower its learning rate, and look at its turns")


def failed_rollouts(collected: Sequence[Metrics]) -> Alarm | None:
    """Engines, tools or time limits break many rollouts; those teach nothing, and what is left is no fair sample."""
    shares = [{"share": m["failed_rollouts"] / m["rollouts"]} for m in collected if m.get("rollouts")]
    share = _recent(shares, "share")
    if share is None or share <= FAILED:
        return None
    text = f"{share:.0%} of rollouts fail by infrastructure and teach nothing"
    return Alarm("failed_rollouts", f"{text}: see failures/ in metrics.jsonl for what broke")


def skipped_steps(learned: Metrics, agent: str) -> Alarm | None:
    """An optimiser step was skipped because its gradient was not finite."""
    if not learned.get("skipped_steps"):
        return None
    text = f"{agent} skipped an optimiser step: its gradient was NaN or infinite"
    return Alarm(f"skipped_steps/{agent}", f"{text}; if it happens again, lower its learning rate")


@dataclass(slots=True)
class AlarmBell:
    """Remembers which troubles were announced; an episode ends after ``QUIET_CHECKS`` checks without it."""

    _quiet: dict[str, int] = field(default_factory=dict)

    def ring(self, name: str, found: Alarm | None) -> Alarm | None:
        """``found`` if it is news. Call it with every outcome of the rule ``name``, None too: that ends episodes."""
        if found is not None:
            is_news = name not in self._quiet
            self._quiet[name] = 0
            return found if is_news else None
        if name in self._quiet:
            self._quiet[name] += 1
            if self._quiet[name] >= QUIET_CHECKS:
                del self._quiet[name]
        return None


def _recent(metrics: Sequence[Metrics], key: str) -> float | None:
    return _mean(_known(metrics, key)[-WINDOW:])


def _known(metrics: Sequence[Metrics], key: str) -> list[float]:
    return [float(value) for record in metrics if (value := record.get(key)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
