"""Faults that other trainers have had in what they run, and in whom they answer: the very parts of a run.

Beside these: formats by themselves (R-65) in unit/test_formats.py; the web's checks one by one, and tokens and
passwords that no message repeats (R-67) in unit/test_web.py and unit/test_store_opening.py; pickled weights and code
in model folders in unit/test_model_folder.py; that nothing in the package unpickles what it reads, or evaluates it, in
unit/test_checkpoint.py.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import pytest
from postgres import PASSWORD
from scripted_run import open_session, plan, run_to_the_end, trained_prompts
from starlette.applications import Starlette
from tiny_team import compact_chat

from mgrpo.agents.formats import Compact, Hermes
from mgrpo.cli import parts as commands
from mgrpo.engines.scripted import Scripted
from mgrpo.engines.server import routes as engine_routes
from mgrpo.errors import UserError
from mgrpo.launch import part_plans
from mgrpo.parts import serve_part, tools_part
from mgrpo.store.opening import STORE_VARIABLE
from mgrpo.tools.base import CallContext
from mgrpo.tools.server import routes as tool_routes
from mgrpo.types import ToolResult
from mgrpo.web.access import TOKEN_VARIABLE
from mgrpo.web.serving import application

TOKEN = "a-token-of-some-length"


class Rank:
    """A tool whose one argument is an array."""

    name, description = "rank", "puts in order"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"list": {"type": "array"}}, "required": ["list"]}

    def __init__(self) -> None:
        self.got: list[Mapping[str, Any]] = []

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        self.got.append(arguments)
        return ToolResult("done")


# ---------------------------------------------------------------- what a model writes


def evil(marker: Path) -> str:
    return f'__import__("os").system("touch {marker}")'


@pytest.mark.parametrize("form", ["bare", "string", "arguments"])
def test_an_array_that_is_an_expression_is_an_error_and_is_not_run(form: str, tmp_path: Path) -> None:
    """R-65: also where the arguments come as a string of JSON."""
    marker, tools = tmp_path / "marker", {"rank": Rank()}
    arguments = {
        "bare": f'{{"list": {evil(marker)}}}',
        "string": json.dumps({"list": evil(marker)}),
        "arguments": json.dumps(f'{{"list": {evil(marker)}}}'),
    }[form]
    reply = Hermes().parse(f'<tool_call>{{"name": "rank", "arguments": {arguments}}}</tool_call>', tools)
    assert reply.error is not None and not reply.calls
    assert not marker.exists()
    os.system(f"touch {marker}")
    assert marker.exists()  # what it would have done


@pytest.mark.parametrize("arguments", ['{"list": [1, 2, 3]}', json.dumps('{"list": [1, 2, 3]}')])
def test_an_array_is_an_array(arguments: str) -> None:
    """R-65."""
    reply = Hermes().parse(f'<tool_call>{{"name": "rank", "arguments": {arguments}}}</tool_call>', {"rank": Rank()})
    assert [call.arguments for call in reply.calls] == [{"list": [1, 2, 3]}]


def test_the_compact_format_hands_over_text_as_text(tmp_path: Path) -> None:
    """R-65."""
    marker = tmp_path / "marker"
    reply = Compact().parse(f"<call> rank {evil(marker)} </call>", {"rank": Rank()})
    assert [call.arguments for call in reply.calls] == [{"list": [evil(marker)]}] and not marker.exists()


# ---------------------------------------------------------------- who asks a part


def engine_app(token: str | None = TOKEN) -> Starlette:
    engine = Scripted(lambda request: "<answer> Merova </answer>", compact_chat().encode_reply)
    status = {"version": 0, "instance": "i", "state": ""}
    return application(engine_routes(engine, "planner", lambda: status), token)


def tool_app(token: str | None = TOKEN) -> Starlette:
    return application(tool_routes({"rank": Rank()}, 2**20), token)


APPS = {"engine": engine_app, "tools": tool_app}
PATHS = {
    "engine": ("/v1/completions", "/release", "/health", "/v1/models", "/nothing", "/"),
    "tools": ("/call", "/corpora", "/nothing", "/"),
}


def ask(app: Starlette, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
            return [await client.request(method, path, **options) for method, path, options in requests]

    return asyncio.run(main())


def bearing(token: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **headers}


@pytest.mark.parametrize("part", APPS)
def test_no_endpoint_of_a_part_answers_without_the_token(part: str) -> None:
    """R-67: 401 for every path and method, whether it exists or not, and nothing else is told."""
    headers: Sequence[dict[str, str]] = [{}, bearing(""), bearing(TOKEN[:-1]), bearing(TOKEN + "x"), {"X-Token": TOKEN}]
    methods = ("GET", "POST", "PUT", "DELETE", "OPTIONS")
    requests = [(m, path, {"headers": h, "json": {}}) for m in methods for path in PATHS[part] for h in headers]
    answers = ask(APPS[part](), *requests)
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1 and TOKEN not in answers[0].text
    known = ask(APPS[part](), *[(m, path, {"headers": bearing(TOKEN), "json": {}}) for m, path, _ in requests])
    assert 401 not in {answer.status_code for answer in known}


class Trap:
    """What runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("part", APPS)
