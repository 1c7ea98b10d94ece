"""TOML in, checked `Config` out: presets filled in, `--set a.b=c` applied, every plug-in table validated."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from mgrpo.config.model import Config, LearnerConfig
from mgrpo.config.registry import describe, settings, suggest
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

_PPO_ONLY = frozenset({"clip_ratio_low", "clip_ratio_high", "scale_rewards"})


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe. Raises ConfigError with one line that names the file and the key."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    try:
        return resolve(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def resolve(table: Mapping[str, Any]) -> Config:
    """A checked Config from a plain table (what a recipe holds)."""
    try:
        config = Config.model_validate(with_prompts(with_preset(table)))
    except ValidationError as error:
        raise ConfigError(describe(error, Config)) from error
    check(config)
    return config


def apply_override(table: dict[str, Any], override: str) -> None:
    """``a.b.0.c=value`` with the value in TOML; a bare word is a string. Lists are indexed by number."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set {override}: expected KEY=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target: Any = table
    *parents, last = path.strip().split(".")
    agents = table.get("agents")
    if parents[:1] == ["agents"] and isinstance(agents, dict) and (name := [*parents, last][1]) not in agents:
        raise ConfigError(f"--set {path}: unknown agent {name!r}{suggest(name, agents)}")
    try:
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        target[int(last) if isinstance(target, list) else last] = value
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"--set {path}: there is no such place in the recipe") from error


def with_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's own words on top of its preset's defaults, agent by agent."""
    preset = table.get("preset", "m_grpo")
    if preset not in PRESETS:
        raise ConfigError(f"preset: unknown preset {preset!r}{suggest(str(preset), PRESETS)}")
    agents = table.get("agents", {})
    if not isinstance(agents, Mapping):
        return dict(table)
    filled = {
        name: {**PRESETS[preset].get(str(agent.get("role")), {}), **agent} if isinstance(agent, Mapping) else agent
        for name, agent in agents.items()
    }
    return {**table, "agents": filled} if agents else dict(table)


def with_prompts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts that name a .md or .txt file replaced by its text, so that a run holds what its agents were told."""
    agents = table.get("agents")
    if not isinstance(agents, Mapping):
        return dict(table)
    filled = {
        name: {**agent, "prompt": _prompt(agent["prompt"], f"agents.{name}.prompt")}
        if isinstance(agent, Mapping) and isinstance(agent.get("prompt"), str)
        else agent
        for name, agent in agents.items()
    }
    return {**table, "agents": filled}


def _prompt(prompt: str, where: str) -> str:
    if not prompt.endswith((".md", ".txt")) or len(prompt.split()) != 1:
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {prompt}: {getattr(error, 'strerror', None) or error}") from error


