"""What a recipe's options come to: config -> the numbers that `algorithm` and `policy` take. Pure functions."""

from __future__ import annotations

from mgrpo.algorithm.advantages import Comparison
from mgrpo.algorithm.loss import Objective
from mgrpo.algorithm.shaping import Shaping
from mgrpo.config import Config, LearnerConfig, StageConfig
from mgrpo.config.model import COMPARISON
from mgrpo.policy.step import StepPlan


def comparison_of(plan: LearnerConfig) -> Comparison:
    return Comparison(**{key: getattr(plan, key) for key in COMPARISON})


def step_plan(config: Config, owner: str, stage: StageConfig, pad_id: int) -> StepPlan:
    """How the weights of ``owner`` take a step of ``stage``."""
    plan = config.learner_for(owner, stage)
    return StepPlan(
        objective=_objective(plan),
        max_tokens_per_microbatch=plan.max_tokens_per_microbatch,
        pad_id=pad_id,
        loss_agg_mode=plan.loss_agg_mode,
        loss_denominator=plan.loss_denominator,
        scale_factors={
            name: plan.loss_scale_factor or config.agents[name].most_tokens for name in config.sharing(owner)
        },
        rollout_rs="none" if plan.policy_loss == "sft" else plan.rollout_rs,
        rollout_rs_threshold=plan.rollout_rs_threshold,
        num_minibatches=plan.num_minibatches,
        num_iterations=plan.num_iterations,
    )


def _objective(plan: LearnerConfig) -> Objective:
    if plan.policy_loss == "sft":
        return Objective("sft")
    return Objective(
        policy_loss=plan.policy_loss,
        clip_ratio_low=plan.clip_ratio_low,
        clip_ratio_high=plan.clip_ratio_high,
        clip_ratio_c=plan.clip_ratio_c,
        importance_sampling_level=plan.importance_sampling_level,
        kl_coef=plan.kl_coef if plan.kl_in == "loss" else 0.0,
        kl_estimator=plan.kl_estimator,
        entropy_coef=plan.entropy_coef,
        rollout_is=plan.rollout_is or "none",
        rollout_is_threshold=plan.rollout_is_threshold,
    )


def shapings(config: Config) -> dict[str, Shaping]:
    """By agent."""
    return {
        name: Shaping(
            agent.max_tokens_per_turn, agent.overlong_buffer_len, agent.overlong_penalty_factor, agent.mask_truncated
        )
        for name, agent in config.agents.items()
    }


def needs_reference(config: Config, owner: str, stage: StageConfig) -> bool:
    """Whether some loss or reward of ``stage`` compares the weights of ``owner`` with those before reinforcement."""
    return stage.collect == "team" and config.learner_for(owner, stage).kl_coef > 0.0
