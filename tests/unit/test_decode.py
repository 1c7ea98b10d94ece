"""The local engine against plain forward passes of the same model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, plain_logprobs, tiny_model
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mgrpo.engines.base import Completion, Request, Sampling
from mgrpo.engines.decode import Decoder, _new_row, _sample, check_decoding, kept_set, uniforms
from mgrpo.engines.local import Local, Settings
from mgrpo.errors import ConfigError, DataError
from mgrpo.types import TrajectoryId

LENGTHS = (3, 17, 1, 9)


def ask(index: int, prompt: Sequence[int], temperature: float = 0.7, max_tokens: int = 8, stop: int = 1) -> Request:
    return Request(TrajectoryId(0, index, "a", 0), tuple(prompt), Sampling(temperature, max_tokens, 5), (stop,))


def ragged(**options: Any) -> list[Request]:
    return [ask(i, [(7 * i + j) % 60 + 2 for j in range(n)], **options) for i, n in enumerate(LENGTHS)]


def assert_plain(model: Any, request: Request, completion: Completion, tolerance: float = 1e-5) -> None:
    """R-27: the engine's log-probabilities are those of an ordinary forward pass over prompt and turn."""
    temperature = request.sampling.temperature or 1.0
    whole = plain_logprobs(model, request.prompt_ids + completion.token_ids, temperature)
    expected = whole[len(request.prompt_ids) - 1 :]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "opt", "gemma2"])
def test_ragged_prompts_are_scored_as_in_a_plain_forward_pass(kind: str) -> None:
    full = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 2.0} if kind == "gemma2" else {}
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 32} if kind == "opt" else {}
    model = tiny_model(kind, **full, **sizes)
    check_decoding(Decoder(model))
    requests = ragged()
    for request, completion in zip(requests, Decoder(model).decode(requests, 3), strict=True):
        assert_plain(model, request, completion)
        assert completion.version == 3
        assert (completion.stop_reason == "stop") == (completion.token_ids[-1] == 1)
        assert completion.stop_reason == "stop" or len(completion.token_ids) == 8


@pytest.mark.parametrize("heads", [1, 4])
def test_shared_and_own_key_value_heads(heads: int) -> None:
    model = tiny_model(num_key_value_heads=heads)
    requests = ragged(max_tokens=4)
    for request, completion in zip(requests, Decoder(model).decode(requests, 0), strict=True):
        assert_plain(model, request, completion)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, "sliding_attention"),
        ("gemma2", {}, "sliding_attention"),
        ("mistral", {"sliding_window": 4}, "sliding_attention"),  # names no layer types
        ("phi3", {"sliding_window": 4}, "sliding_attention"),
        ("mamba", {"state_size": 4}, "linear_attention"),
        ("bloom", {}, "bloom"),
        ("gptj", {"rotary_dim": 4}, "off by"),  # takes its positions from elsewhere: wrong, not broken
    ],
)
def test_models_that_it_would_decode_wrongly_are_refused(kind: str, options: dict[str, Any], said: str) -> None:
    model = tiny_model(kind, **options)
    with pytest.raises(ConfigError, match=f"^engine type 'local' .*{said}.*; choose a model with"):
        check_decoding(Decoder(model))


# ---------------------------------------------------------------- turns of one trajectory


def next_turn(request: Request, completion: Completion, observed: Sequence[int]) -> Request:
    prompt = request.prompt_ids + completion.token_ids + tuple(observed)
    return Request(request.id, prompt, request.sampling, request.stop_ids)


