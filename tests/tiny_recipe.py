"""The smallest recipes that train for real: one or two tiny models, a small world, a warm-up, a few steps."""

from __future__ import annotations

from typing import Any

from mgrpo.config import Config, resolve
from mgrpo.types import Reward, Rollout, TrajectoryId

MODEL = {"type": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
WARM_UP = {
    "name": "warm_up",
    "collect": "teacher",
    "steps": 4,
    "weight_sync_steps": 2,
    "groups_per_step": 3,
    "num_generations": 1,
    "learner": {"optimizer": "muon", "learning_rate": 3e-3},
}
REINFORCE = {"name": "reinforce", "steps": 4, "groups_per_step": 2, "num_generations": 3}


def _agent(role: str, tools: list[str], **options: Any) -> dict[str, Any]:
    limits = {"max_turns": 3, "max_tokens_per_turn": 10, "max_context": 160}
    return {"role": role, "model": MODEL, "format": "compact", "tools": tools, **limits, **options}


def table(**options: Any) -> dict[str, Any]:
    """A planner and a searcher; ``options`` replace whole keys of the recipe."""
    recipe = {
        "name": "tiny",
        "threads": 1,
        "agents": {
            "planner": _agent("planner", ["searcher"]),
            "searcher": _agent("subagent", ["search", "visit"], trajectories_per_rollout=2),
        },
        "tools": {"search": {"type": "search"}, "visit": {"type": "visit"}},
        "tasks": {"type": "world", "countries": 8, "families": {"one_hop": 1, "two_hop": 1}},
        "learner": {"learning_rate": 1e-3},
        "stages": [WARM_UP, REINFORCE],
        "evaluation": {"questions": 3, "tasks": {"split": "test"}, "dev_tasks": {"split": "dev"}, "examples": 1},
        "store_timeout_s": 60.0,
    }
    return recipe | options


def team_of_one(**options: Any) -> dict[str, Any]:
    """A single agent that searches and visits by itself."""
    return table(agents={"planner": _agent("planner", ["search", "visit"], **options.pop("agent", {}))}, **options)


def tiny(**options: Any) -> Config:
    return resolve(table(**options))


def token_reward(rollout: Rollout, *_: Any) -> dict[TrajectoryId, Reward]:
    """Worth that varies however badly a model acts: the remainder of its sampled ids' sum. Usable as `reward`."""
    sums = {t.id: sum(id for turn in t.turns for id in turn.token_ids) for t in rollout.trajectories}
    return {id: Reward(total % 7 / 6, {"remainder": total % 7 / 6}) for id, total in sums.items()}
