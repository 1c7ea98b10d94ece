"""What a preset says about agents; a recipe says only what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgrpo.config.registry import suggest
from mgrpo.errors import ConfigError

# a = (.1, .9), b = (.1, .4, .5), K = d = 8: the paper's set-up (ALGORITHM sections 2, 3, 8)
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "m_grpo": {
        "planner": {"num_generations": 8, "reward_weights": {"format": 0.1, "correct": 0.9}},
        "subagent": {
            "trajectories_per_rollout": 8,
            "align": "weight",
            "reward_weights": {"format": 0.1, "correct_main": 0.4, "expert": 0.5},
        },
    },
}


def with_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's own words on top of its preset's defaults, agent by agent."""
    preset = table.get("preset", "m_grpo")
    if preset not in PRESETS:
        raise ConfigError(f"preset: unknown preset {preset!r}{suggest(str(preset), PRESETS)}")
    agents = table.get("agents", {})
    if not isinstance(agents, Mapping):
        return dict(table)
    filled = {
        name: {**_defaults(PRESETS[preset], agent), **agent} if isinstance(agent, Mapping) else agent
        for name, agent in agents.items()
    }
    return {**table, "agents": filled} if agents else dict(table)


def _defaults(preset: Mapping[str, Mapping[str, Any]], agent: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the agent's role; without alignment there is no target of it."""
    inert = {"trajectories_per_rollout"} if agent.get("align") == "none" else set()
    return {key: value for key, value in preset.get(str(agent.get("role")), {}).items() if key not in inert}
