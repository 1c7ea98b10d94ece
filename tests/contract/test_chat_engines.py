"""What every chat engine does. A new one is done when its factory is listed in CHAT_ENGINES and this file passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from chat_server import Answer, ChatServer, completion, refusal, serving
from pydantic import ValidationError

from mgrpo.engines.chat import ChatEngine, ChatReply
from mgrpo.engines.openai import OpenAI, Settings
from mgrpo.errors import ConfigError, EngineError, EngineTimeout
from mgrpo.types import Message

MESSAGES = (Message("system", "Be brief."), Message("user", "Capital of Zubora?"))


class Clock:
    """Sleeps at once and remembers for how long."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def openai(base_url: str, clock: Clock | None = None, key: str | None = None, **options: Any) -> OpenAI:
    settings = Settings(model="judge-1", base_url=base_url, **options)
    return OpenAI(settings, key, (clock or Clock()).sleep, jitter=lambda: 1.0)


# Each factory gets the address of a service and returns an engine that asks it.
CHAT_ENGINES: list[Callable[[str], ChatEngine]] = [openai]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(params=CHAT_ENGINES, ids=lambda factory: factory.__name__)
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def chat(engine: ChatEngine, times: int = 1) -> list[ChatReply]:
    async def all_at_once() -> list[ChatReply]:
        try:
            return list(await asyncio.gather(*(engine.chat(MESSAGES) for _ in range(times))))
        finally:
            await engine.close()

    return asyncio.run(all_at_once())


def test_a_reply_is_the_text_with_its_token_counts(make: Any) -> None:
    with serving(completion("Merova", tokens=(31, 4))) as server:
        assert chat(make(server.base_url)) == [ChatReply("Merova", True, 31, 4)]
        assert [m["content"] for m in server.requests[0]["messages"]] == ["Be brief.", "Capital of Zubora?"]


def test_counts_that_the_service_does_not_give_are_unknown(make: Any) -> None:
    with serving(completion("Merova", tokens=None)) as server:
        assert chat(make(server.base_url)) == [ChatReply("Merova", True, None, None)]


def test_a_reply_that_was_cut_off_says_so_even_without_text(make: Any) -> None:
    with serving(completion("Mer", "length"), completion(None, "length")) as server:
        engine = make(server.base_url)
        assert [(r.text, r.complete) for r in (*chat(engine), *chat(engine))] == [("Mer", False), ("", False)]


def test_many_calls_at_once_and_again_in_another_event_loop(make: Any) -> None:
    with serving(completion("Merova")) as server:
        engine = make(server.base_url)
        asyncio.run(engine.chat(MESSAGES))  # its loop ends with the connection still open
        assert len(chat(engine, 8)) == 8 and len(chat(engine, 2)) == 2
        assert len(server.requests) == 11 and engine.retries == 0


def test_identity_tells_engines_apart_that_may_answer_differently(make: Any) -> None:
    address = "http://127.0.0.1:1/v1"
    assert make(address).identity == make(address).identity
    assert make(address).model in make(address).identity


# ---------------------------------------------------------------- faults that pass


TRANSIENT = {
    "overloaded": refusal(503, "try later"),
    "internal": refusal(500, "oops"),
    "anthropic-style overload": refusal(529, "overloaded"),
    "busy": refusal(429, "slow down"),
    "cut off": Answer(body=b'{"choices": [{"mess', cut=True),
    "garbled": Answer(body=b'{"choices": [{"mess'),
    "no choices": Answer(body=b'{"choices": []}'),
    "an error that calls itself 200": Answer(body=b'{"error": {"message": "provider is down"}}'),
    "not json": Answer(body=b"<html>502 from a proxy</html>"),
}


@pytest.mark.parametrize("answer", TRANSIENT.values(), ids=TRANSIENT.keys())
def test_what_may_pass_is_tried_again_after_growing_waits(answer: Answer) -> None:
    clock = Clock()
    with serving(answer, answer, completion("Merova")) as server:
        engine = openai(server.base_url, clock)
        assert chat(engine)[0].text == "Merova"
    assert clock.slept == [0.5, 1.0] and engine.retries == 2


