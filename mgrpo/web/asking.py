"""Asking other parts, over connections that stay open."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from mgrpo.errors import InfrastructureError

MAX_REPLY_BYTES = 256 * 2**20

_CONNECT_S = 10.0
_IDLE_S = 60.0  # an idle connection is dropped after so long, before the server drops it
_QUOTED = 300  # characters of a server's complaint that an error message repeats


class WebError(InfrastructureError):
    """A request to another part that failed; the message names the address."""


class Unreachable(WebError):
    """No connection, or it broke before the reply was complete."""


class TimedOut(WebError): ...


class Garbled(WebError):
    """The reply is too long, or no JSON of the expected shape."""


class Refused(WebError):
    """``status`` is HTTP's, ``details`` what stands beside the message, as the body's "error" has it."""

    def __init__(self, message: str, status: int, details: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.details = details


class Client:
    """Carries the token to every part it asks. ``max_bytes`` bounds a reply."""

    def __init__(self, token: str | None, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._token = token
        self._max_bytes = max_bytes
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, body: object, timeout_s: float, shape: Any = dict[str, Any]) -> Any:
        """The reply to ``body``, as a ``shape``. Raises a WebError."""
        return await self._ask("POST", url, msgspec.json.encode(body), timeout_s, shape)

    async def get(self, url: str, timeout_s: float, shape: Any = dict[str, Any]) -> Any:
        """As `post`."""
        return await self._ask("GET", url, None, timeout_s, shape)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    async def _ask(self, method: str, url: str, body: bytes | None, timeout_s: float, shape: Any) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                status, reply = await self._send(method, url, body)
        except TimeoutError as error:
            raise TimedOut(f"{url} gave no reply within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{url} cannot be reached: {type(error).__name__} {error}".rstrip()) from error
        if not 200 <= status < 300:
            raise self._refused(url, status, reply)
        try:
            return msgspec.json.decode(reply, type=shape)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Garbled(f"{url} sent a reply that does not fit: {error}") from error

    async def _send(self, method: str, url: str, body: bytes | None) -> tuple[int, bytes]:
        reply = bytearray()
        async with self._client().stream(method, url, content=body) as response:
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > self._max_bytes:
                    raise Garbled(f"{url} sent more than {self._max_bytes} bytes")
        return response.status_code, bytes(reply)

    def _client(self) -> httpx.AsyncClient:
        """Connections belong to the event loop they were opened in, and a program may run several in turn."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            self._http, self._loop = httpx.AsyncClient(**_settings(self._token)), loop
        return self._http

    def _refused(self, url: str, status: int, reply: bytes) -> Refused:
        try:
            details = msgspec.json.decode(reply, type=dict[str, dict[str, Any]])["error"]
            said = str(details["message"])
        except (msgspec.MsgspecError, ValueError, RecursionError, KeyError):
            details, said = {}, reply[: 4 * _QUOTED].decode("utf-8", "replace")
        if self._token is not None:
            said = said.replace(self._token, "***")
        said = " ".join(said.split())
        said = said if len(said) <= _QUOTED else said[:_QUOTED] + "..."
        return Refused(f"{url} answered HTTP {status}: {said or 'nothing'}", status, details)


def _settings(token: str | None) -> dict[str, Any]:
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return {
        "headers": headers,
        "timeout": httpx.Timeout(None, connect=_CONNECT_S),
        "trust_env": False,  # parts are asked directly, never through a proxy
        "transport": httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S), socket_options=_keep_alive()
        ),
    }


def _keep_alive() -> list[tuple[int, int, int]]:
    """A machine that vanished is noticed after half a minute, also while its reply is awaited."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
