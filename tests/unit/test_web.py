"""Who may ask a part over HTTP, what it refuses, and what its clients say when it fails: real connections."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from web_server import TOKEN, served

from mgrpo.errors import EngineError, UserError
from mgrpo.web.access import TOKEN_VARIABLE, check_binding, token
from mgrpo.web.asking import Client, Garbled, Refused, TimedOut, Unreachable
from mgrpo.web.serving import Refusal, application, get, post, serve


class Sum(msgspec.Struct, forbid_unknown_fields=True):
    terms: list[int]


async def add(asked: Sum) -> object:
    return {"sum": sum(asked.terms)}


async def break_down(asked: Sum) -> object:
    raise EngineError("no engine\nat all") if asked.terms else ZeroDivisionError(f"a secret {TOKEN}")


async def lack(asked: Sum) -> object:
    raise Refusal(409, "no such corpus here", need="corpus")


def some_app(token: str | None = TOKEN, max_bytes: int = 1000) -> Starlette:
    routes = [post("/add", Sum, add), post("/break", Sum, break_down), post("/lack", Sum, lack)]
    return application([*routes, get("/health", lambda: {"state": ""})], token, max_bytes)


def with_server(app: Starlette, ask: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with served(app) as url:
            return await ask(url)

    return asyncio.run(main())


def answer(method: str, path: str, app: Starlette | None = None, **request: Any) -> httpx.Response:
    """What a plain HTTP client is told; the token is sent unless ``headers`` has an Authorization."""

    async def ask(url: str) -> httpx.Response:
        request["headers"] = {"Authorization": f"Bearer {TOKEN}", **request.get("headers", {})}
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.request(method, url + path, **request)

    return with_server(app or some_app(), ask)


def message(response: httpx.Response) -> str:
    (error,) = response.json().values()
    assert error["code"] == response.status_code
    assert "\n" not in error["message"]
    return str(error["message"])


# ---------------------------------------------------------------- who may ask


ROUTES = [("POST", "/add"), ("GET", "/health"), ("GET", "/no"), ("PUT", "/add"), ("DELETE", "/"), ("OPTIONS", "/add")]


@pytest.mark.parametrize(
    "held", [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN]
)
def test_nothing_is_told_without_the_token(held: str | None) -> None:
    async def ask(url: str) -> list[httpx.Response]:
        headers = {} if held is None else {"Authorization": held}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
            return [await http.request(method, url + path, json={"terms": [1]}) for method, path in ROUTES]

    for response in with_server(some_app(), ask):
        assert response.status_code == 401
        assert TOKEN not in response.text
        assert TOKEN_VARIABLE in message(response)
        assert "server" not in response.headers


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert answer("GET", "/health").status_code == 200
    assert answer("GET", "/health", headers={"Authorization": "é".encode()}).status_code == 401
    assert compared == [{f"Bearer {TOKEN}".encode()}, {f"Bearer {TOKEN}".encode(), "é".encode()}]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.1.2.3", "example.org", "127.0.0.1.example.org"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(UserError, match=f"export {TOKEN_VARIABLE}"):
        check_binding(host, None)
    with pytest.raises(UserError, match=f"export {TOKEN_VARIABLE}"):
        asyncio.run(serve(some_app(None), host, 0, print))
    check_binding(host, TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback_needs_none(host: str) -> None:
    check_binding(host, None)


HOSTS = {"localhost:80": 200, "127.0.0.1": 200, "[::1]:80": 200, "evil.example": 403, "127.0.0.1.evil": 403, "": 403}


def test_without_a_token_a_name_that_was_pointed_to_loopback_is_refused() -> None:
    async def ask(url: str) -> dict[str, int]:
        async with httpx.AsyncClient(trust_env=False) as http:
            return {host: (await http.get(url + "/health", headers={"Host": host})).status_code for host in HOSTS}

    assert with_server(some_app(None), ask) == HOSTS


@pytest.mark.parametrize(
    "bad", ["tiny-one", "a token of many words", "päßword-of-some-length", "tab\tin-the-middle-of"]
)
def test_a_token_that_is_no_good_is_refused_without_being_told(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, bad)
    with pytest.raises(UserError, match=TOKEN_VARIABLE) as refused:
        token()
    assert bad not in str(refused.value)


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, f" {TOKEN}\n")
    assert token() == TOKEN
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    assert token() is None


def test_the_token_is_in_no_message_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def ask(url: str) -> list[str]:
        said = []
        for held, path, body in (
            (TOKEN, "/break", {"terms": []}),
            (TOKEN, "/add", {"terms": TOKEN}),
            (TOKEN, f"/{TOKEN}", {}),
            (TOKEN + "x", "/add", {}),
        ):
            with pytest.raises(Refused) as refused:
                await Client(held).post(url + path, body, 5)
            said.append(str(refused.value).replace(url + path, ""))
        return said

    said = with_server(some_app(), ask)
    assert not any(TOKEN in text for text in said), said
    ours = [r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]  # the client's own
    assert not any(TOKEN in text for text in ours)
    assert not any("Authorization: Bearer" in r.getMessage() for r in caplog.records)


# ---------------------------------------------------------------- what they may send


class Trap:
    """What runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/octet-stream", 415),
        ("application/python-pickle", 415),
        ("text/plain", 415),  # what a web page may send here without being asked first
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
        ("application/json", 400),
    ],
)
def test_a_pickle_is_refused_and_never_opened(kind: str, status: int, tmp_path: Path) -> None:
    content = pickle.dumps(Trap(tmp_path / "marker"))
    assert answer("POST", "/add", content=content, headers={"Content-Type": kind}).status_code == status
    assert not (tmp_path / "marker").exists()
    pickle.loads(content)
    assert (tmp_path / "marker").exists()  # the trap works


