"""Batched decoding with a key-value cache that lives as long as a trajectory: a turn computes only its new tokens.

Shapes: B requests, Q new tokens, T tokens of room, L layers, H key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mgrpo.engines.base import Completion, Request, Sampling
from mgrpo.engines.model import logits_at
from mgrpo.errors import ConfigError, EngineError
from mgrpo.types import StopReason, TrajectoryId


def uniforms(seed: int, id: TrajectoryId, position: int, count: int) -> Any:
    """``count`` numbers in [0, 1) for the positions from ``position`` on, a pure function of (seed, id, position)."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=16).digest(), "little")
    bits = np.random.Philox(key=key).advance(position // 4)
    words = bits.random_raw(position % 4 + count)[position % 4 :]
    return (words >> np.uint64(11)) * 2.0**-53


class BatchCache:
    """Keys and values of B rows, each written at its own positions; what the model's attention calls ``update`` on."""

    def __init__(self, layers: int, rows: int, room: int) -> None:
        self._layers, self._rows, self._room = layers, rows, room
        self.states: Tensor | None = None  # [L, 2, B, T, H, D], made when the first keys show H, D and dtype
        self.positions = torch.zeros(rows, 1, dtype=torch.int64)  # [B, Q], where the next call writes
        self.width = 0  # the longest row after the next call

    def seat(self, rows: Sequence[Tensor | None]) -> None:
        """Put what earlier turns left ([L, 2, length, H, D] each) in its row."""
        first = next((row for row in rows if row is not None), None)
        if first is None:
            return
        self.states = first.new_zeros(self._layers, 2, self._rows, self._room, *first.shape[3:])
        for b, row in enumerate(rows):
            if row is not None:
                self.states[:, :, b, : row.shape[2]] = row

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] at ``positions``; return all of it so far, [B, H, width, D]."""
        if self.states is None:
            shape = (self._layers, 2, self._rows, self._room, keys.shape[1], keys.shape[3])
            self.states = keys.new_zeros(shape)
        rows = torch.arange(self._rows, device=keys.device)[:, None]
        for which, new in enumerate((keys, values)):
            self.states[layer, which][rows, self.positions] = new.transpose(1, 2)
        both = self.states[layer, :, :, : self.width]
        return both[0].transpose(1, 2), both[1].transpose(1, 2)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        assert self.states is not None
        self.states = self.states[:, :, rows]
        self._rows = len(rows)

    def get_seq_length(self, *_: Any) -> int:
        return self.width


@dataclass(slots=True, eq=False)
class _Row:
    """One request while its turn is written."""

    request: Request
    noise: Any  # [max_tokens]
    ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason = "length"
    done: bool = False


class Decoder:
    """Decodes batches with one full-attention model. Remembers each trajectory's keys and values until released."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._layers = _full_attention_layers(model.config)
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._kept: dict[TrajectoryId, tuple[tuple[int, ...], Tensor]] = {}

    def forget(self, id: TrajectoryId | None = None) -> None:
        """Drop what is cached for one trajectory, or for all."""
        if id is None:
            self._kept.clear()
        else:
            self._kept.pop(id, None)

    @torch.inference_mode()
    def decode(
        self, requests: Sequence[Request], version: int, abandoned: threading.Event | None = None
    ) -> list[Completion]:
        """One turn per request. Batch order, padding and noise are a pure function of the requests.

        Raises EngineError at the next token once ``abandoned`` is set: nobody waits for these turns any more.
        """
        rows = [_new_row(request) for request in requests]
        cached = [self._cached(request) for request in requests]
        start = [0 if states is None else states.shape[2] for states in cached]
        new = [request.prompt_ids[n:] for request, n in zip(requests, start, strict=True)]
        most = max(request.sampling.max_tokens for request in requests)
        width = max(map(len, new))
        cache = BatchCache(self._layers, len(rows), max(start) + width + most)
        cache.seat(cached)
        logits = self._prefill(cache, start, new)
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        alive = list(range(len(rows)))  # position in the cache -> row
        for step in range(most):
            if abandoned is not None and abandoned.is_set():
                raise EngineError("nobody waits for these turns any more")
            tokens = _sample(logits, [rows[i] for i in alive], step)
            still = [b for b, i in enumerate(alive) if not rows[i].done]
            for b, i in enumerate(alive):
                if rows[i].done:
                    self._remember(rows[i], cache, b)
            if not still:
                break
            if len(still) < len(alive):
                keep = torch.tensor(still)
                cache.keep(keep)
                tokens, lengths, alive = tokens[keep], lengths[keep], [alive[b] for b in still]
            logits = self._step(cache, tokens, lengths)
            lengths = lengths + 1
        return [Completion(tuple(r.ids), tuple(r.logprobs), version, r.stop_reason) for r in rows]

    def _cached(self, request: Request) -> Tensor | None:
        """Keys and values of the longest part of the prompt that this trajectory has computed already."""
        ids, states = self._kept.get(request.id, ((), None))
        if states is None:
            return None
        common = 0
        for ours, theirs in zip(ids, request.prompt_ids[:-1], strict=False):  # one token at least is computed
            if ours != theirs:
                break
            common += 1
        return states[:, :, :common] if common else None

    def _prefill(self, cache: BatchCache, start: list[int], new: list[tuple[int, ...]]) -> Tensor:
        """Logits [B, V] after the last prompt token of every row; new tokens are right-padded to Q."""
        width = max(map(len, new))
        input_ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in new])
        cache.positions = torch.tensor(start)[:, None] + torch.arange(width)
        cache.width = max(start) + width
        visible = torch.arange(cache.width) <= cache.positions[:, :, None]  # [B, Q, width]
        select = torch.zeros(len(new), width, dtype=torch.bool)
        select[torch.arange(len(new)), torch.tensor([len(ids) - 1 for ids in new])] = True
        return self._forward(cache, input_ids, visible, select)

    def _step(self, cache: BatchCache, tokens: Tensor, lengths: Tensor) -> Tensor:
        cache.positions = lengths[:, None]
        cache.width = int(lengths.max()) + 1
        visible = torch.arange(cache.width) <= cache.positions[:, :, None]
        return self._forward(cache, tokens[:, None], visible, torch.ones(len(tokens), 1, dtype=torch.bool))

    def _forward(self, cache: BatchCache, input_ids: Tensor, visible: Tensor, select: Tensor) -> Tensor:
        device = self.model.device
        positions = cache.positions = cache.positions.to(device)
        return logits_at(
            self.model,
            select.to(device),
            input_ids=input_ids.to(device),
            attention_mask=visible[:, None].to(device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).cpu()

    def _remember(self, row: _Row, cache: BatchCache, b: int) -> None:
        assert cache.states is not None
        ids = (*row.request.prompt_ids, *row.ids[:-1])  # the last token was sampled, not yet read
        self._kept[row.request.id] = (ids, cache.states[:, :, b, : len(ids)].clone())


def _new_row(request: Request) -> _Row:
    sampling = request.sampling
    noise = None
    if sampling.temperature > 0:
        noise = uniforms(sampling.seed, request.id, len(request.prompt_ids), sampling.max_tokens)
    return _Row(request, noise, [], [])


def kept_set(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Ids [n] of the tokens that truncation leaves, most likely first, n >= 1. Of equal ones the lower id comes first.

    ``logprobs`` [V] are normalised and at the sampling temperature. "Reaches ``top_p``" is meant of the distribution
    renormalised after ``top_k``, and the token that crosses it is kept (nucleus sampling, arXiv 1904.09751; ``min_p``,
    arXiv 2407.01082).
    """
    size = len(logprobs)
    k = min(sampling.top_k or size, size)
    # What is less likely than `floor` cannot be kept and is not worth sorting. Half of it leaves room for rounding.
    if k < size:
        floor = logprobs.topk(k).values[-1]
    else:
        floor = ((sampling.min_p * logprobs.max().exp()).clamp(min=(1 - sampling.top_p) / size) / 2).log()
    ids = (~(logprobs < floor)).nonzero()[:, 0]
    ordered, order = logprobs[ids].sort(descending=True, stable=True)
    probabilities = ordered[:k].double().exp()
    if k < size:
        probabilities /= probabilities.sum()
    keep = probabilities >= sampling.min_p * probabilities[0]
    if sampling.top_p < 1:
        keep[1:] &= probabilities.cumsum(0)[:-1] < sampling.top_p  # what stands before a token
    keep[0] = True
    return ids[order[:k][keep]]


def _truncated(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """``logprobs`` [V] renormalised over the kept set, -inf elsewhere."""
    kept = kept_set(logprobs, sampling)
    return torch.full_like(logprobs, -torch.inf).index_copy_(0, kept, torch.log_softmax(logprobs[kept], dim=0))


def _sample(logits: Tensor, rows: Sequence[_Row], step: int) -> Tensor:
    """One token per row by inversion of the cumulative distribution, or the most likely one at temperature 0."""
    temperatures = torch.tensor([row.request.sampling.temperature for row in rows])
    scale = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    logprobs = torch.log_softmax(logits.float() / scale, dim=-1)
    for b, row in enumerate(rows):
        if row.request.sampling.truncates:
            logprobs[b] = _truncated(logprobs[b], row.request.sampling)
    total = logprobs.exp().double().cumsum(-1)
    noise = torch.tensor([0.0 if row.noise is None else row.noise[step] for row in rows], dtype=torch.float64)
    # Below the whole sum, which a product can round up to: no token of probability 0 is drawn.
    point = torch.minimum(noise * total[:, -1], torch.nextafter(total[:, -1], torch.zeros_like(noise)))
    drawn = torch.searchsorted(total, point[:, None], right=True)[:, 0].clamp_(max=total.shape[1] - 1)
    tokens = torch.where(temperatures > 0, drawn, logprobs.argmax(-1))
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    for row, token, logprob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)
        if token in row.request.stop_ids:
            row.stop_reason = "stop"
        row.done = row.stop_reason == "stop" or len(row.ids) >= row.request.sampling.max_tokens
    return tokens


_NEEDED = "choose a model with rotary positions and full attention in every layer, such as Llama or Qwen3"


def _full_attention_layers(config: Any) -> int:
    """How many layers there are, all of them with plain causal attention; ConfigError otherwise."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not getattr(text, "layer_types", None) and getattr(text, "sliding_window", None):
        kinds = {"sliding_attention"}  # Mistral and Phi name no layer types: a window holds for all layers
    if kinds != {"full_attention"}:
        other = ", ".join(sorted(kinds - {"full_attention"}))
        raise ConfigError(f"engine type 'local' cannot cache {other} layers ({text.model_type}); {_NEEDED}")
    return int(text.num_hidden_layers)


def check_decoding(decoder: Decoder) -> None:
    """Decode two ragged prompts and score the result in plain forward passes. ConfigError where the two disagree.

    Finds models that derive positions or biases from something else than ``position_ids`` (ALiBi, GPT-J), or whose
    attention cannot use this cache; they would train on log-probabilities that are not theirs.
    """
    model, name = decoder.model, decoder.model.config.get_text_config().model_type
    sampling = Sampling(temperature=0.0, max_tokens=3)
    prompts = [tuple(i % decoder.vocabulary for i in range(2, 2 + length)) for length in (3, 9)]
    requests = [Request(TrajectoryId(0, i, "check", 0), ids, sampling, ()) for i, ids in enumerate(prompts)]
    refused = f"engine type 'local' cannot decode this model ({name}): "
    try:
        completions = decoder.decode(requests, version=0)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{refused}{str(error).strip().partition(chr(10))[0]}; {_NEEDED}") from error
    finally:
        decoder.forget()
    gap = max(_gap(model, r, c) for r, c in zip(requests, completions, strict=True))
    if not gap < (1e-2 if model.dtype == torch.float32 else 0.25):
        raise ConfigError(f"{refused}with a cache its log-probabilities are off by {gap:.2g}; {_NEEDED}")


@torch.inference_mode()
def _gap(model: Any, request: Request, completion: Completion) -> float:
    """Largest difference in nats between a completion's log-probabilities and those of one plain forward pass."""
    first, sampled = len(request.prompt_ids), torch.tensor(completion.token_ids)
    ids = torch.tensor([request.prompt_ids + completion.token_ids], device=model.device)
    plain = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float(), dim=-1).cpu()
    return float((plain.gather(1, sampled[:, None])[:, 0] - torch.tensor(completion.logprobs)).abs().max())
