"""The local engine where a call is given up while its thread works on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tiny_models import tiny_model

from mgrpo.engines.base import Completion, Request, Sampling
from mgrpo.engines.decode import Decoder
from mgrpo.engines.local import Local
from mgrpo.types import TrajectoryId


def asks() -> list[Request]:
    """Turns of one and of six tokens, so that one is cached while the other goes on."""
    return [
        Request(TrajectoryId(5, i, "planner", 0), tuple(range(2, 20 + i)), Sampling(max_tokens=1 + 5 * i), (1,))
        for i in range(2)
    ]


def test_a_call_that_was_given_up_leaves_nothing_cached_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = asyncio.run(Local(Decoder(tiny_model())).generate(asks()))
    decoder = Decoder(tiny_model())
    engine, arrived, released = Local(decoder), threading.Event(), threading.Event()
    remember = decoder._remember

    def late(*arguments: Any) -> None:
        arrived.set()
        released.wait(30)
        remember(*arguments)

    async def given_up_and_begun_anew() -> list[Completion]:
        monkeypatch.setattr(decoder, "_remember", late)
        call = asyncio.create_task(engine.generate(asks()))
        await asyncio.to_thread(arrived.wait, 30)
        call.cancel()
        await asyncio.wait({call})
        for request in asks():
            engine.release(request.id)
        released.set()
        return await engine.generate(asks())

    assert asyncio.run(given_up_and_begun_anew()) == cold
