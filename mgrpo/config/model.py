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
    """How one agent's weights move. Set under [learner] for all agents, [agents.NAME.learner] or [stages.learner]."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-6, gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    adam_betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_ratio_low: float = Field(0.2, gt=0)
    clip_ratio_high: float = Field(0.2, gt=0)
    loss_agg_mode: Literal["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"] = "seq-mean-token-mean"
    scale_rewards: Literal["group", "none"] = "group"
    max_tokens_per_microbatch: int = Field(4096, gt=0)
    max_skipped_steps: int = Field(5, gt=0, description="abort after so many non-finite gradients in a row")

    @model_validator(mode="before")
    @classmethod
    def _field_names(cls, values: Any) -> Any:
        peers = {"epsilon": "clip_ratio_low", "epsilon_high": "clip_ratio_high", "lr": "learning_rate"}
        for theirs, ours in peers.items():
            if isinstance(values, dict) and theirs in values:
                raise ValueError(f"{theirs}: unknown key; here it is called {ours}")
        return values


class AgentConfig(Strict):
    """One agent: its model, its tools, its limits, and how its rows are aligned and rewarded."""

    role: Literal["planner", "subagent"]
    model: str | TinyModel
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
    learner: dict[str, Any] = {}

    @model_validator(mode="after")
    def _role_options(self) -> AgentConfig:
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
    max_retries: int = Field(2, ge=0, description="how often a group runs again in which rollouts were cut off")
    unknown_reward: Literal["renormalise", "exclude"] = "renormalise"


class StageConfig(Strict):
    """So many steps of so many groups, with its own tasks and learner settings."""

    name: str = Field(min_length=1)
    steps: int = Field(gt=0)
    groups_per_step: int = Field(gt=0)
    num_generations: int | None = Field(None, gt=0, description="default: the planner's; 1 for demonstrations")
    collect: Literal["team", "teacher"] = "team"
    policy_loss: Literal["ppo", "sft"] = Field("ppo", description="default: sft for demonstrations, else ppo")
    weight_sync_steps: int = Field(1, gt=0)
    tasks: dict[str, Any] = {}
    learner: dict[str, Any] = {}
    train: tuple[str, ...] | None = Field(None, description="agents that learn in this stage; default: all trainable")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_demonstrations(cls, values: Any) -> Any:
        taught = isinstance(values, dict) and values.get("collect") == "teacher"
        return {"policy_loss": "sft", "num_generations": 1} | values if taught else values

    @model_validator(mode="after")
    def _loss_fits(self) -> StageConfig:
        if (self.collect == "teacher") != (self.policy_loss == "sft"):
            raise ValueError(
                f"policy_loss: {self.policy_loss!r} cannot learn from collect = {self.collect!r};"
                " demonstrations (teacher) need sft, the team's own rollouts need ppo"
            )
        if self.collect == "team" and self.weight_sync_steps != 1:
            raise ValueError("weight_sync_steps: more than 1 is for demonstrations; rollouts need the newest weights")
        if self.steps % self.weight_sync_steps:
            raise ValueError(f"weight_sync_steps: {self.weight_sync_steps} does not divide steps = {self.steps}")
        return self


class EvaluationConfig(Strict):
    """Questions that are never trained on, asked before and after reinforcement learning and every N steps."""

    tasks: dict[str, Any] = {}
    questions: int = Field(200, gt=0)
    dev_tasks: dict[str, Any] = {}
    dev_questions: int = Field(64, gt=0)
    every: int = Field(0, ge=0, description="evaluate on dev_tasks every N steps; 0 = never")
    closed_book: bool = True
    examples: int = Field(3, ge=0)


class Config(Strict):
    """The root. `mgrpo plan RECIPE` prints what it means."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="also names the default run folder")
    preset: Literal["m_grpo"] = "m_grpo"
    seed: int = 0
    threads: int | None = Field(None, gt=0, description="torch threads; default: all cores of where the run begins")
    agents: dict[str, AgentConfig]
    tools: dict[str, dict[str, Any]] = {}
    tasks: dict[str, Any]
    reward: str | None = Field(
        None, description="import path module:function, called like mgrpo.algorithm.rewards.rewards, in its place"
    )
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    trackers: tuple[dict[str, Any], ...] = ()
    store_timeout_s: float = Field(3600.0, gt=0, description="longest wait of one loop for the other")
    keep_versions: int = Field(3, ge=2)

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

    def learner_for(self, agent: str, stage: StageConfig) -> LearnerConfig:
        """[learner], then [agents.NAME.learner], then [stages.learner]; the later table wins."""
        merged = self.learner.model_dump() | self.agents[agent].learner | stage.learner
        return LearnerConfig.model_validate(merged)

    def num_generations(self, stage: StageConfig) -> int:
        return stage.num_generations or self.agents[self.planner].num_generations or 8

    def trained(self, stage: StageConfig) -> tuple[str, ...]:
        """Agents that learn in this stage, in recipe order."""
        chosen = stage.train if stage.train is not None else tuple(self.agents)
        return tuple(name for name in self.agents if name in chosen and self.agents[name].trainable)
