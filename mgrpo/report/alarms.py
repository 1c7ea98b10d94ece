"""What a person should look at: small rules over the metrics of the current stage.

A rule is a pure function of the history so far and returns its alarm or None. `AlarmBell` rings once per episode of
trouble, not at every step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Metrics = Mapping[str, Any]
K = TypeVar("K", bound=Hashable)

WINDOW = 3  # steps that are averaged, so that one unlucky step rings nothing
ZERO_CALLS = 0.5  # share of rollouts without a call
CALLS_LEFT = 0.25  # share of the calls at the stage's start
FAILED = 0.1  # share of rollouts
INVALID_RISE = 0.3  # of the share of trajectories with invalid format, above the stage's best
SHARE_WINDOW = 5  # the same for shares of the gradient, which jump more: a step has few groups that teach anything
CAPTURED = 0.9  # share of the gradient mass that leaves the others too little
RISEN, RISEN_ODDS = 0.7, 5.0  # a share above the first whose odds, share / (1 - share), grew so many times
SEVERAL_CALLS = 2.0  # calls of a rollout that makes any; with fewer the first one rightly has most of the mass
ENTROPY_LEFT, ENTROPY_FLOOR = 0.2, 0.05  # of the stage's start; nats per token
ROOM = 0.8  # a mean reward below it has room to rise; equations 4 and 5 end at 1
STALLED = 0.02  # a rise of the mean reward, from one window to the next, that is none
REWARD_RISE, HELD_OUT_RISE = 0.15, 0.05  # what counts as a rise of the reward, and of the held-out success
HELD_OUT_SCORES = 3  # evaluations of a stage, before they are called flat
MISMATCH, MISMATCH_KL = 0.05, 0.01  # nats per token; a sound engine is an order of magnitude below either
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


def idle_agent(collected: Sequence[Metrics], agent: str) -> Alarm | None:
    """In a team with several sub-agents one is hardly called any more: under a quarter of the stage's start."""
    key = f"calls/{agent}"
    calls, start = _recent(collected, key), _mean(_known(collected, key)[:WINDOW])
    if calls is None or start is None or calls >= CALLS_LEFT * start:
        return None
    text = f"{agent} is called {calls:.2f} times per rollout, {start:.2f} at the start of the stage"
    return Alarm(f"idle_agent/{agent}", f"{text}: without calls it does not learn; look at what its answers are worth")


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


def gradient_capture(shares: Sequence[Mapping[str, float]]) -> Alarm | None:
    """One agent has nearly all of the gradient mass although others learn too, or took it over during the stage.

    ``shares`` holds `shares.agent_shares` of the stage's steps in order. An agent without any mass in the window is no
    one's victim: it has no rows or only ties, which has alarms and metrics of its own.
    """
    found = _captured(shares)
    if found is None:
        return None
    agent, share, start = found
    text = f"{agent} has {share:.0%} of the gradient mass of all agents, {start:.0%} at the start of the stage"
    return Alarm(
        "gradient_capture", f"{text}: look at the others' zero_variance_groups, loss_denominator and loss_agg_mode"
    )


def call_capture(shares: Sequence[Mapping[int, float]], collected: Sequence[Metrics], agent: str) -> Alarm | None:
    """As `gradient_capture`, for the invocations of one agent that is called several times by those who call it.

    ``shares`` holds `shares.invocation_shares` of the stage's steps, ``collected`` their `rollout_metrics`.
    """
    calls, zero = _recent(collected, f"calls/{agent}"), _recent(collected, f"zero_call_fraction/{agent}")
    if calls is None or zero is None or calls < SEVERAL_CALLS * (1.0 - zero):
        return None
    found = _captured(shares)
    if found is None:
        return None
    index, share, start = found
    text = f"invocation {index} of {agent} has {share:.0%} of its gradient mass, {start:.0%} at the start of the stage"
    return Alarm(f"call_capture/{agent}", f"{text}: look at what its other calls earn, at align and loss_agg_mode")


