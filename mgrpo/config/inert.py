"""What a recipe says without effect, and stages that would teach nothing: refused, with the key and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.config.model import Config, LearnerConfig, StageConfig
from mgrpo.config.registry import settings
from mgrpo.errors import ConfigError

_PPO_ONLY = frozenset({"clip_ratio_low", "clip_ratio_high", "scale_rewards"})
_READERS = ("search", "visit")  # built-in tools that read a task's corpus


def check_effect(config: Config) -> None:
    """Raises ConfigError naming the key. What each table holds has been checked before."""
    _check_used(config)
    for index, stage in enumerate(config.stages):
        where = f"stages.{index}"
        _check_stage(config, stage, where)
        if stage.collect == "teacher":
            _check_teacher(config, stage, where)
        _check_corpus(config, stage.tasks, f"{where}.tasks" if "path" in stage.tasks else "tasks")
    _check_learners(config)
    for key in ("tasks", "dev_tasks"):
        if own := getattr(config.evaluation, key):
            _check_unseen(config, own, f"evaluation.{key}")
            _check_corpus(config, own, f"evaluation.{key}")


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
        if agent.learner and not any(name in config.trained(stage) for stage in config.stages):
            raise ConfigError(f"agents.{name}.learner: has no effect, since it learns in no stage; remove it")
        if agent.trainable and agent.engine.get("type") == "scripted":
            raise ConfigError(f"agents.{name}.engine: a script cannot learn; set trainable = false")
        if agent.align == "none" and agent.trajectories_per_rollout is not None:
            raise ConfigError(
                f"agents.{name}.trajectories_per_rollout: has no effect with align = 'none'; remove one of the two"
            )


def _check_stage(config: Config, stage: StageConfig, where: str) -> None:
    if not config.trained(stage):
        raise ConfigError(f"{where}: no agent learns in it; set trainable = true or remove the stage")
    if stage.policy_loss == "ppo" and config.num_generations(stage) == 1:
        raise ConfigError(
            f"{where}.num_generations: one rollout has none to be compared with, so nothing is learned; take 2 or more"
        )


def _check_teacher(config: Config, stage: StageConfig, where: str) -> None:
    """The scripted teacher of a world: whoever has no sub-agents to ask searches and visits, in words it can read."""
    tasks = settings("tasks", config.tasks_with(stage.tasks), f"{where}.tasks")
    if getattr(tasks, "type", None) != "world":
        return  # a user's teacher has tools of its own
    for name, agent in config.agents.items():
        asks = agent.role == "planner" and any(tool in config.agents for tool in agent.tools)
        lacking = [tool for tool in _READERS if tool not in agent.tools]
        if lacking and not asks:
            raise ConfigError(
                f"agents.{name}.tools: the teacher of stage {stage.name!r} acts for it and calls"
                f" {' and '.join(lacking)}; add what is missing, or use collect = 'team'"
            )
    for name, table in config.tools.items():
        compact = table["type"] == "search" and settings("tool", table, f"tools.{name}").style == "compact"
        if compact and tasks.names == "syllables":
            raise ConfigError(
                f"tools.{name}.style: the teacher of stage {stage.name!r} cannot read 'compact' lists of pages with"
                " names = 'syllables'; set style = 'prose'"
            )


def _check_corpus(config: Config, own: Mapping[str, Any], where: str) -> None:
    table = config.tasks_with(own)
    if table["type"] == "jsonl" and table.get("corpus") is None:
        for name, tool in config.tools.items():
            if tool["type"] in _READERS:
                raise ConfigError(f"{where}.corpus: missing; tool {name!r} reads pages, give a JSONL file of them")


def _check_learners(config: Config) -> None:
    """Every learner table has some agent and stage in which all of its keys do something."""
    for index, stage in enumerate(config.stages):
        plans = [config.learner_for(name, stage) for name in config.trained(stage)]
        _check_table(stage.learner, plans, [stage], f"stages.{index}.learner")
    for name, agent in config.agents.items():
        stages = [stage for stage in config.stages if name in config.trained(stage)]
        _check_table(agent.learner, [config.learner_for(name, s) for s in stages], stages, f"agents.{name}.learner")
    every = [config.learner_for(name, stage) for stage in config.stages for name in config.trained(stage)]
    changed = config.learner.model_dump(exclude_defaults=True)
    _check_table(changed, every, config.stages, "learner")


def _check_table(
    table: Mapping[str, Any], plans: Sequence[LearnerConfig], stages: Sequence[StageConfig], where: str
) -> None:
    """``plans`` are what becomes of ``table`` where it counts, ``stages`` those in which it does."""
    if all(stage.policy_loss == "sft" for stage in stages) and (inert := _PPO_ONLY & table.keys()):
        raise ConfigError(f"{where}.{min(inert)}: has no effect with policy_loss = 'sft'; remove it")
    if table.get("min_lr_ratio") and all(plan.lr_scheduler == "constant" for plan in plans):
        raise ConfigError(f"{where}.min_lr_ratio: has no effect with lr_scheduler = 'constant'; remove it")


def _check_unseen(config: Config, own: Mapping[str, Any], where: str) -> None:
    asked = config.tasks_with(own)
    for index, stage in enumerate(config.stages):
        trained = config.tasks_with(stage.tasks)
        if trained["type"] != asked["type"]:
            continue
        if trained["type"] == "world" and trained.get("split", "train") == asked.get("split", "train"):
            same = f"split = {asked.get('split', 'train')!r}"
        elif trained["type"] == "jsonl" and Path(trained["path"]).resolve() == Path(asked["path"]).resolve():
            same = f"path = {str(asked['path'])!r}"
        else:
            continue
        raise ConfigError(f"{where}: stage {index} trains on these questions ({same}); name others")