def test_a_later_turn_reuses_the_prefix_and_equals_cold_decoding() -> None:
    model = tiny_model()
    warm, requests, computed = Decoder(model), ragged(), []
    handle = model.model.embed_tokens.register_forward_hook(lambda _, ids, out: computed.append(ids[0].numel()))
    for observed in ((9, 8, 7), (5,)):
        completions = warm.decode(requests, 0)
        requests = [next_turn(r, c, observed) for r, c in zip(requests, completions, strict=True)]
    computed.clear()
    later = warm.decode(requests, 0)
    assert computed[0] == len(LENGTHS) * 2  # the last sampled token and the observed one, not the prompt again
    handle.remove()
    for request, completion in zip(requests, later, strict=True):
        assert_plain(model, request, completion)
    cold = Decoder(model).decode(requests, 0)
    assert [c.token_ids for c in later] == [c.token_ids for c in cold]
    for one, other in zip(later, cold, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_rewritten_history_uses_only_the_common_prefix() -> None:
    model = tiny_model()
    decoder = Decoder(model)
    decoder.decode([ask(0, range(2, 20))], 0)
    changed = ask(0, [*range(2, 10), 40, 41, *range(12, 20)])
    shorter = ask(0, range(2, 6))
    for request in (changed, shorter, ask(0, range(30, 40))):
        assert_plain(model, request, decoder.decode([request], 0)[0])


def test_release_and_load_drop_what_was_cached(tmp_path: Path) -> None:
    """R-54, R-56: nothing computed with old weights survives, and completions carry the new version."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    new.save_pretrained(tmp_path)
    decoder = Decoder(old)
    engine = Local(decoder)
    first = ragged()
    completions = asyncio.run(engine.generate(first))
    assert {c.version for c in completions} == {0}
    engine.release(first[0].id)
    assert set(decoder._kept) == {request.id for request in first[1:]}
    asyncio.run(engine.load(4, str(tmp_path)))
    assert not decoder._kept
    second = [next_turn(r, c, (6,)) for r, c in zip(first, completions, strict=True)]
    for request, completion in zip(second, asyncio.run(engine.generate(second)), strict=True):
        assert completion.version == 4
        assert_plain(new, request, completion)


def test_a_call_that_nobody_waits_for_ends_at_its_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, steps, real = Decoder(tiny_model()), [], Decoder._step

    def slow(self: Decoder, *given: Any) -> torch.Tensor:
        steps.append(1)
        time.sleep(0.02)
        return real(self, *given)

    monkeypatch.setattr(Decoder, "_step", slow)
    engine = Local(decoder)

    async def impatient() -> list[Completion]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate([ask(0, range(2, 8), max_tokens=200, stop=63)])
        return await engine.generate([ask(1, range(2, 8), max_tokens=2, stop=63)])

    assert len(asyncio.run(impatient())) == 1 and len(steps) < 50


def test_a_call_that_ran_out_of_time_does_not_disturb_the_next() -> None:
    model, requests = tiny_model(), ragged(max_tokens=60, stop=63)
    engine = Local(Decoder(model))
    expected = asyncio.run(Local(Decoder(model)).generate(requests))

    async def impatient() -> list[Completion]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await engine.generate(ragged(max_tokens=90, stop=63))
        return await engine.generate(requests)

    found = asyncio.run(impatient())
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_limits_of_one_batch_may_differ() -> None:
    requests = [ask(i, range(2, 8), max_tokens=n, stop=63) for i, n in enumerate((1, 6, 3))]
    completions = Decoder(tiny_model()).decode(requests, 0)
    assert [len(c.token_ids) for c in completions if c.stop_reason == "length"] == [1, 6, 3]


# ---------------------------------------------------------------- sampling


def rows(*samplings: Sampling) -> list[Any]:
    return [_new_row(Request(TrajectoryId(0, i, "a", 0), (2,), s, ())) for i, s in enumerate(samplings)]


def test_logprobs_are_at_the_sampling_temperature() -> None:
    """R-35: logits [2, 0] at T = 0.5 are [4, 0], and log softmax is -0.0181 at the first."""
    asked = rows(*[Sampling(0.5, 1, seed) for seed in range(40)])
    tokens = _sample(torch.tensor([[2.0, 0.0]]).expand(40, 2), asked, 0).tolist()
    expected = [-math.log1p(math.exp(-4.0)), -4.0 - math.log1p(math.exp(-4.0))]
    assert expected[0] == pytest.approx(-0.0181, abs=1e-4)
    for row, token in zip(asked, tokens, strict=True):
        assert row.logprobs == pytest.approx([expected[token]], abs=1e-6)
    assert tokens.count(0) > 30


def test_temperature_zero_is_greedy_and_mixes_with_sampling() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9]]).repeat(2, 1)
    greedy, _ = asked = rows(Sampling(0.0, 1), Sampling(1.0, 1))
    assert _sample(logits, asked, 0)[0] == 1
    assert greedy.logprobs == pytest.approx([float(torch.log_softmax(logits[0], 0)[1])])


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    row = SimpleNamespace(
        request=ask(0, (2,), temperature=1.0), ids=[], logprobs=[], noise=[0.0, 1.0 - 2.0**-53], stop_reason=None
    )
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]])
    assert [int(_sample(logits, [row], step)[0]) for step in (0, 1)] == [1, 3]
    for draw in torch.randn(50, 1, 60, generator=torch.Generator().manual_seed(0)):  # sums a little off 1
        logits = torch.cat([draw, torch.full((1, 4), -torch.inf)], dim=1)
        assert int(_sample(logits, [row], 1)[0]) < 60


PROBABILITIES = [0.0625, 0.25, 0.0625, 0.5, 0.125]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [3, 1, 4, 0, 2]),
        ({"top_k": 2}, [3, 1]),
        ({"top_k": 4}, [3, 1, 4, 0]),  # of equally likely ones the lower id
        ({"top_k": 99}, [3, 1, 4, 0, 2]),
        ({"top_p": 0.74}, [3, 1]),  # crossed by the second, which stays
        ({"top_p": 0.76}, [3, 1, 4]),
        ({"top_p": 0.0}, [3]),
        ({"min_p": 0.24}, [3, 1, 4]),
        ({"top_k": 3, "top_p": 0.8}, [3, 1]),  # 4/7, 2/7, 1/7 of the three: 6/7 reach it, of all .75 would not
        ({"top_p": 0.95, "min_p": 0.3}, [3, 1]),
        ({"top_p": 0.6, "temperature": 0.5}, [3]),  # squares: 16/22 reach what .5 does not
    ],
)
def test_the_kept_set_of_a_worked_example(options: dict[str, Any], kept: list[int]) -> None:
    sampling = Sampling(**options)
    logprobs = torch.log_softmax(torch.tensor(PROBABILITIES).log() / sampling.temperature, 0)
    assert kept_set(logprobs, sampling).tolist() == kept
    mass = sum(PROBABILITIES[i] ** (1 / sampling.temperature) for i in kept)
    asked = rows(*[Sampling(**options, seed=seed) for seed in range(60)])
    tokens = _sample(torch.tensor(PROBABILITIES).log().expand(60, 5), asked, 0).tolist()
    assert set(tokens) <= set(kept) and set(kept[:2]) <= set(tokens)
    for row, token in zip(asked, tokens, strict=True):  # renormalised
        assert row.logprobs == pytest.approx([math.log(PROBABILITIES[token] ** (1 / sampling.temperature) / mass)])


def test_truncation_of_one_request_leaves_the_others_bit_for_bit() -> None:
    model, requests = tiny_model(), ragged()
    plain = Decoder(model).decode(requests, 0)
    cut = replace(requests[0], sampling=replace(requests[0].sampling, top_k=3, top_p=0.9, min_p=0.1))
    assert Decoder(model).decode([cut, *requests[1:]], 0)[1:] == plain[1:]
    greedy = [replace(r, sampling=Sampling(0.0, 8, 5)) for r in requests]
    same = [replace(r, sampling=Sampling(0.0, 8, 5, top_p=0.5, top_k=1, min_p=0.5)) for r in requests]
    assert Decoder(model).decode(same, 0) == Decoder(model).decode(greedy, 0)


def test_a_truncated_turn_is_scored_over_the_kept_set_at_every_token() -> None:
    """Against the warpers of transformers on plain forward passes."""
    model = tiny_model()
    sampling = Sampling(0.7, 8, 5, top_p=0.9, top_k=12, min_p=0.02)
    warpers = [TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)]
    requests = [replace(request, sampling=sampling) for request in ragged()]
    for request, completion in zip(requests, Decoder(model).decode(requests, 0), strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1] / 0.7
        for warper in warpers:
            scores = warper(None, scores)
        sampled = torch.tensor(completion.token_ids)[:, None]
        expected = torch.log_softmax(scores, -1).gather(1, sampled)[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_sampling_noise_does_not_depend_on_the_batch() -> None:
    model = tiny_model()
    requests = ragged()
    together = Decoder(model).decode(requests, 0)
    alone = [Decoder(model).decode([request], 0)[0] for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    other = Request(TrajectoryId(0, 9, "a", 0), requests[1].prompt_ids, requests[1].sampling, ())
    assert Decoder(model).decode([other], 0)[0].token_ids != together[1].token_ids


def test_uniforms_lie_in_the_unit_interval() -> None:
    drawn = uniforms(0, TrajectoryId(1, 2, "a", 3), 0, 4000)
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    assert abs(drawn.mean() - 0.5) < 0.02


# ---------------------------------------------------------------- settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


def test_bfloat16_decodes(folder: Path) -> None:
    engine = Settings(dtype="bfloat16").build(folder=folder)
    model = engine._decoder.model
    assert model.dtype == torch.bfloat16
    for request, completion in zip(ragged(), asyncio.run(engine.generate(ragged())), strict=True):
        assert all(0 <= id < VOCABULARY for id in completion.token_ids)
        assert_plain(model, request, completion, tolerance=0.1)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"model folder {tmp_path}: no config.json there"):
        Settings().build(folder=tmp_path)
