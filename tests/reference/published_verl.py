"""verl's advantage estimators, policy losses, aggregation, KL estimates and rollout correction."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from published_source import published

torch_functional = published(
    "verl",
    "utils/torch_functional.py",
    [
        "entropy_from_logits",
        "gather_from_labels",
        "logprobs_from_logits_naive",
        "masked_mean",
        "masked_sum",
        "masked_var",
        "masked_whiten",
    ],
    torch=torch,
    F=torch.nn.functional,
)


@dataclass(frozen=True)
class ActorConfig:
    """What verl's policy losses read of their configuration."""

    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    global_batch_info: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


core_algos = published(
    "verl",
    "trainer/ppo/core_algos.py",
    [
        "agg_loss",
        "compute_grpo_outcome_advantage",
        "compute_policy_loss_cispo",
        "compute_policy_loss_gspo",
        "compute_policy_loss_reinforce",
        "compute_policy_loss_vanilla",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "compute_rloo_outcome_advantage",
        "kl_penalty",
        "kl_penalty_forward",
    ],
    torch=torch,
    defaultdict=defaultdict,
    verl_F=torch_functional,
    ActorConfig=ActorConfig,
    AlgoConfig=type("AlgoConfig", (), {}),
)

rollout_correction = published(
    "verl",
    "trainer/ppo/rollout_corr_helper.py",
    [
        "SAFETY_BOUND",
        "SUPPORTED_ROLLOUT_RS_OPTIONS",
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
        "_parse_rollout_is_threshold",
        "_parse_rollout_rs_thresholds",
        "compute_is_metrics",
        "compute_rollout_correction_weights",
        "compute_rollout_rejection_mask",
        "compute_rs_metrics",
    ],
    torch=torch,
    math=math,
    verl_F=torch_functional,
)
