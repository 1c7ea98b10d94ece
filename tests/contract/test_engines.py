"""What every engine does. A new engine is done when its factory is listed in ENGINES and this file passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_servers import Apart
from pydantic import ValidationError
from tiny_team import compact_chat
from tiny_tokenizer import CONTROLS, TEXT

from mgrpo.config import TinyModel
from mgrpo.engines.base import Completion, Engine, Request, Sampling
from mgrpo.engines.local import Settings as LocalSettings
from mgrpo.engines.scripted import Scripted, Settings
from mgrpo.errors import ConfigError, DataError
from mgrpo.policy.tiny import write_tiny
from mgrpo.types import Message, TrajectoryId


def scripted(tmp_path: Path) -> Engine:
    return Scripted(
        lambda request: f"<answer> Tarn {request.messages[0].content} </answer>", compact_chat().encode_reply
    )


def local(tmp_path: Path) -> Engine:
    write_tiny(tmp_path, TinyModel(type="tiny", hidden_size=32, num_layers=1), TEXT.split(), CONTROLS, seed=0)
    return LocalSettings().build(folder=tmp_path)


def scripted_over_http(tmp_path: Path) -> Engine:
    return Apart(scripted(tmp_path), messages=True)


def local_over_http(tmp_path: Path) -> Engine:
    return Apart(local(tmp_path))


# Each factory gets an empty folder and returns an engine at version 0 for the vocabulary of `compact_chat()`.
ENGINES: list[Callable[[Path], Engine]] = [scripted, local, scripted_over_http, local_over_http]


@pytest.fixture(params=ENGINES, ids=lambda factory: factory.__name__)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = request.param(tmp_path)
    yield made
    asyncio.run(made.close())


def ask(invocation: int, text: str = "Merova", max_tokens: int = 16, **options: Any) -> Request:
    chat = compact_chat()
    messages = (Message("user", text),)
    id = TrajectoryId(0, 0, "planner", invocation)
    sampling = Sampling(max_tokens=max_tokens, **options)
    return Request(id, chat.prompt_ids(messages), sampling, chat.stop_ids, messages)


def generate(engine: Engine, *requests: Request) -> list[Completion]:
    return asyncio.run(engine.generate(requests))


def test_one_completion_per_request_with_a_logprob_and_a_version_per_token(engine: Engine) -> None:
    completions = generate(engine, ask(0), ask(1, "Zubora"), ask(2))
    assert len(completions) == 3
    for completion in completions:
        assert 1 <= len(completion.token_ids) <= 16
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(value <= 1e-6 for value in completion.logprobs)
        assert completion.version == 0


def test_a_turn_stops_at_a_stop_id_which_is_sampled_or_at_the_limit(engine: Engine) -> None:
    for completion in generate(engine, *(ask(i, max_tokens=3 + 5 * (i % 2)) for i in range(8))):
        stops = [id in compact_chat().stop_ids for id in completion.token_ids]
        assert not any(stops[:-1])  # the first one ends the turn
        assert stops[-1] == (completion.stop_reason == "stop")
        if completion.stop_reason == "length":
            assert len(completion.token_ids) in (3, 8)


def test_order_of_requests_is_order_of_completions(engine: Engine) -> None:
    requests = [ask(0, "Merova"), ask(1, "Zubora"), ask(2, "Tarn")]
    forth, back = generate(engine, *requests), generate(engine, *reversed(requests))
    assert [c.token_ids for c in forth] == [c.token_ids for c in reversed(back)]


def test_the_same_request_gets_the_same_turn(engine: Engine) -> None:
    (first,), (again,) = generate(engine, ask(3)), generate(engine, ask(3))
    assert replace(again, logprobs=first.logprobs) == first
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)  # a cached prefix is computed in other shapes


@pytest.mark.parametrize("alone", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}], ids=str)
def test_a_kept_set_of_one_token_is_the_greedy_turn_with_certainty(engine: Engine, alone: dict[str, Any]) -> None:
    (greedy,), (only,) = generate(engine, ask(0, temperature=0.0)), generate(engine, ask(1, **alone))
    assert only.token_ids == greedy.token_ids
    assert only.logprobs == pytest.approx([0.0] * len(only.token_ids), abs=1e-6)


def test_nothing_asked_nothing_generated(engine: Engine) -> None:
    assert generate(engine) == []


def test_release_of_anything_is_harmless(engine: Engine) -> None:
    before = generate(engine, ask(0))
    engine.release(ask(0).id)
    engine.release(TrajectoryId(9, 9, "nobody", 9))
    assert generate(engine, ask(0)) == before


# ---------------------------------------------------------------- scripted alone


def test_scripted_serves_the_version_it_was_told() -> None:
    engine = Scripted(lambda request: "<answer> Tarn </answer>", compact_chat().encode_reply, version=3)
    assert generate(engine, ask(0))[0].version == 3
    asyncio.run(engine.load(4, "checkpoints/4"))
    assert generate(engine, ask(0))[0].version == 4


def test_scripted_reads_replies_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "replies.json"
    path.write_text('{"planner": ["<answer> Tarn </answer>"]}')
    engine = Settings(path=str(path)).build(compact_chat().encode_reply)
    completion = generate(engine, ask(0))[0]
    assert compact_chat().decode(completion.token_ids) == "<answer> Tarn </answer>"
    stranger = Request(TrajectoryId(0, 0, "critic", 0), (1,), Sampling(), (2,))
    with pytest.raises(DataError, match=r"replies.json has no reply for turn 0 of g0/r0/critic/0"):
        generate(engine, stranger)


def reply(request: Request) -> str:
    return "<answer> Merova </answer>"


@pytest.mark.parametrize("bad", ["nowhere.json", "[1]", '{"planner": "text"}', "{"])
def test_scripted_refuses_what_is_no_script(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "replies.json"
    if bad != "nowhere.json":
        path.write_text(bad)
    with pytest.raises(ConfigError, match="replies.json"):
        Settings(path=str(path)).build(compact_chat().encode_reply)


def test_scripted_takes_a_function_by_its_path() -> None:
    engine = Settings(function="mgrpo.types:Reply").build(lambda said: (1,))
    assert isinstance(engine, Scripted)
    for function in ("mgrpo.types:nothing", "no.such.module:f", "mgrpo:__version__"):
        with pytest.raises(ConfigError, match="engine.function"):
            Settings(function=function).build(lambda said: (1,))
    for options in ({}, {"path": "a", "function": "b:c"}):
        with pytest.raises(ValidationError, match="has either path"):
            Settings(**options)
