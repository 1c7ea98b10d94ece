"""The recipe, typed. Unknown keys are errors; every default is here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TinyModel(Strict):
    """A small model made at the start of the run, with a closed word-level vocabulary; learns from scratch."""

    type: Literal["tiny"]
    hidden_size: int = Field(128, gt=0)
    intermediate_size: int = Field(256, gt=0)
    num_layers: int = Field(3, gt=0)
    num_heads: int = Field(4, gt=0)
    initializer_range: float = Field(0.02, gt=0)
    rope_theta: float = Field(10_000.0, gt=0)


class LearnerConfig(Strict):
    """How one agent's weights move. Set under [learner] for all agents, [agents.NAME.learner] or [stages.learner].

    docs/algorithm.md explains every option of the objective; `mgrpo plan` prints what they come to.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-6, gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    adam_betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_tokens_per_microbatch: int = Field(4096, gt=0)
    max_skipped_steps: int = Field(5, gt=0, description="abort after so many non-finite gradients in a row")
    num_minibatches: int = Field(1, gt=0, description="optimiser steps that the groups of a step are split into")
    num_iterations: int = Field(1, gt=0, description="passes over the groups of a step")

    compare_with: Literal["query", "agent", "agent_turn", "batch", "parent"] = "agent"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    std_unbiased: bool = False
    leave_one_out: bool = False
    whiten_advantages: bool = False

    policy_loss: Literal["ppo", "cispo", "reinforce", "sft"] = Field("ppo", description="demonstrations: always sft")
    clip_ratio_low: float = Field(0.2, gt=0)
    clip_ratio_high: float = Field(0.2, gt=0)
    clip_ratio_c: float | None = Field(None, gt=1, description="dual clip; off unless set, 3.0 is usual")
    importance_sampling_level: Literal["token", "sequence"] = "token"
    loss_agg_mode: Literal[
        "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "rollout-mean"
    ] = "seq-mean-token-mean"
    loss_scale_factor: float | None = Field(
        None, gt=0, description="the constant of seq-mean-token-sum-norm; default: the most tokens of a trajectory"
    )
    loss_denominator: Literal["agent", "weights"] = Field(
        "agent", description="over one agent's rows, or over those of all agents that share the weights"
    )
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = Field(0.0, ge=0)
    rollout_is: Literal["none", "token", "sequence"] | None = Field(
        None, description="default: none for engines that are the learner's own code, else token"
    )
    rollout_is_threshold: float = Field(2.0, gt=0)
    rollout_rs: Literal["none", "token", "sequence"] = "none"
    rollout_rs_threshold: tuple[float, float] = (0.5, 5.0)

    @model_validator(mode="before")
    @classmethod
    def _field_names(cls, values: Any) -> Any:
        for theirs, ours in _PEERS.items():
            if isinstance(values, dict) and theirs in values:
                raise ValueError(f"{theirs}: unknown key; here it is called {ours}")
        return values

    @model_validator(mode="after")
    def _bounds(self) -> LearnerConfig:
        low, high = self.rollout_rs_threshold
        if not 0 <= low < high:
            raise ValueError(f"rollout_rs_threshold: must be [low, high] with 0 <= low < high, got [{low:g}, {high:g}]")
        return self


# What other trainers call a key -> its name here.
_PEERS = {
    "epsilon": "clip_ratio_low",
    "epsilon_high": "clip_ratio_high",
    "clip_ratio": "clip_ratio_low (and clip_ratio_high)",
    "eps_clip": "clip_ratio_low",
    "delta": "clip_ratio_c",
    "lr": "learning_rate",
    "beta": "kl_coef",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "entropy_coeff": "entropy_coef",
    "loss_type": "policy_loss and loss_agg_mode",
    "adv_estimator": "compare_with, scale_rewards and leave_one_out",
}
# Options of the comparison are each agent's own, also where agents share weights; all others belong to the weights.
COMPARISON = ("compare_with", "scale_rewards", "std_unbiased", "leave_one_out", "whiten_advantages")


