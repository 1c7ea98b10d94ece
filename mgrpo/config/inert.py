"""What a recipe says without effect, and stages that would teach nothing: refused, with the key and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.config.model import COMPARISON, Config, LearnerConfig, StageConfig
from mgrpo.config.presets import PRESETS
from mgrpo.config.registry import settings
from mgrpo.errors import ConfigError

Works = Callable[[LearnerConfig], bool]
_RL: Works = lambda plan: plan.policy_loss != "sft"  # noqa: E731
_CLIPS: Works = lambda plan: plan.policy_loss in ("ppo", "cispo")  # noqa: E731
_PPO: Works = lambda plan: plan.policy_loss == "ppo"  # noqa: E731
# key of a learner table -> where it does something, and the words for where it does not
_NEEDS: Mapping[str, tuple[Works, str]] = {
    **dict.fromkeys(COMPARISON, (_RL, "with policy_loss = 'sft'")),
    **dict.fromkeys(("entropy_coef", "kl_coef", "rollout_is", "rollout_rs"), (_RL, "with policy_loss = 'sft'")),
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), (_CLIPS, "with policy_loss = 'reinforce' or 'sft'")),
    **dict.fromkeys(("clip_ratio_c", "importance_sampling_level"), (_PPO, "unless policy_loss = 'ppo'")),
    "std_unbiased": (lambda plan: _RL(plan) and plan.scale_rewards != "none", "with scale_rewards = 'none'"),
    "kl_estimator": (lambda plan: plan.kl_coef > 0, "with kl_coef = 0"),
    "kl_in": (
        lambda plan: plan.kl_coef > 0 and not (plan.kl_in == "reward" and plan.compare_with == "parent"),
        "with kl_coef = 0, nor in a reward with compare_with = 'parent'",
    ),
    "loss_scale_factor": (
        lambda plan: plan.loss_agg_mode == "seq-mean-token-sum-norm",
        "unless loss_agg_mode = 'seq-mean-token-sum-norm'",
    ),
    "rollout_is_threshold": (lambda plan: _RL(plan) and plan.rollout_is != "none", "with rollout_is = 'none'"),
    "rollout_rs_threshold": (lambda plan: _RL(plan) and plan.rollout_rs != "none", "with rollout_rs = 'none'"),
    "min_lr_ratio": (lambda plan: plan.lr_scheduler != "constant", "with lr_scheduler = 'constant'"),
}
_READERS = ("search", "visit")  # built-in tools that read a task's corpus


def check_effect(config: Config) -> None:
    """Raises ConfigError naming the key. What each table holds has been checked before."""
    _check_used(config)
    _check_parts(config)
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
        trained = {other for stage in config.stages for other in config.trained(stage)}
        if agent.learner and not any(config.agents[other].trainable for other in config.sharing(name)):
            raise ConfigError(f"agents.{name}.learner: has no effect with trainable = false; remove one of the two")
        if agent.learner and trained.isdisjoint(config.sharing(name)):
            raise ConfigError(f"agents.{name}.learner: has no effect, since it learns in no stage; remove it")
        if agent.trainable and agent.engine.get("type") == "scripted":
            raise ConfigError(f"agents.{name}.engine: a script cannot learn; set trainable = false")
        if agent.skill and agent.role == "planner":
            raise ConfigError(f"agents.{name}.skill: only sub-agents have it; remove it")
        if agent.skill and all(stage.collect == "team" for stage in config.stages):
            raise ConfigError(f"agents.{name}.skill: has no effect without a stage of demonstrations; remove it")
        if agent.overlong_penalty_factor != 1.0 and not agent.overlong_buffer_len:
            raise ConfigError(
                f"agents.{name}.overlong_penalty_factor: has no effect with overlong_buffer_len = 0; remove it"
            )
        plans = [config.learner_for(name, stage) for stage in config.stages if name in config.trained(stage)]
        if agent.overlong_buffer_len and plans and all(plan.compare_with == "parent" for plan in plans):
            raise ConfigError(
                f"agents.{name}.overlong_buffer_len: has no effect with compare_with = 'parent', which has no reward of"
                " its own; remove it"
            )
        if agent.align == "none" and agent.trajectories_per_rollout is not None:
            raise ConfigError(
                f"agents.{name}.trajectories_per_rollout: has no effect with align = 'none'; remove one of the two"
            )


def _check_parts(config: Config) -> None:
    """How the two loops run beside each other."""
    rl = any(stage.collect == "team" for stage in config.stages)
    if config.max_staleness and not rl:
        raise ConfigError("max_staleness: has no effect where every stage learns from the teacher; remove it")
    if config.stale_policy != "drop" and not config.max_staleness:
        raise ConfigError("stale_policy: has no effect with max_staleness = 0, where nothing is stale; remove it")
    size = config.rollout.groups_per_lease
    for index, stage in enumerate(config.stages if size else ()):
        window = stage.groups_per_step * stage.weight_sync_steps
        if size and window % size:
            raise ConfigError(
                f"rollout.groups_per_lease: {size} does not divide the {window} groups of a step of stages.{index};"
                " choose a divisor"
            )


def _check_stage(config: Config, stage: StageConfig, where: str) -> None:
    if not config.trained(stage):
        raise ConfigError(f"{where}: no agent learns in it; set trainable = true or remove the stage")
    alone = all(config.learner_for(name, stage).compare_with != "batch" for name in config.trained(stage))
    if stage.collect == "team" and config.num_generations(stage) == 1 and alone:
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
        if lacking and not asks and agent.skill != "comparer":
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
        _check_table(config, stage.learner, plans, f"stages.{index}.learner")
    for name, agent in config.agents.items():
        moved = [(other, stage) for stage in config.stages for other in config.trained(stage)]
        own = [
            config.learner_for(other, stage) for other, stage in moved if config.owner(other) == name or other == name
        ]
        _check_table(config, agent.learner, own, f"agents.{name}.learner")
    every = [config.learner_for(name, stage) for stage in config.stages for name in config.trained(stage)]
    _check_table(config, config.learner.model_dump(exclude_defaults=True), every, "learner")
    if not config.filter_groups.enable:
        for key in config.filter_groups.model_dump(exclude_defaults=True).keys() - PRESETS[config.preset].filter_groups:
            raise ConfigError(f"filter_groups.{key}: has no effect with enable = false; remove it")


def _check_table(config: Config, table: Mapping[str, Any], plans: Sequence[LearnerConfig], where: str) -> None:
    """``plans`` are what becomes of ``table`` where it counts. What the preset says may be overruled in part."""
    given = PRESETS[config.preset].learner
    for key in sorted(table):
        works, words = _NEEDS.get(key, (None, ""))
        if key in given and table[key] == given[key]:
            continue
        if works is not None and not any(map(works, plans)):
            if plans and all(plan.policy_loss == "sft" for plan in plans) and key != "min_lr_ratio":
                words = "with policy_loss = 'sft'"
            raise ConfigError(f"{where}.{key}: has no effect {words}; remove it")
        if key == "loss_denominator" and not any(agent.share_weights_with for agent in config.agents.values()):
            raise ConfigError(f"{where}.{key}: has no effect where no agents share weights; remove it")


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
