"""Hugging Face models of a few thousand parameters, one per kind of attention that matters."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1}


def tiny_model(kind: str = "qwen3", seed: int = 0, scale: float = 4.0, **options: Any) -> Any:
    """A random model in eval mode; ``scale`` widens its output layer so that its distributions are not flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = GPT2 | {"eos_token_id": 1} if kind in ("gpt2", "gptj") else SHAPE
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | options))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    return model.eval()


def plain_logprobs(model: Any, ids: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """log pi(ids[t] | ids[:t]) for t >= 1, shape [T - 1], by one forward pass without cache, padding or mask."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, row[0, 1:, None])[:, 0]