def dump(config: Config) -> str:
    """The resolved recipe as TOML; reading it back gives the same Config."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def check(config: Config) -> None:
    """Everything that one table alone cannot know. Raises ConfigError naming the key."""
    _check_roles(config)
    for name, agent in config.agents.items():
        _check_tools(config, name)
        settings("engine", agent.engine, f"agents.{name}.engine")
        _check_learner(agent.learner, f"agents.{name}.learner")
        _check_rewards(config, name)
    for name, table in config.tools.items():
        settings("tool", table, f"tools.{name}")
    _check_used(config)
    settings("tasks", config.tasks, "tasks")
    for index, stage in enumerate(config.stages):
        where = f"stages.{index}"
        settings("tasks", config.tasks_with(stage.tasks), f"{where}.tasks")
        _check_learner(stage.learner, f"{where}.learner")
        for agent_name in stage.train or ():
            if agent_name not in config.agents:
                raise ConfigError(f"{where}.train: unknown agent {agent_name!r}{suggest(agent_name, config.agents)}")
            if not config.agents[agent_name].trainable:
                raise ConfigError(f"{where}.train: agent {agent_name!r} has trainable = false")
        if not config.trained(stage):
            raise ConfigError(f"{where}: no agent learns in it; set trainable = true or remove the stage")
        if stage.policy_loss == "sft" and (inert := _PPO_ONLY & stage.learner.keys()):
            raise ConfigError(f"{where}.learner.{min(inert)}: has no effect with policy_loss = 'sft'; remove it")
    _check_evaluation(config)
    for index, tracker in enumerate(config.trackers):
        settings("tracker", tracker, f"trackers.{index}")


def _check_roles(config: Config) -> None:
    planners = [name for name, agent in config.agents.items() if agent.role == "planner"]
    if len(planners) != 1:
        raise ConfigError(f"agents: exactly one agent has role = 'planner', here {len(planners)} {planners}")
    for name in config.agents:
        if not name.replace("_", "").isalnum():
            raise ConfigError(f"agents.{name}: a name is letters, digits and underscores")
        if name in config.tools:
            raise ConfigError(f"agents.{name}: a tool has the same name; rename one of the two")
    stages = [stage.name for stage in config.stages]
    for index, stage_name in enumerate(stages):
        if stage_name in stages[:index]:
            raise ConfigError(
                f"stages.{index}.name: {stage_name!r} is taken by an earlier stage; rename one of the two"
            )


def _check_used(config: Config) -> None:
    """What has no effect is refused rather than ignored."""
    used = {tool for agent in config.agents.values() for tool in agent.tools}
    for tool in config.tools.keys() - used:
        raise ConfigError(f"tools.{tool}: no agent has it; add it to an agent's tools or remove the table")
    for name in config.subagents:
        if name not in used:
            raise ConfigError(f"agents.{name}: no agent calls it; add it to an agent's tools or remove it")
    for name, agent in config.agents.items():
        if agent.learner and not agent.trainable:
            raise ConfigError(f"agents.{name}.learner: has no effect with trainable = false; remove one of the two")
        if agent.trainable and agent.engine.get("type") == "scripted":
            raise ConfigError(f"agents.{name}.engine: a script cannot learn; set trainable = false")


def _check_evaluation(config: Config) -> None:
    plan, learns_from_reward = config.evaluation, any(stage.collect == "team" for stage in config.stages)
    if plan.every and not learns_from_reward:
        raise ConfigError("evaluation.every: has no effect where every stage learns from the teacher; remove it")
    for key, due in (("tasks", learns_from_reward), ("dev_tasks", plan.every > 0)):
        own = getattr(plan, key)
        if due and not own:
            example = '{ split = "test" }' if config.tasks.get("type") == "world" else '{ path = "test.jsonl" }'
            raise ConfigError(f"evaluation.{key}: missing; name questions that are not trained on, such as {example}")
        settings("tasks", config.tasks_with(own), f"evaluation.{key}")


def _check_tools(config: Config, name: str) -> None:
    for tool in config.agents[name].tools:
        if tool == config.planner:
            raise ConfigError(f"agents.{name}.tools: the planner {tool!r} cannot be called by an agent")
        if tool not in config.tools and tool not in config.agents:
            known = [*config.tools, *config.subagents]
            raise ConfigError(f"agents.{name}.tools: unknown tool or agent {tool!r}{suggest(tool, known)}")
    seen, stack = set(), [tool for tool in config.agents[name].tools if tool in config.agents]
    while stack:
        tool = stack.pop()
        if tool == name:
            raise ConfigError(f"agents.{name}.tools: {name!r} can reach itself; delegation must not be circular")
        if tool not in seen:
            seen.add(tool)
            stack += [next_ for next_ in config.agents[tool].tools if next_ in config.agents]


def _check_learner(table: Mapping[str, Any], where: str) -> None:
    try:
        LearnerConfig.model_validate(dict(table))
    except ValidationError as error:
        raise ConfigError(describe(error, LearnerConfig, where)) from error


def _check_rewards(config: Config, name: str) -> None:
    agent = config.agents[name]
    known = PRESETS[config.preset][agent.role]["reward_weights"]
    own = agent.reward_weights or {}
    if config.reward is None:  # a user's function may have terms of its own
        for key in [*own, *known]:
            if key not in known:
                raise ConfigError(f"agents.{name}.reward_weights.{key}: unknown term{suggest(key, known)}")
            if key not in own:
                raise ConfigError(f"agents.{name}.reward_weights.{key}: missing; a weight of 0 leaves the term out")
    for key, value in own.items():
        if value < 0:
            raise ConfigError(f"agents.{name}.reward_weights.{key}: must not be negative, got {value}")
