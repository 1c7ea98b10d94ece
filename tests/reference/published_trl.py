"""TRL's GRPO advantages, importance ratios and loss, called on a trainer reduced to the attributes they read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from published_source import published
from torch import Tensor

_ARRAYS = {"torch": torch, "np": np, "math": math}
_UTILS = published("trl", "trainer/utils.py", ["nanmax", "nanmin", "nanstd", "pad"], **_ARRAYS)
_GRPO = published(
    "trl",
    "trainer/grpo_trainer.py",
    ["GRPOTrainer._generate_and_score_completions", "GRPOTrainer._compute_loss"],
    **_ARRAYS,
    **vars(_UTILS),
    gather_object=lambda values: values,
    disable_gradient_checkpointing=lambda *_: nullcontext(),
)


def trl_advantages(rewards: Tensor, num_generations: int, scale_rewards: str) -> Tensor:
    """[N] rewards, ``num_generations`` at a time of one query, NaN where every reward function returned None -> [N]."""
    inputs = [{"prompt": ""} for _ in rewards]
    trainer = _trainer(
        num_generations=num_generations,
        scale_rewards=scale_rewards,
        _calculate_rewards=lambda *_: rewards[:, None].clone(),
        _generate=lambda _: ([[1]] * len(inputs), [[2]] * len(inputs), None, [""] * len(inputs), None, {}, None, None),
    )
    with _float64():
        advantages: Tensor = _GRPO._generate_and_score_completions(trainer, inputs)["advantages"]
    return advantages


def trl_importance_ratio(
    old: Sequence[Sequence[float]], behaviour: Sequence[Sequence[float]], mode: str, low: float | None, high: float
) -> Tensor:
    """Engine correction of B rows of T sampled tokens: [B, T] for a token ``mode``, [B, 1] for a sequence mode."""
    inputs = [{"prompt": ""} for _ in old]
    ids = [[2] * len(row) for row in behaviour]
    trainer = _trainer(
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        num_generations=len(inputs),
        _calculate_rewards=lambda *_: torch.zeros(len(inputs), 1, dtype=torch.float64),
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.tensor(old, dtype=torch.float64), None, None),
        _generate=lambda _: ([[1]] * len(inputs), ids, None, [""] * len(inputs), behaviour, {}, None, None),
    )
    with _float64():
        ratio: Tensor = _GRPO._generate_and_score_completions(trainer, inputs)["importance_sampling_ratio"]
    return ratio


def trl_loss(logprobs: Tensor, entropy: Tensor, mask: Tensor, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """The scalar of one optimiser step. ``logprobs``, ``entropy``, ``mask`` [B, T]; ``inputs`` as TRL names them."""
    trainer = _trainer(
        args=SimpleNamespace(
            delta=options.pop("delta", None),
            steps_per_generation=options.get("current_gradient_accumulation_steps", 1),
            use_bias_correction_kl=False,
        ),
        **options,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    fixed = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask}
    loss: Tensor = _GRPO._compute_loss(trainer, None, {**fixed, "num_items_in_batch": mask.sum(), **inputs})
    return loss


@contextmanager
def _float64() -> Iterator[None]:
    """TRL makes tensors of lists and quotients of counts in torch's default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _trainer(**options: Any) -> SimpleNamespace:
    """What the two methods read of a trainer on one process, without accumulation, tools, images or a live model."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        process_index=0,
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
    )
    defaults: dict[str, Any] = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(
            per_device_train_batch_size=1,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1, dtype=torch.float64),
        "_metrics": {"train": defaultdict(list)},
        "_logs": {"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "max_completion_length": None,
        "current_gradient_accumulation_steps": 1,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "_entropy_bonus_enabled": bool(options.get("entropy_coef")),
        "aux_loss_enabled": False,
    }
    return SimpleNamespace(**defaults | options)
