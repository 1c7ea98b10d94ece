"""Everything about a recipe that one table alone cannot know: names that must be there, roles, circles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mgrpo.config.inert import check_effect
from mgrpo.config.model import Config, LearnerConfig
from mgrpo.config.presets import PRESETS
from mgrpo.config.registry import describe, settings, suggest
from mgrpo.errors import ConfigError


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
    _check_evaluation(config)
    for index, tracker in enumerate(config.trackers):
        settings("tracker", tracker, f"trackers.{index}")
    check_effect(config)


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
