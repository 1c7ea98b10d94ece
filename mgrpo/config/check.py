"""Everything about a recipe that one table alone cannot know: names that must be there, roles, circles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mgrpo.config.inert import check_effect
from mgrpo.config.model import COMPARISON, AgentConfig, Config, LearnerConfig
from mgrpo.config.presets import PRESETS
from mgrpo.config.registry import describe, settings, suggest
from mgrpo.errors import ConfigError


def check(config: Config) -> None:
    """Everything that one table alone cannot know. Raises ConfigError naming the key."""
    _check_roles(config)
    for name, agent in config.agents.items():
        _check_tools(config, name)
        _check_sharing(config, name)
        _check_sampling(agent, f"agents.{name}")
        settings("engine", agent.engine, f"agents.{name}.engine")
        _check_learner(agent.learner, f"agents.{name}.learner")
        _check_rewards(config, name)
    for name, table in config.tools.items():
        settings("tool", table, f"tools.{name}")
    settings("tasks", config.tasks, "tasks")
    settings("expert", config.expert, "expert")
    for index, stage in enumerate(config.stages):
        where = f"stages.{index}"
        settings("tasks", config.tasks_with(stage.tasks), f"{where}.tasks")
        _check_learner(stage.learner, f"{where}.learner")
        if "policy_loss" in stage.learner and (stage.learner["policy_loss"] == "sft") != (stage.collect == "teacher"):
            raise ConfigError(f"{where}.learner.policy_loss: sft is for collect = 'teacher', which has no other loss")
        for agent_name in stage.train or ():
            if agent_name not in config.agents:
                raise ConfigError(f"{where}.train: unknown agent {agent_name!r}{suggest(agent_name, config.agents)}")
            if not config.agents[agent_name].trainable:
                raise ConfigError(f"{where}.train: agent {agent_name!r} has trainable = false")
    if config.learner.policy_loss == "sft":
        raise ConfigError("learner.policy_loss: sft is what stages with collect = 'teacher' have anyway; remove it")
    _check_objectives(config)
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


def _check_sharing(config: Config, name: str) -> None:
    """An agent that shares weights has what belongs to them from their owner."""
    agent, where = config.agents[name], f"agents.{name}"
    if agent.share_weights_with is None:
        return
    owner = config.agents.get(agent.share_weights_with)
    if owner is None:
        known = suggest(agent.share_weights_with, config.agents)
        raise ConfigError(f"{where}.share_weights_with: unknown agent {agent.share_weights_with!r}{known}")
    if owner.model is None:
        raise ConfigError(
            f"{where}.share_weights_with: {agent.share_weights_with!r} has no model of its own; name the owner"
        )
    for key in ("format", "temperature"):
        if getattr(agent, key) != getattr(owner, key):
            raise ConfigError(f"{where}.{key}: must be that of {agent.share_weights_with!r}, whose weights it shares")
    if agent.engine not in (owner.engine, AgentConfig.model_fields["engine"].default):
        raise ConfigError(f"{where}.engine: has no effect, {agent.share_weights_with!r} serves the weights; remove it")
    if foreign := [key for key in agent.learner if key not in COMPARISON]:
        raise ConfigError(
            f"{where}.learner.{foreign[0]}: belongs to the weights of {agent.share_weights_with!r}; set it there"
        )


def _check_sampling(agent: AgentConfig, where: str) -> None:
    """The policy that is trained is the one over the whole vocabulary, so that is the one to sample from."""
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(agent, key) == off:
            continue
        if agent.trainable:
            raise ConfigError(
                f"{where}.{key}: refused for an agent that learns, since the ratio to a truncated distribution is"
                f" biased; leave it at {off} or set trainable = false"
            )
        if agent.engine.get("type") == "scripted":
            raise ConfigError(f"{where}.{key}: has no effect on a script; remove it")


def _check_objectives(config: Config) -> None:
    for index, stage in enumerate(config.stages):
        for name in config.trained(stage):
            plan = config.learner_for(name, stage)
            if stage.groups_per_step % plan.num_minibatches:
                raise ConfigError(
                    f"stages.{index}.groups_per_step: {stage.groups_per_step} groups cannot be split into"
                    f" num_minibatches = {plan.num_minibatches} of {name!r}; choose a multiple"
                )
            if plan.compare_with == "parent" and config.agents[name].role == "planner":
                raise ConfigError(f"agents.{name}.learner.compare_with: the planner has no parent; choose another")
    if config.reward is None:
        known = ["reward", *PRESETS[config.preset].planner["reward_weights"]]
        if config.filter_groups.metric not in known:
            raise ConfigError(f"filter_groups.metric: unknown metric{suggest(config.filter_groups.metric, known)}")


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
    known = PRESETS[config.preset].agent(agent.role)["reward_weights"]
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
