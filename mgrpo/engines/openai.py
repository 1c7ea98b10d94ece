"""Any service that speaks OpenAI's ``POST /chat/completions``, over plain HTTP.

::

    200                         the reply
    408 409 425 429 5xx         tried again after Retry-After, or after 0.5 s, 1 s, 2 s, ... with jitter
    no reply, cut off, garbled  tried again
    anything else               EngineError at once: the key, the address or the request is wrong
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field, JsonValue, ValidationError, field_validator

from mgrpo.engines.chat import ChatReply
from mgrpo.errors import ConfigError, EngineError, EngineTimeout
from mgrpo.types import Message

_TRANSIENT = frozenset({408, 409, 425, 429})
_OWN_FIELDS = frozenset({"model", "messages", "stream", "n"})
_FIRST_WAIT_S = 0.5
_MAX_BYTES = 4 * 2**20  # of one reply; a grade takes a few hundred
_QUOTED = 200  # characters of a service's complaint that an error message repeats

Sleep = Callable[[float], Awaitable[None]]


class Settings(BaseModel, extra="forbid", frozen=True):
    """``base_url`` ends before "/chat/completions". ``api_key_env`` names the environment variable with the key.

    ``body`` holds the other fields of the request, sent as they are; one of your own replaces the default whole.
    ``timeout_s`` is of one try. A service that asks for a longer wait than ``longest_wait_s`` is given up.
    """

    type: Literal["openai"] = "openai"
    model: str = Field(min_length=1)
    base_url: str
    api_key_env: str | None = None
    body: dict[str, JsonValue] = {"temperature": 0, "max_tokens": 512}
    timeout_s: float = Field(default=60.0, gt=0)
    max_retries: int = Field(default=3, ge=0)
    longest_wait_s: float = Field(default=30.0, ge=0)

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            url = httpx.URL(value)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url: {error}; write it like https://host/v1") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url: {value!r} is no web address; write it like https://host/v1")
        return value.rstrip("/")

    @field_validator("body")
    @classmethod
    def _foreign_fields(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if own := _OWN_FIELDS & value.keys():
            raise ValueError(f"body: {min(own)!r} is not yours to set here; remove it")
        return value

    def build(self, **_: Any) -> OpenAI:
        """Raises ConfigError where the environment has no key."""
        if self.api_key_env is None:
            return OpenAI(self, None)
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"api_key_env: the environment has no {self.api_key_env}; export it, or remove api_key_env"
            )
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"api_key_env: {self.api_key_env} holds what no HTTP header can; export the bare key")
        return OpenAI(self, key)


@dataclass(frozen=True, slots=True)
class _Again:
    """A try that failed in a way that may pass; ``after`` is the wait in seconds that the service asked for."""

    error: EngineError
    after: float | None = None


class OpenAI:
    """A chat engine. ``sleep`` and ``jitter`` (a number in [0, 1) per wait) are handed in by tests."""

    def __init__(
        self,
        settings: Settings,
        key: str | None,
        sleep: Sleep = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.model = settings.model
        self.identity = json.dumps([settings.model, settings.body], sort_keys=True)
        self.retries = 0
        self._settings = settings
        self._url = f"{settings.base_url}/chat/completions"
        self._key = key
        self._sleep = sleep
        self._jitter = jitter
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def chat(self, messages: Sequence[Message]) -> ChatReply:
        told = [{"role": message.role, "content": message.content} for message in messages]
        request = {**self._settings.body, "model": self.model, "messages": told}
        failures = 0
        while True:
            got = await self._try(request)
            if isinstance(got, ChatReply):
                return got
            if failures == self._settings.max_retries:
                raise type(got.error)(f"{got.error} (try {failures + 1} of {failures + 1})")
            wait = got.after if got.after is not None else self._back_off(failures)
            if wait > self._settings.longest_wait_s:
                raise EngineError(f"{got.error}; it asks for a wait of {wait:g} s, longer than longest_wait_s")
            failures += 1
            self.retries += 1
            await self._sleep(wait)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    def _back_off(self, failures: int) -> float:
        """Half to all of 0.5 s, 1 s, 2 s, ..., so that callers which failed together do not come back together."""
        longest = min(_FIRST_WAIT_S * 2.0**failures, self._settings.longest_wait_s)
        return longest * (1.0 + self._jitter()) / 2

    async def _try(self, request: dict[str, Any]) -> ChatReply | _Again:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response, body = await self._post(request)
        except TimeoutError:
            return _Again(EngineTimeout(f"{self._url} gave no reply within {self._settings.timeout_s:g} s"))
        except httpx.RequestError as error:
            return _Again(EngineError(f"{self._url} failed: {type(error).__name__} {error}".rstrip()))
        if response.status_code == 200:
            return self._reply(body)
        refusal = EngineError(self._refusal(response.status_code, body))
        # Services say 429 also where the account is empty, which no waiting mends.
        if (response.status_code not in _TRANSIENT and response.status_code < 500) or b"insufficient_quota" in body:
            raise refusal
        return _Again(refusal, _retry_after(response.headers.get("retry-after"), time.time()))

    async def _post(self, request: dict[str, Any]) -> tuple[httpx.Response, bytes]:
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        body = bytearray()
        async with self._client().stream("POST", self._url, json=request, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise EngineError(f"{self._url} sent more than {_MAX_BYTES} bytes; is it a chat service?")
        return response, bytes(body)

    def _client(self) -> httpx.AsyncClient:
        """Connections belong to the event loop they were opened in, and a program may run several in turn."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            self._http, self._loop = httpx.AsyncClient(timeout=None), loop
        return self._http

    def _reply(self, body: bytes) -> ChatReply | _Again:
        try:
            read = _Completion.model_validate_json(body)
        except ValidationError:
            return _Again(EngineError(f"{self._url} sent no chat completion: {self._quote(body)}"))
        choice, usage = read.choices[0], read.usage or _Usage()
        return ChatReply(
            text=choice.message.content or "",
            complete=choice.finish_reason in ("stop", None),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _refusal(self, status: int, body: bytes) -> str:
        advice = ""
        if status in (401, 403):
            where = f"the key in {self._settings.api_key_env}" if self._key else "whether it needs a key (api_key_env)"
            advice = f"; check {where}"
        elif status == 404:
            advice = f"; check base_url and that it serves {self.model!r}"
        return f"{self._url} answered HTTP {status}: {self._quote(body)}{advice}"

    def _quote(self, body: bytes) -> str:
        """The service's words on one line, without the key."""
        try:
            text = _Complaint.model_validate_json(body).error.message
        except ValidationError:
            text = body[: 4 * _QUOTED].decode("utf-8", "replace")
        if self._key is not None:
            text = text.replace(self._key, "***")
        text = " ".join(text.split())
        return (text if len(text) <= _QUOTED else text[:_QUOTED] + "...") or "nothing"


def _retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait, from a number of seconds or an HTTP date (RFC 9110, 10.2.3); None where neither is given."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except ValueError:
        return None


# ---------------------------------------------------------------- what comes over the wire


class _Text(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Text
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class _Error(BaseModel):
    message: str


class _Complaint(BaseModel):
    error: _Error