JSON = {"Content-Type": "application/json; charset=utf-8"}


def test_json_that_does_not_fit_is_refused_in_one_line() -> None:
    bad = {
        b"{": "Input data was truncated",
        b"[]": "Expected `object`",
        b'{"terms": [1, "2"]}': "Expected `int`, got `str` - at `$.terms[1]`",
        b'{"terms": [1], "turms": 2}': "unknown field `turms`",
        b"{}": "missing required field `terms`",
        b'{"terms": ["\xff"]}': "/add: ",
        b"[" * 900: "/add: ",
    }

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {TOKEN}", **JSON}) as http:
            return [await http.post(url + "/add", content=body) for body in bad]

    for response, said in zip(with_server(some_app(), ask), bad.values(), strict=True):
        assert response.status_code == 400
        assert said in message(response)


def test_too_much_is_refused_whether_or_not_its_length_is_told() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"terms": ['
        for _ in range(20):
            yield b"1, " * 100
        yield b"1]}"

    fits = json.dumps({"terms": [1] * 300}).encode()
    assert answer("POST", "/add", content=fits, headers=JSON).json() == {"sum": 300}
    for content in (fits + b" " * 200, chunks()):
        response = answer("POST", "/add", content=content, headers=JSON)
        assert (response.status_code, message(response)) == (413, "this part reads at most 1000 bytes at a time")


# ---------------------------------------------------------------- answers and their clients


def ask_add(url: str, *terms: int, path: str = "/add", held: str = TOKEN, **options: Any) -> Any:
    return Client(held, **options).post(url + path, {"terms": terms}, 5)


def test_a_client_reads_what_it_expects() -> None:
    assert with_server(some_app(), lambda url: ask_add(url, 1, 2)) == {"sum": 3}
    assert with_server(some_app(), lambda url: Client(TOKEN).get(url + "/health", 5, dict[str, str])) == {"state": ""}
    with pytest.raises(Garbled, match="/add sent a reply that does not fit: Object contains unknown field `sum`"):
        with_server(some_app(), lambda url: Client(TOKEN).post(url + "/add", {"terms": []}, 5, Sum))
    with pytest.raises(Garbled, match="/add sent more than 5 bytes"):
        with_server(some_app(), lambda url: ask_add(url, 1, 2, max_bytes=5))


def test_refusals_carry_their_status_their_line_and_their_details() -> None:
    with pytest.raises(Refused, match="/lack answered HTTP 409: no such corpus here$") as refused:
        with_server(some_app(), lambda url: ask_add(url, path="/lack"))
    assert (refused.value.status, refused.value.details["need"]) == (409, "corpus")
    with pytest.raises(Refused, match="/break answered HTTP 500: no engine at all$") as refused:
        with_server(some_app(), lambda url: ask_add(url, 1, path="/break"))
    assert refused.value.details["type"] == "EngineError"
    with pytest.raises(Refused, match="/nowhere answered HTTP 404: Not Found$"):
        with_server(some_app(), lambda url: ask_add(url, path="/nowhere"))
    with pytest.raises(Refused, match="/health answered HTTP 405"):
        with_server(some_app(), lambda url: ask_add(url, path="/health"))


def test_a_bug_is_a_traceback_here_and_its_name_there(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Refused, match="HTTP 500: ZeroDivisionError, see the log of this part$"):
        with_server(some_app(), lambda url: ask_add(url, path="/break"))
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


def test_who_is_not_there_is_unreachable() -> None:
    url = with_server(some_app(), lambda url: asyncio.sleep(0, url))
    with pytest.raises(Unreachable, match=f"{url}/add cannot be reached: ConnectError"):
        asyncio.run(ask_add(url))
    with pytest.raises(Unreachable, match="cannot be reached"):
        asyncio.run(ask_add("nonsense"))


def test_a_connection_that_breaks_is_unreachable() -> None:
    async def main() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            writer.close()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            await ask_add(f"http://{host}:{port}")

    with pytest.raises(Unreachable, match="/add cannot be reached: RemoteProtocolError"):
        asyncio.run(main())


class Work:
    """A handler that does not come to an end, and notes how it ended."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Sum) -> object:
        self.began.set()
        try:
            return await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_a_client_that_gives_up_says_when_and_ends_the_work() -> None:
    async def main() -> None:
        work = Work()
        async with served(application([post("/work", Sum, work)], TOKEN)) as url:
            with pytest.raises(TimedOut, match=f"{url}/work gave no reply within 0.2 s"):
                await Client(TOKEN).post(url + "/work", {"terms": []}, 0.2)
            await asyncio.wait_for(work.cancelled.wait(), 5)

    asyncio.run(main())


def test_a_part_that_stops_says_so_to_whom_it_works_for() -> None:
    async def main() -> None:
        work = Work()
        async with served(application([post("/work", Sum, work)], TOKEN)) as url:
            asked = asyncio.create_task(Client(TOKEN).post(url + "/work", {"terms": []}, 20))
            await work.began.wait()
        with pytest.raises(Refused, match="HTTP 503: this part is stopping") as refused:
            await asyncio.wait_for(asked, 5)
        assert refused.value.status == 503 and work.cancelled.is_set()

    asyncio.run(main())


def test_a_client_serves_one_event_loop_after_another() -> None:
    client = Client(TOKEN)
    for _ in range(2):
        assert with_server(some_app(), lambda url: client.post(url + "/add", {"terms": [1]}, 5)) == {"sum": 1}
    asyncio.run(client.close())


def test_a_connection_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        opened = 0
        app = some_app()
        async with served(app) as url:
            loop = asyncio.get_running_loop()
            create = loop.create_connection

            async def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal opened
                opened += 1
                return await create(*arguments, **options)

            monkeypatch.setattr(loop, "create_connection", counted)
            client = Client(TOKEN)
            for _ in range(5):
                await client.post(url + "/add", {"terms": [1]}, 5)
            await client.close()
        assert opened == 1

    asyncio.run(main())


def test_a_taken_port_and_a_foreign_address_are_told() -> None:
    async def ask(url: str) -> None:
        await serve(some_app(), "127.0.0.1", int(url.rpartition(":")[2]), print)

    with pytest.raises(UserError, match=r"cannot listen on 127.0.0.1:\d+ \(Address already in use\); choose"):
        with_server(some_app(), ask)
    with pytest.raises(UserError, match="cannot listen on 192.0.2.1:0"):
        asyncio.run(serve(some_app(), "192.0.2.1", 0, print))


def test_the_address_told_can_be_asked() -> None:
    async def main(host: str) -> str:
        async with served(some_app(), host) as url:
            assert await ask_add(url, 4) == {"sum": 4}
            return url.rpartition(":")[0]

    assert asyncio.run(main("127.0.0.1")) == "http://127.0.0.1"
    assert asyncio.run(main("localhost")) == "http://localhost"


@pytest.mark.parametrize(
    ("module", "absent"),
    [("mgrpo.web.asking", ["uvicorn", "starlette", "torch"]), ("mgrpo.web.serving", ["httpx", "torch"])],
)
def test_each_end_loads_no_more_than_its_own_library(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert result.stdout.strip() == "[]", result.stderr
