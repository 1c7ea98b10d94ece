"""What a preset says; a recipe says only what differs. Each is a few values of the same options (docs/algorithm.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mgrpo.config.model import AgentConfig
from mgrpo.config.registry import suggest
from mgrpo.errors import ConfigError

Table = Mapping[str, Any]

# a = (.1, .9), b = (.1, .4, .5), K = d = 8: the paper's set-up (sections 2, 3 and 8 of arXiv 2511.13288)
_ANSWER: Table = {"format": 0.1, "correct": 0.9}
_EXPERT: Table = {"format": 0.1, "correct_main": 0.4, "expert": 0.5}
_SHARED_OUTCOME: Table = {"format": 0.1, "correct_main": 0.9, "expert": 0.0}
_ALIGNED: Table = {"trajectories_per_rollout": 8, "align": "weight", "reward_weights": _EXPERT}
_UNALIGNED: Table = {"align": "none", "reward_weights": _EXPERT}
_GRPO: Table = {"std_unbiased": True}


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults of [agents.NAME] by role, of [learner], of [agents.NAME.learner] by role, and of [filter_groups]."""

    planner: Table
    subagent: Table | None  # None: there is no sub-agent
    learner: Table = field(default_factory=dict)
    planner_learner: Table = field(default_factory=dict)
    subagent_learner: Table = field(default_factory=dict)
    filter_groups: Table = field(default_factory=dict)

    def agent(self, role: str) -> Table:
        return (self.planner if role == "planner" else self.subagent) or {}


_PLANNER: Table = {"num_generations": 8, "reward_weights": _ANSWER}

PRESETS: Mapping[str, Preset] = {
    "m_grpo": Preset(_PLANNER, _ALIGNED),
    "main_only": Preset(_PLANNER, {"trainable": False, "reward_weights": _EXPERT}),
    "sub_only": Preset({**_PLANNER, "trainable": False}, _ALIGNED),
    "single_agent": Preset(_PLANNER, None),
    "grpo": Preset(_PLANNER, _UNALIGNED, {**_GRPO, "kl_coef": 0.04}),
    "dr_grpo": Preset(_PLANNER, _UNALIGNED, {"scale_rewards": "none", "loss_agg_mode": "seq-mean-token-sum-norm"}),
    "dapo": Preset(
        {**_PLANNER, "overlong_buffer_len": "a fifth of max_tokens_per_turn"},
        {**_UNALIGNED, "overlong_buffer_len": "a fifth of max_tokens_per_turn"},
        {**_GRPO, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"},
        filter_groups={"enable": True},
    ),
    "gspo": Preset(
        _PLANNER,
        _UNALIGNED,
        {**_GRPO, "importance_sampling_level": "sequence", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    ),
    "matpo": Preset(
        _PLANNER,
        {"share_weights_with": "the planner", "align": "none", "reward_weights": _SHARED_OUTCOME},
        {**_GRPO, "loss_agg_mode": "token-mean", "loss_denominator": "weights"},
        subagent_learner={"compare_with": "parent"},
    ),
    "dr_mas": Preset(
        _PLANNER, {"align": "none", "reward_weights": _SHARED_OUTCOME}, {"compare_with": "batch", "std_unbiased": True}
    ),
    "at_grpo": Preset(
        _PLANNER,
        {"align": "none", "reward_weights": {"format": 0.0, "correct_main": 0.5, "expert": 0.5}},
        {**_GRPO, "compare_with": "agent_turn"},
    ),
    "flow_grpo": Preset(
        {"num_generations": 8, "reward_weights": {"format": 0.0, "correct": 1.0}},
        {"trainable": False, "reward_weights": _SHARED_OUTCOME},
        {**_GRPO, "kl_coef": 0.001},
    ),
}


def with_preset(table: Table) -> dict[str, Any]:
    """The recipe's own words on top of its preset's defaults. What it says for all agents in [learner] wins over what
    the preset says for a role. Applied to its own result it changes nothing."""
    name = table.get("preset", "m_grpo")
    if name not in PRESETS:
        raise ConfigError(f"preset: unknown preset {name!r}{suggest(str(name), PRESETS)}")
    preset, agents = PRESETS[name], table.get("agents")
    own, filtered = table.get("learner", {}), table.get("filter_groups", {})
    if not (isinstance(agents, Mapping) and isinstance(own, Mapping) and isinstance(filtered, Mapping)):
        return dict(table)
    filled = {key: _agent(key, agent, preset, own, agents) for key, agent in agents.items()}
    result = {**table, "agents": filled} if agents else dict(table)
    if preset.learner:
        result["learner"] = {**preset.learner, **own}
    if preset.filter_groups:
        result["filter_groups"] = {**preset.filter_groups, **filtered}
    return result


def _agent(name: str, agent: Any, preset: Preset, learner: Table, agents: Table) -> Any:
    if not isinstance(agent, Mapping):
        return agent
    role = str(agent.get("role"))
    if role == "subagent" and preset.subagent is None:
        raise ConfigError(f"agents.{name}: this preset has one agent, the planner with all tools; remove it")
    values = {key: value for key, value in _defaults(preset.agent(role), agent, agents).items() if key not in agent}
    own = agent.get("learner", {})
    given = preset.planner_learner if role == "planner" else preset.subagent_learner
    missing = {key: value for key, value in given.items() if key not in learner}
    if missing and isinstance(own, Mapping) and agent.get("trainable", values.get("trainable", True)):
        values["learner"] = {**missing, **own}
    return {**agent, **values}


def _defaults(defaults: Table, agent: Table, agents: Table) -> dict[str, Any]:
    """With what depends on the rest of the recipe filled in, and without what has no effect in it."""
    result = dict(defaults)
    if agent.get("align") == "none":
        result.pop("trajectories_per_rollout", None)
    if "overlong_buffer_len" in result:
        limit = agent.get("max_tokens_per_turn", AgentConfig.model_fields["max_tokens_per_turn"].default)
        result["overlong_buffer_len"] = limit // 5 if isinstance(limit, int) else 0
    if "share_weights_with" in result:
        planners = [
            name for name, other in agents.items() if isinstance(other, Mapping) and other.get("role") == "planner"
        ]
        if "model" in agent or not planners:
            del result["share_weights_with"]
        else:
            result["share_weights_with"] = planners[0]
    return result