def test_no_endpoint_of_a_part_opens_a_pickle(part: str, tmp_path: Path) -> None:
    """R-67."""
    marker = tmp_path / "marker"
    content = pickle.dumps(Trap(marker))
    types = {"application/octet-stream": 415, "application/x-pickle": 415, "application/json": 400}
    posts = [path for path in PATHS[part] if path in ("/v1/completions", "/release", "/call", "/corpora")]
    requests = [
        ("POST", path, {"headers": bearing(TOKEN, **{"Content-Type": type}), "content": content})
        for path in posts
        for type in types
    ]
    assert [answer.status_code for answer in ask(APPS[part](), *requests)] == [*types.values()] * len(posts)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # the trap works


def test_an_expression_reaches_a_tool_over_the_net_as_text(tmp_path: Path) -> None:
    """R-65."""
    rank, marker = Rank(), tmp_path / "marker"
    task = {"id": "t", "question": "q"}
    context = {"id": "g0/r0/planner/0", "turn": 0, "call": 0, "task": task, "seed": 0, "corpus": None}
    sent = {"tool": "rank", "arguments": {"list": evil(marker)}, "context": context}
    app = application(tool_routes({"rank": rank}, 2**20), TOKEN)
    (answer,) = ask(app, ("POST", "/call", {"headers": bearing(TOKEN), "json": sent}))
    assert answer.status_code == 200 and rank.got == [{"list": evil(marker)}] and not marker.exists()


# ---------------------------------------------------------------- where a part listens, and what it shows


@pytest.mark.parametrize("command", [commands.serve, commands.tools])
def test_a_part_listens_on_loopback_unless_it_is_told_otherwise(command: Any) -> None:
    """R-67."""
    assert inspect.signature(command).parameters["host"].default.default == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_without_a_token_a_part_listens_nowhere_else(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-67: refused before a run folder is made or a model read."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = plan(tmp_path, 4)
    with pytest.raises(UserError, match=f"export {TOKEN_VARIABLE}"):
        serve_part(config, tmp_path / "run", "planner", "serve-planner-0", host, 0)
    with pytest.raises(UserError, match=f"export {TOKEN_VARIABLE}"):
        tools_part(config, tmp_path / "run", "tools-0", host, 0)
    assert not (tmp_path / "run").exists()


def test_neither_a_password_nor_a_token_is_in_a_run_folder_a_log_or_the_list_of_processes(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R-67: a run over PostgreSQL whose address comes by the environment, and the commands that `launch` starts."""
    monkeypatch.setenv(STORE_VARIABLE, postgres_url)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    caplog.set_level(logging.DEBUG)
    secrets = [TOKEN, PASSWORD, quote(PASSWORD, safe=""), quote_plus(PASSWORD), json.dumps(PASSWORD)[1:-1]]
    assert any(secret in postgres_url for secret in secrets)
    config = plan(tmp_path, 4, stage={"steps": 2, "groups_per_step": 2})
    with open_session(config, tmp_path / "run") as session:
        run_to_the_end(session)
        assert sorted(trained_prompts(session.store)) == ["0", "1", "2", "3"]
        shown = [repr(session.store), repr(session.store.run), repr(session.config)]
    plans = part_plans(config, tmp_path / "run")
    shown += [word for part in plans for word in part.argv] + [record.getMessage() for record in caplog.records]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "config.toml" for path in files) and any("serve" in word for word in shown)
    shown += [path.read_bytes().decode("utf-8", "replace") for path in files]
    assert not [text for text in shown for secret in secrets if secret in text]