def _captured(shares: Sequence[Mapping[K, float]]) -> tuple[K, float, float] | None:
    """Who has captured the mass, its recent share, and its share at the start."""
    if len(shares) < SHARE_WINDOW:
        return None
    start, recent = _mean_shares(shares[:SHARE_WINDOW]), _mean_shares(shares[-SHARE_WINDOW:])
    top = max(recent, key=lambda key: recent[key])
    before, now = start.get(top, 0.0), recent[top]
    rose = now > RISEN and _odds(now) > RISEN_ODDS * _odds(before)
    return (top, now, before) if now < 1.0 and (now > CAPTURED or rose) else None


def _mean_shares(shares: Sequence[Mapping[K, float]]) -> dict[K, float]:
    keys = dict.fromkeys(key for step in shares for key in step)
    return {key: sum(step.get(key, 0.0) for step in shares) / len(shares) for key in keys}


def _odds(share: float) -> float:
    return share / (1.0 - share) if share < 1.0 else float("inf")


def entropy_collapse(learned: Sequence[Metrics], agent: str) -> Alarm | None:
    """An agent's sampling became nearly deterministic while its reward has room and rises no more: it explores nothing.

    ``learned`` holds the stage's learn records of ``agent`` in order. Entropy that falls while the reward rises, or
    where nearly every reward is got, is what learning looks like.
    """
    entropy, start = _recent(learned, "entropy"), _mean(_known(learned, "entropy")[:WINDOW])
    reward, before = _recent(learned, "reward_mean"), _mean(_known(learned, "reward_mean")[-2 * WINDOW : -WINDOW])
    if entropy is None or start is None or reward is None or before is None:
        return None
    if entropy >= min(ENTROPY_FLOOR, ENTROPY_LEFT * start) or reward >= ROOM or reward >= before + STALLED:
        return None
    text = f"{agent}'s entropy is {entropy:.3f} nats per token, {start:.3f} at the start of the stage"
    advice = "set entropy_coef, raise clip_ratio_high, or lower its learning rate"
    return Alarm(f"entropy_collapse/{agent}", f"{text}, and its mean reward stands at {reward:.2f}: {advice}")


def logprob_mismatch(learned: Sequence[Metrics], agent: str) -> Alarm | None:
    """Engine and learner disagree on the log-probabilities of the same tokens under the same weights."""
    gap, kl = _recent(learned, "logprob_abs_diff"), _recent(learned, "rollout_kl")
    if (gap is None or gap <= MISMATCH) and (kl is None or kl <= MISMATCH_KL):
        return None
    numbers = [(gap, "nats per token"), (kl, "of KL")]
    said = " and ".join(f"{value:.3g} {unit}" for value, unit in numbers if value is not None)
    text = f"the engine and the learner of {agent} disagree by {said}"
    advice = "compare their dtypes, temperatures and weights; rollout_is corrects what cannot be mended"
    return Alarm(f"logprob_mismatch/{agent}", f"{text}: {advice}")


def flat_held_out(collected: Sequence[Metrics], evaluated: Sequence[tuple[int, Metrics]], planner: str) -> Alarm | None:
    """The planner's reward rises on what it trains on while its success on held-out questions does not.

    ``collected`` are the stage's steps in order, ``evaluated`` its "dev" evaluations, each with the number of this
    stage's steps before it. Both are compared over the time between the first evaluation and the last.
    """
    scores = [(steps, float(m["success"])) for steps, m in evaluated if m.get("success") is not None]
    if len(scores) < HELD_OUT_SCORES:
        return None
    (begin, first), last = scores[0], _mean([score for _, score in scores[-2:]])
    key = f"reward/{planner}"
    before, now = _recent(collected[: max(begin, WINDOW)], key), _recent(collected[: scores[-1][0]], key)
    if before is None or now is None or last is None:
        return None
    if now - before < REWARD_RISE or last - first >= HELD_OUT_RISE:
        return None
    text = f"{planner}'s reward rose from {before:.2f} to {now:.2f}, its success on dev questions from {first:.2f}"
    advice = "look at rollouts for what the reward pays without a right answer, and for too few training questions"
    return Alarm("flat_held_out", f"{text} to {last:.2f}: {advice}")


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
