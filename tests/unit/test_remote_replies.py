"""Servers that know vLLM's fields only: what they are sent, and what their replies must hold to be believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_servers import MODEL, asks, over
from starlette.responses import Response
from web_server import TOKEN, served

from mgrpo.engines.base import Completion, Request
from mgrpo.engines.remote import Replica
from mgrpo.errors import EngineError, EngineLost, EngineTimeout, SamplingEvidenceError
from mgrpo.web.serving import Json, application, post


def reply_to(body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's documented reply, with fields that nobody here reads."""
    choices = [
        {
            "index": i,
            "text": " word",
            "logprobs": {"text_offset": [0], "token_logprobs": [-0.25], "tokens": [" word"], "top_logprobs": [{}]},
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [prompt[-1] + 1],
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
        }
        for i, prompt in enumerate(body["prompt"])
    ]
    usage = {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": None}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
        "kv_transfer_params": None,
    }


def foreign(
    requests: Sequence[Request], change: Callable[[dict[str, Any]], object] = lambda reply: None, **options: Any
) -> tuple[list[Completion], list[dict[str, Any]]]:
    """What a client makes of such a server's replies, changed by ``change``; and what it sent."""
    bodies: list[dict[str, Any]] = []

    async def answer(body: dict[str, Any]) -> object:
        bodies.append(body)
        reply = reply_to(body)
        changed = change(reply)
        return changed if isinstance(changed, Response) else reply

    async def main() -> list[Completion]:
        async with served(application([post("/v1/completions", dict, answer)], TOKEN)) as url:
            engine = over(lambda: [Replica("vllm", url, version=6)], extended=False, **options)
            await engine.load(5, "")
            return await engine.generate(requests)

    return asyncio.run(main()), bodies


def test_a_foreign_server_gets_one_sampling_per_request_and_nothing_that_it_does_not_know() -> None:
    requests = [*asks(0, 1), *asks(2, max_tokens=9), *asks(3, temperature=0.0, top_k=4), *asks(4)]
    completions, bodies = foreign(requests)
    assert completions == [Completion((r + 2,), (-0.25,), 6, "length") for r in range(5)]
    bodies.sort(key=lambda body: body["prompt"])
    assert [body["prompt"] for body in bodies] == [[[0, 1], [1, 2], [4, 5]], [[2, 3]], [[3, 4]]]
    assert [body["max_tokens"] for body in bodies] == [64, 9, 64]
    assert [(body["temperature"], body["top_k"], body["top_p"], body["min_p"]) for body in bodies] == [
        (1.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.0, 4, 1.0, 0.0),
    ]
    for body in bodies:
        assert (body["model"], body["logprobs"], body["return_token_ids"], body["n"]) == (MODEL, 0, True, 1)
        assert body["stop_token_ids"] == [1]
        assert not {"mgrpo", "seed", "user", "echo"} & body.keys()  # one seed would make equal prompts equal turns


def choice_without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda reply: reply["choices"][0].update({name: None})


BELIED: list[tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = [
    (choice_without("token_ids"), SamplingEvidenceError, "sent no token ids for g5/r0/planner/0"),
    (choice_without("logprobs"), SamplingEvidenceError, "sent 1 tokens but 0 log-probabilities for g5/r0/planner/0"),
    (
        lambda reply: reply["choices"][0]["logprobs"].update(token_logprobs=[-1.0, -1.0]),
        SamplingEvidenceError,
        "sent 1 tokens but 2 log-probabilities",
    ),
    (
        lambda reply: reply["choices"][0]["logprobs"].update(token_logprobs=[None]),
        SamplingEvidenceError,
        "a token without its log-probability for g5/r0/planner/0",
    ),
    (
        lambda reply: reply["choices"][0].update(prompt_token_ids=[1]),
        SamplingEvidenceError,
        "decoded g5/r0/planner/0 from another prompt",
    ),
    (lambda reply: reply["choices"][0].update(finish_reason="abort"), EngineError, "with finish_reason 'abort'"),
    (choice_without("finish_reason"), EngineError, "with finish_reason None"),
    (lambda reply: reply["choices"].pop(), EngineError, "sent 1 choices for g5/r0/planner/0, g5/r1/planner/0"),
    (lambda reply: reply["choices"][0].update(index=1), EngineError, "sent 2 choices"),
    (lambda reply: reply.pop("choices"), EngineError, "does not fit: Object missing required field `choices`"),
    (lambda reply: Json({"error": {"message": "no\nroom"}}, 400), EngineError, "HTTP 400: no room; asked for g5/r0"),
    (lambda reply: Json({"detail": "odd"}, 500), EngineError, 'HTTP 500: {"detail":"odd"}; asked for g5/r0'),
    (lambda reply: Json({"error": {"message": "stopping"}}, 503), EngineLost, "HTTP 503: stopping"),
    (lambda reply: Response(b"[1, NaN]", 200), EngineError, "sent a reply that does not fit"),
]


@pytest.mark.parametrize(("change", "kind", "said"), BELIED, ids=[said for _, _, said in BELIED])
def test_a_reply_that_proves_nothing_is_an_error(change: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as failed:
        foreign(asks(0, 1), change)
    assert type(failed.value) is kind
    assert said in str(failed.value) and "http://127.0.0.1:" in str(failed.value)


def test_choices_in_another_order_find_their_requests() -> None:
    completions, _ = foreign(asks(0, 1, 2), lambda reply: reply["choices"].reverse())
    assert [c.token_ids for c in completions] == [(2,), (3,), (4,)]


def test_a_server_that_hangs_is_named_with_its_seconds() -> None:
    async def main() -> None:
        async def answer(_: dict[str, Any]) -> object:
            return await asyncio.sleep(60)

        async with served(application([post("/v1/completions", dict, answer)], TOKEN)) as url:
            engine = over(lambda: [Replica("vllm", url, version=0)], extended=False, request_timeout_s=0.2)
            said = f"planner: {url}/v1/completions gave no reply within 0.2 s for g5/r0/planner/0, .* and 2 more"
            with pytest.raises(EngineTimeout, match=said):
                await engine.generate(asks(*range(10)))

    asyncio.run(main())


def test_our_own_server_must_say_its_version() -> None:
    async def main() -> None:
        async def answer(body: dict[str, Any]) -> object:
            return {**reply_to(body), "choices": reply_to(body)["choices"]}

        async with served(application([post("/v1/completions", dict, answer)], TOKEN)) as url:
            engine = over(lambda: [Replica("odd", url)])
            engine._know([Replica("odd", url, version=0)])
            with pytest.raises(EngineError, match="does not say which weights decoded g5/r0/planner/0"):
                await engine.generate(asks(0))

    asyncio.run(main())