class AgentConfig(Strict):
    """One agent: its model, its tools, its limits, and how its rows are aligned and rewarded."""

    role: Literal["planner", "subagent"]
    model: str | TinyModel | None = None
    share_weights_with: str | None = Field(None, description="an agent whose model this one is, instead of a model")
    skill: str = Field("", description="what a scripted teacher plays a sub-agent as, e.g. comparer")
    engine: dict[str, Any] = {"type": "local"}
    format: Literal["hermes", "compact"] = "hermes"
    prompt: str = Field("", description="the system prompt, or the path of a .md or .txt file that holds it")
    tools: tuple[str, ...] = ()
    trainable: bool = True
    num_generations: int | None = Field(None, gt=0, description="K, rollouts per question (planner only)")
    trajectories_per_rollout: int | None = Field(None, gt=0, description="d, the alignment target (sub-agents only)")
    align: Literal["weight", "resample", "none"] | None = None
    reward_weights: dict[str, float] | None = None
    max_turns: int = Field(8, gt=0)
    max_tokens_per_turn: int = Field(512, gt=0)
    max_context: int = Field(8192, gt=0)
    max_parallel_tool_calls: int = Field(8, gt=0)
    max_tool_response_tokens: int = Field(512, gt=0)
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 = off")
    min_p: float = Field(0.0, ge=0, lt=1)
    overlong_buffer_len: int = Field(0, ge=0, description="tokens below max_tokens_per_turn in which a penalty grows")
    overlong_penalty_factor: float = Field(1.0, gt=0)
    mask_truncated: bool = Field(False, description="trajectories that a limit cut off leave statistics and loss")
    learner: dict[str, Any] = {}

    @property
    def most_tokens(self) -> int:
        """What a trajectory can sample, the forced final turn included."""
        return min(self.max_context, self.max_tokens_per_turn * (self.max_turns + 1))

    @model_validator(mode="after")
    def _role_options(self) -> AgentConfig:
        if (self.model is None) == (self.share_weights_with is None):
            raise ValueError("model: give a model folder, a tiny model, or share_weights_with = 'AGENT'; one of them")
        if self.overlong_buffer_len > self.max_tokens_per_turn:
            raise ValueError(f"overlong_buffer_len: must not exceed max_tokens_per_turn = {self.max_tokens_per_turn}")
        if self.role == "planner":
            for key in ("trajectories_per_rollout", "align"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key}: only sub-agents have it; the planner has one trajectory per rollout")
        elif self.num_generations is not None:
            raise ValueError("num_generations: only the planner has it; a sub-agent runs when it is called")
        return self


class RolloutConfig(Strict):
    max_depth: int = Field(2, gt=0, description="levels of delegation below the planner")
    max_calls: int = Field(32, gt=0, description="sub-agent invocations in one rollout")
    rollout_timeout_s: float = Field(600.0, gt=0)
    request_timeout_s: float = Field(120.0, gt=0, description="of one batch of engine requests")
    grade_timeout_s: float = Field(120.0, gt=0, description="of one grade; without one the reward is unknown")
    max_retries: int = Field(2, ge=0, description="how often rollouts that were cut off run again")
    min_rollouts: int = Field(2, gt=0, description="of K that must be there in the end, or the group teaches nothing")
    scheduler: Literal["lockstep", "eager"] | None = Field(
        None, description="lockstep: batches are a function of ids; eager: as they come. Default: by max_staleness"
    )
    groups_per_lease: int | None = Field(
        None, gt=0, description="groups that a collector takes at once and runs together; default: those of a step"
    )
    unknown_reward: Literal["renormalise", "exclude"] = "renormalise"


class StageConfig(Strict):
    """So many steps of so many groups, with its own tasks and learner settings."""

    name: str = Field(min_length=1)
    steps: int = Field(gt=0)
    groups_per_step: int = Field(gt=0)
    num_generations: int | None = Field(None, gt=0, description="default: the planner's; 1 for demonstrations")
    collect: Literal["team", "teacher"] = Field("team", description="teacher: demonstrations, learned by sft")
    weight_sync_steps: int = Field(1, gt=0)
    tasks: dict[str, Any] = {}
    learner: dict[str, Any] = {}
    train: tuple[str, ...] | None = Field(None, description="agents that learn in this stage; default: all trainable")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_demonstrations(cls, values: Any) -> Any:
        if isinstance(values, dict) and "policy_loss" in values:
            raise ValueError("policy_loss: unknown key here; it stands in stages.learner, and demonstrations need none")
        taught = isinstance(values, dict) and values.get("collect") == "teacher"
        return {"num_generations": 1} | values if taught else values

    @model_validator(mode="after")
    def _synchronous(self) -> StageConfig:
        if self.collect == "team" and self.weight_sync_steps != 1:
            raise ValueError("weight_sync_steps: more than 1 is for demonstrations; rollouts need the newest weights")
        if self.steps % self.weight_sync_steps:
            raise ValueError(f"weight_sync_steps: {self.weight_sync_steps} does not divide steps = {self.steps}")
        return self


class FilterGroups(Strict):
    """Dynamic sampling (DAPO): questions whose rollouts are all worth the same are replaced by others."""

    enable: bool = False
    metric: str = Field("reward", description="of the root, before shaping: reward, or a part of it such as correct")
    max_num_gen_batches: int = Field(10, gt=0, description="then what there is is trained on")


class EvaluationConfig(Strict):
    """Questions that are never trained on, asked before and after reinforcement learning and every N steps."""

    tasks: dict[str, Any] = {}
    questions: int = Field(200, gt=0)
    dev_tasks: dict[str, Any] = {}
    dev_questions: int = Field(64, gt=0)
    every: int = Field(0, ge=0, description="evaluate on dev_tasks every N steps; 0 = never")
    closed_book: bool = True
    examples: int = Field(3, ge=0)


