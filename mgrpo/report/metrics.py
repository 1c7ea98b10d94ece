"""Groups and their rewards -> the numbers of one step of collecting. Unknown is None, never 0."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mgrpo.algorithm.alignment import recommended_d
from mgrpo.algorithm.shaping import is_masked
from mgrpo.types import Group, Reward, Rollout, Trajectory, TrajectoryId

Number = float | int | None
Rewards = Mapping[TrajectoryId, Reward]


def rollout_metrics(groups: Sequence[Group], rewards: Rewards, subagents: Iterable[str] = ()) -> dict[str, Number]:
    """Flat metrics of ``groups``. Rollouts that failed by infrastructure count only as failures and as unknown.

    ``subagents`` are named so that one that nobody called is told of too, as never called; ``d_k`` below is the number
    of an agent's trajectories in rollout k. A trajectory is masked where `algorithm.shaping` took its reward away by
    choice; that is not unknown. Means of parts and rewards are over known ones.

    ::

        groups, rollouts, failed_rollouts, trajectories, sampled_tokens         counts
        success                        mean r_correct of the planners that could be graded, in [0, 1]
        sub_answer                     mean r_expert of the sub-agent trajectories that could be graded, in [0, 1]
        unknown_fraction               trajectories whose reward is unknown, of all
        calls_per_rollout              mean number of sub-agent trajectories in a rollout
        zero_call_fraction             rollouts without any
        calls_histogram/<d>            rollouts with d of them
        calls/<agent>, zero_call_fraction/<agent>, calls_histogram/<agent>/<d>      the same of one sub-agent: d_k
        recommended_d/<agent>          smallest d with d_k <= d in 99 % of rollouts (equation 11)
        reward/<agent>, part/<agent>/<part>, invalid_format/<agent>, turns/<agent>      means over trajectories
        masked_fraction/<agent>        trajectories that were masked, of the agent's
        failures/<kind>, endings/<ending>                                               counts
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sound = [rollout for rollout in rollouts if rollout.failure is None]
    every = [trajectory for rollout in rollouts for trajectory in rollout.trajectories]
    trajectories = [trajectory for rollout in sound for trajectory in rollout.trajectories]
    return {
        "groups": len(groups),
        "rollouts": len(rollouts),
        "failed_rollouts": len(rollouts) - len(sound),
        "trajectories": len(every),
        "sampled_tokens": sum(len(turn.token_ids) for trajectory in every for turn in trajectory.turns),
        "success": _part((rollout.root for rollout in sound), rewards, "correct"),
        "sub_answer": _part((t for t in trajectories if t.parent is not None), rewards, "expert"),
        "unknown_fraction": _mean(float(_is_unknown(_reward(t, rewards))) for t in every),
        **_calls(sound, subagents),
        **_by_agent(trajectories, rewards),
        **_counts(rollouts, every),
    }


def _calls(rollouts: Sequence[Rollout], subagents: Iterable[str]) -> dict[str, Number]:
    per_rollout = [len(rollout.trajectories) - 1 for rollout in rollouts]
    result: dict[str, Number] = {
        "calls_per_rollout": _mean(per_rollout),
        "zero_call_fraction": _mean(float(d == 0) for d in per_rollout),
        **_histogram("", per_rollout),
    }
    by_rollout = [Counter(t.id.agent for t in rollout.trajectories if t.parent is not None) for rollout in rollouts]
    for agent in sorted({*subagents, *(agent for counts in by_rollout for agent in counts)}) if rollouts else ():
        counts = [made[agent] for made in by_rollout]
        result[f"calls/{agent}"] = _mean(counts)
        result[f"zero_call_fraction/{agent}"] = _mean(float(d == 0) for d in counts)
        result[f"recommended_d/{agent}"] = recommended_d(counts)
        result.update(_histogram(f"{agent}/", counts))
    return result


def _histogram(prefix: str, counts: Iterable[int]) -> dict[str, Number]:
    return {f"calls_histogram/{prefix}{d}": n for d, n in sorted(Counter(counts).items())}


def _by_agent(trajectories: Sequence[Trajectory], rewards: Rewards) -> dict[str, Number]:
    own: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        own[trajectory.id.agent].append(trajectory)
    result: dict[str, Number] = {}
    for agent, members in sorted(own.items()):
        sampled = [t for t in members if t.failure is None]
        result[f"reward/{agent}"] = _mean(_reward(t, rewards).value for t in members)
        for part in sorted({part for t in members for part in _reward(t, rewards).parts}):
            result[f"part/{agent}/{part}"] = _part(members, rewards, part)
        result[f"invalid_format/{agent}"] = _mean(float(not t.valid_format) for t in sampled)
        result[f"turns/{agent}"] = _mean(len(t.turns) for t in sampled)
        result[f"masked_fraction/{agent}"] = _mean(float(is_masked(_reward(t, rewards))) for t in members)
    return result


def _counts(rollouts: Sequence[Rollout], trajectories: Sequence[Trajectory]) -> dict[str, Number]:
    """Failures of rollouts, trajectories and tool calls by kind; a failed rollout's root is not counted twice."""
    failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    failed = {(rollout.group, rollout.index) for rollout in rollouts if rollout.failure is not None}
    for t in trajectories:
        if t.failure is not None and not (t.parent is None and (t.id.group, t.id.rollout) in failed):
            failures.append(t.failure)
        failures += [r.failure for turn in t.turns for r in turn.results if r.failure is not None]
    endings = Counter(t.ending for t in trajectories)
    return {
        **{f"failures/{kind}": n for kind, n in sorted(Counter(failure.kind for failure in failures).items())},
        **{f"endings/{ending}": n for ending, n in sorted(endings.items())},
    }


def _part(trajectories: Iterable[Trajectory], rewards: Rewards, part: str) -> float | None:
    return _mean(_reward(trajectory, rewards).parts.get(part) for trajectory in trajectories)


def _reward(trajectory: Trajectory, rewards: Rewards) -> Reward:
    return rewards.get(trajectory.id, _NOT_REWARDED)


def _is_unknown(reward: Reward) -> bool:
    return reward.value is None and not is_masked(reward)


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


_NOT_REWARDED = Reward(None, cause="not rewarded")