@pytest.mark.parametrize("answer", TRANSIENT.values(), ids=TRANSIENT.keys())
def test_tries_are_bounded_and_the_last_fault_is_told(answer: Answer) -> None:
    with serving(answer) as server:
        with pytest.raises(EngineError, match=r"/v1/chat/completions .*\(try 3 of 3\)$") as caught:
            chat(openai(server.base_url, max_retries=2))
        assert len(server.requests) == 3
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_waits_are_those_the_service_asks_for_in_seconds_or_as_a_date() -> None:
    clock = Clock()
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    waits = ["7", "0.25", date, past, "soon"]
    with serving(*(refusal(429, "slow down", Retry_After=wait) for wait in waits), completion("Merova")) as server:
        assert chat(openai(server.base_url, clock, max_retries=5))[0].text == "Merova"
    assert clock.slept[:2] == [7.0, 0.25]
    assert 0 < clock.slept[2] <= 20
    assert clock.slept[3:] == [0.0, 8.0]  # "soon" is no time: the fifth wait of the usual ones


def test_a_wait_that_is_too_long_is_not_waited_for() -> None:
    clock = Clock()
    with serving(refusal(429, "quota resets at noon", Retry_After="3600")) as server:
        with pytest.raises(EngineError, match="quota resets at noon; it asks for a wait of 3600 s, longer than"):
            chat(openai(server.base_url, clock))
        assert len(server.requests) == 1 and clock.slept == []


def test_no_reply_in_time_is_a_timeout() -> None:
    with serving(Answer(hang=True)) as server:
        engine = openai(server.base_url, timeout_s=0.05, max_retries=1)
        with pytest.raises(EngineTimeout, match=r"no reply within 0\.05 s \(try 2 of 2\)"):
            chat(engine)
        assert engine.retries == 1


def test_a_service_that_is_not_there_is_an_engine_error() -> None:
    with serving(completion("Merova")) as server:
        address = server.base_url
    with pytest.raises(EngineError, match=r"failed: ConnectError"):
        chat(openai(address, max_retries=1))


# ---------------------------------------------------------------- faults that do not


PERMANENT = {
    "key": (refusal(401, "Incorrect API key provided: sk-secret"), r"HTTP 401: .* \*\*\*; check the key in JUDGE_KEY$"),
    "address": (refusal(404, "no such model"), "HTTP 404: no such model; check base_url and that it serves 'judge-1'"),
    "request": (refusal(400, "max_tokens is not supported"), "HTTP 400: max_tokens is not supported$"),
    "moved": (Answer(307, b"", {"Location": "http://elsewhere/v1"}), "HTTP 307: nothing$"),
    "account": (
        refusal(429, "You have no credit", code="insufficient_quota"),
        "HTTP 429: You have no credit",
    ),
    "huge": (Answer(body=b" " * (5 * 2**20)), "sent more than 4194304 bytes"),
}


@pytest.mark.parametrize(("answer", "said"), PERMANENT.values(), ids=PERMANENT.keys())
def test_what_will_not_pass_is_told_at_once(answer: Answer, said: str) -> None:
    clock = Clock()
    with serving(answer) as server:
        with pytest.raises(EngineError, match=said):
            chat(openai(server.base_url, clock, key="sk-secret", api_key_env="JUDGE_KEY"))
        assert len(server.requests) == 1 and clock.slept == []


# ---------------------------------------------------------------- settings


def test_the_request_holds_the_settings_and_the_key_only_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", " sk-secret\n")
    body = {"max_completion_tokens": 300, "response_format": {"type": "json_object"}}

    def ask(server: ChatServer) -> OpenAI:
        settings = Settings(model="judge-1", base_url=server.base_url + "/", api_key_env="JUDGE_KEY", body=body)
        engine = settings.build()
        chat(engine)
        assert "sk-secret" not in f"{settings!r} {vars(engine)['_settings']!r} {engine!r} {engine.identity}"
        return engine

    with serving(completion("Merova")) as server:
        ask(server)
        assert server.keys == ["Bearer sk-secret"]
        assert server.requests[0].keys() == {"model", "messages", *body} and server.requests[0]["model"] == "judge-1"


def test_without_a_key_none_is_sent_and_a_missing_one_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with serving(completion("Merova")) as server:
        chat(Settings(model="judge-1", base_url=server.base_url).build())
        assert server.keys == [None]
        assert server.requests[0]["temperature"] == 0
    for value, said in (("", "the environment has no JUDGE_KEY"), ("sk-\nx", "holds what no HTTP header can")):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(ConfigError, match=said):
            Settings(model="judge-1", base_url="http://h/v1", api_key_env="JUDGE_KEY").build()


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "localhost:8000/v1"},
        {"base_url": "ftp://host/v1"},
        {"base_url": "http:///v1"},
        {"body": {"messages": []}},
        {"model": ""},
        {"timeout_s": 0},
        {"key": "sk-secret"},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(**{"model": "judge-1", "base_url": "http://host/v1", **options})
