"""What answers at a part's address, and may be asked by whom.

::

    401 without the token · 403 for a foreign Host · 415 for what is not JSON · 413 for too much of it
    408 for a body that does not arrive · 400 for JSON that does not fit · 503 while the part stops

Every refusal is ``{"error": {"message": one line, "type": ..., "code": status}}``. A caller that hangs up cancels its
request, and a part that stops answers 503 to what it was working on.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mgrpo.errors import MgrpoError, UserError
from mgrpo.web.access import TOKEN_VARIABLE, check_binding, is_loopback

MAX_REQUEST_BYTES = 64 * 2**20

_BODY_S = 60.0  # for a request's body to arrive
_STOP_S = 3  # for the answers that say that this part is stopping to be sent
_IDLE_S = 120  # longer than clients keep an idle connection, so that none breaks as it is used again

T = TypeVar("T")


# ---------------------------------------------------------------- what a part answers


class Refusal(HTTPException):
    """What a handler raises to answer with an error. ``details`` are further fields beside its message."""

    def __init__(self, status: int, message: str, **details: Any) -> None:
        super().__init__(status, message)
        self.details = details


class Json(Response):
    """Any value that msgspec encodes. A handler that returns a plain value answers 200 with it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def post(path: str, shape: type[T], answer: Callable[[T], Coroutine[Any, Any, object]]) -> Route:
    """A route whose body is JSON of this ``shape``; ``answer`` is cancelled when the caller hangs up."""
    decode = msgspec.json.Decoder(shape).decode

    async def endpoint(request: Request) -> Response:
        body = await _body(request)
        try:
            asked = decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refusal(400, f"{path}: {error}") from error
        return await _while_awaited(request, answer(asked))

    return Route(path, endpoint, methods=["POST"])


def get(path: str, answer: Callable[[], object]) -> Route:
    """A route without parameters."""

    async def endpoint(_: Request) -> Response:
        return _response(answer())

    return Route(path, endpoint, methods=["GET"])


def application(routes: Sequence[Route], token: str | None, max_bytes: int = MAX_REQUEST_BYTES) -> Starlette:
    """A web application of these routes behind the checks at the top of this file. ``max_bytes`` is of one request."""
    app = Starlette(
        routes=list(routes),
        middleware=[Middleware(_Guard, token=token, max_bytes=max_bytes)],
        exception_handlers={HTTPException: _refused, MgrpoError: _failed, Exception: _bug},
    )
    app.state.token = token
    app.state.running = set()  # what is being worked on
    app.state.stopping = False
    return app


class _Guard:
    def __init__(self, app: ASGIApp, token: str | None, max_bytes: int) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, dict(scope["headers"]))
        if refusal is not None:
            await _error(refusal.status_code, refusal.detail)(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        if self._expected is not None:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
                return Refusal(401, f"this part needs its token: export {TOKEN_VARIABLE}, the same as here")
        elif not is_loopback(_host_name(headers.get(b"host", b""))):  # a page whose name was pointed here
            return Refusal(403, "without a token this part answers to loopback names only, such as 127.0.0.1")
        if scope["app"].state.stopping:
            return Refusal(503, "this part is stopping")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                return Refusal(415, "this part reads application/json only")
        length = headers.get(b"content-length", b"0")
        return self._too_much() if not length.isdigit() or int(length) > self._max_bytes else None

    def _limited(self, receive: Receive) -> Receive:
        """Counts what arrives: a chunked body does not say how long it will be."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_much()
            return message

        return limited

    def _too_much(self) -> Refusal:
        return Refusal(413, f"this part reads at most {self._max_bytes} bytes at a time")


def _host_name(header: bytes) -> str:
    """A Host header without its port."""
    text = header.decode("latin-1")
    return text.partition("]")[0] if text.startswith("[") else text.partition(":")[0]


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.body()
    except TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {_BODY_S:g} s") from error
    except ClientDisconnect as error:
        raise Refusal(400, "the caller hung up") from error


async def _while_awaited(request: Request, work: Coroutine[Any, Any, object]) -> Response:
    """The answer that ``work`` comes to, unless its caller hangs up first or this part stops."""
    running: set[asyncio.Task[object]] = request.app.state.running
    task = asyncio.create_task(work)
    hung_up = asyncio.create_task(_hung_up(request))
    running.add(task)
    try:
        await asyncio.wait({task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.discard(task)
        hung_up.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise Refusal(503, "this part is stopping")
    return _response(task.result())


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(value: object) -> Response:
    return value if isinstance(value, Response) else Json(value)


def _error(status: int, message: str, kind: str = "", details: Mapping[str, Any] | None = None) -> Json:
    body = {"message": " ".join(message.split()), "type": kind or "Refusal", "code": status, **(details or {})}
    return Json({"error": body}, status, {"Connection": "close"} if status == 408 else None)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, details=getattr(error, "details", None))


def _failed(_: Request, error: Exception) -> Response:
    return _error(500, str(error), type(error).__name__)


def _bug(_: Request, error: Exception) -> Response:
    """Starlette raises ``error`` again behind this answer, so its traceback reaches the log."""
    return _error(500, f"{type(error).__name__}, see the log of this part", type(error).__name__)


# ---------------------------------------------------------------- listening


class _Server(uvicorn.Server):
    """``ready`` is called once it listens. Signals are left to the process that it runs in."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._ready()


async def serve(app: Starlette, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Answer at ``host`` until cancelled; what is worked on then is answered with 503, and it ends within seconds.

    Port 0 picks a free one. ``ready`` gets the address; where ``host`` means every address, this machine's name is in
    it. Raises UserError where it may not or cannot listen there.
    """
    check_binding(host, app.state.token)
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_STOP_S,
    )
    server = _Server(config, lambda: ready(_url(host, listener)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        app.state.stopping = server.should_exit = True
        for task in app.state.running:
            task.cancel()
        await asyncio.wait({serving}, timeout=2 * _STOP_S)
        raise
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family)
        # Connections inherit it; asyncio sets it only on sockets that name their protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise UserError(f"cannot listen on {host}:{port} ({reason}); choose another host or port") from error


def _url(host: str, listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        name = socket.gethostname()
    else:
        name = host if not host[:1].isdigit() and ":" not in host else address
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
