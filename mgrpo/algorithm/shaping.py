"""Length shaping and masking of rewards, and which groups teach nothing (DAPO, arXiv 2503.14476). Torch-free.

Shaping is a term of its own beside the graded ones: a trajectory's raw reward stays what equations (4) and (5) say, so
that dynamic sampling and success look at the raw metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mgrpo.types import Reward, Rollout, Trajectory, TrajectoryId

OVERLONG = "overlong"  # name of the part that shaping adds to a reward
MASKED = "masked: cut off by a limit of tokens or turns"  # cause of an unknown reward


@dataclass(frozen=True, slots=True)
class Shaping:
    """Of one agent. ``max_length`` is the most tokens of a turn; a buffer of 0 shapes nothing."""

    max_length: int
    overlong_buffer_len: int = 0
    overlong_penalty_factor: float = 1.0
    mask_truncated: bool = False


def overlong_penalty(length: int, max_length: int, buffer_len: int, factor: float = 1.0) -> float:
    """0 up to max_length - buffer_len tokens, then linear down to -factor at max_length and beyond (DAPO, eq. 13)."""
    over = length - (max_length - buffer_len)
    return 0.0 if over <= 0 else -factor * min(over / buffer_len, 1.0)


def truncated(trajectory: Trajectory) -> bool:
    """Whether a limit cut it: a turn reached its token limit, or the trajectory ended without an answer at a limit."""
    return trajectory.ending in ("max_turns", "max_context") or any(t.stop_reason == "length" for t in trajectory.turns)


def shaped(
    rollout: Rollout, rewards: Mapping[TrajectoryId, Reward], shaping: Mapping[str, Shaping]
) -> dict[TrajectoryId, Reward]:
    """The rewards to learn from, of one rollout; agents without an entry in ``shaping`` keep theirs.

    The longest sampled turn is what the overlong penalty looks at, since turns are what a limit cuts. A masked
    trajectory's reward is unknown, so that it leaves statistics and loss together.
    """
    return {t.id: _shaped(t, rewards[t.id], shaping.get(t.id.agent)) for t in rollout.trajectories}


def _shaped(trajectory: Trajectory, reward: Reward, shaping: Shaping | None) -> Reward:
    if shaping is None or reward.value is None:
        return reward
    if shaping.mask_truncated and truncated(trajectory):
        return Reward(None, reward.parts, MASKED)
    if not shaping.overlong_buffer_len:
        return reward
    longest = max((len(turn.token_ids) for turn in trajectory.turns), default=0)
    penalty = overlong_penalty(
        longest, shaping.max_length, shaping.overlong_buffer_len, shaping.overlong_penalty_factor
    )
    return Reward(round(reward.value + penalty, 12), {**reward.parts, OVERLONG: penalty})


def is_masked(reward: Reward) -> bool:
    return reward.cause == MASKED


def informative(metrics: Iterable[float | None]) -> bool:
    """Whether a group's raw metrics, one per rollout and None where unknown, differ: else every advantage is 0."""
    known = {metric for metric in metrics if metric is not None}
    return len(known) > 1