class LaunchConfig(Strict):
    """What `mgrpo launch` starts on this machine beside a learner for each set of weights that moves."""

    collectors: int = Field(1, gt=0)
    engines: int = Field(1, gt=0, description="servers of each set of weights")
    tool_server: bool = Field(True, description="tools run in a process of their own, for all collectors")
    max_restarts: int = Field(5, ge=0, description="of one part within restart_window_s; then everything stops")
    restart_window_s: float = Field(300.0, gt=0)


class Config(Strict):
    """The root. `mgrpo plan RECIPE` prints what it means."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="also names the default run folder")
    preset: str = "m_grpo"
    seed: int = 0
    threads: int | None = Field(None, gt=0, description="torch threads; default: all cores of where the run begins")
    agents: dict[str, AgentConfig]
    tools: dict[str, dict[str, Any]] = {}
    tasks: dict[str, Any]
    reward: str | None = Field(
        None, description="import path module:function, called like mgrpo.algorithm.rewards.rewards, in its place"
    )
    expert: dict[str, Any] = Field({"type": "gold"}, description="who grades sub-answers: gold, rule, judge, ...")
    rollout: RolloutConfig = RolloutConfig()
    filter_groups: FilterGroups = FilterGroups()
    learner: LearnerConfig = LearnerConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    trackers: tuple[dict[str, Any], ...] = ()
    store: str | None = Field(
        None,
        description="postgresql+psycopg://user@host/database, without a password; default: a file in the run folder",
    )
    weights: str | None = Field(None, description="where weights are kept: any fsspec URL; default: the run folder")
    max_staleness: int = Field(
        0, ge=0, description="versions that a group's oldest token may lie behind; 0: synchronous, bit for bit"
    )
    stale_policy: Literal["drop", "wait"] = Field(
        "drop", description="groups that are older are left out of the loss, or engines are waited for"
    )
    store_timeout_s: float = Field(3600.0, gt=0, description="longest wait of one loop for the other")
    outage_timeout_s: float = Field(600.0, gt=0, description="longest wait for a store or an engine that is gone")
    lease_s: float = Field(30.0, gt=0, description="a process unheard of for so long loses its work to another")
    keep_versions: int = Field(3, ge=2)
    launch: LaunchConfig = LaunchConfig()

    @property
    def scheduler(self) -> str:
        return self.rollout.scheduler or ("eager" if self.max_staleness else "lockstep")

    @property
    def default_folder(self) -> Path:
        return Path("runs") / self.name

    @property
    def planner(self) -> str:
        return next(name for name, agent in self.agents.items() if agent.role == "planner")

    @property
    def subagents(self) -> tuple[str, ...]:
        return tuple(name for name, agent in self.agents.items() if agent.role == "subagent")

    def tasks_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """[tasks] with the keys of a stage or evaluation on top; a table that names another type stands alone."""
        return dict(own) if own.get("type", self.tasks.get("type")) != self.tasks.get("type") else {**self.tasks, **own}

    def owner(self, agent: str) -> str:
        """The agent whose weights ``agent`` uses: itself, unless it shares those of another."""
        return self.agents[agent].share_weights_with or agent

    def sharing(self, owner: str) -> tuple[str, ...]:
        """The agents that use the weights of ``owner``, itself first."""
        return (owner, *(name for name, agent in self.agents.items() if agent.share_weights_with == owner))

    def learner_for(self, agent: str, stage: StageConfig) -> LearnerConfig:
        """[learner], then [agents.NAME.learner], then [stages.learner]; the later table wins.

        An agent that shares weights has those options of their owner that are not about the comparison. The loss of
        demonstrations and the correction for the engine are filled in.
        """
        owner = self.owner(agent)
        lent = self.agents[owner].learner
        if owner != agent:
            lent = {key: value for key, value in lent.items() if key not in COMPARISON} | self.agents[agent].learner
        merged = self.learner.model_dump() | lent | stage.learner
        if stage.collect == "teacher":
            merged["policy_loss"] = "sft"
        if merged["rollout_is"] is None:
            merged["rollout_is"] = "none" if self._same_code(owner) else "token"
        return LearnerConfig.model_validate(merged)

    def _same_code(self, agent: str) -> bool:
        """Whether the engine computes probabilities with the learner's own code and precision."""
        engine = self.agents[agent].engine
        return engine.get("type") == "local" and engine.get("dtype", "float32") == "float32"

    def num_generations(self, stage: StageConfig) -> int:
        return stage.num_generations or self.agents[self.planner].num_generations or 8

    def trained(self, stage: StageConfig) -> tuple[str, ...]:
        """Agents whose trajectories are learned from in this stage, in recipe order."""
        chosen = stage.train if stage.train is not None else tuple(self.agents)
        return tuple(name for name in self.agents if name in chosen and self.agents[name].trainable)

    @property
    def learners(self) -> tuple[str, ...]:
        """Agents that own weights which move in some stage, in recipe order."""
        moved = {self.owner(name) for name, agent in self.agents.items() if agent.trainable}
        return tuple(name for name in self.agents if name in moved)
