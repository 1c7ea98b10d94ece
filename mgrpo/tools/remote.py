"""Tools that run in tool servers: the same names, the same results. The answering half is tools/server.py.

::

    a call        goes to one server; calls of one question on one corpus go to the same one while it lives
    409           the server lacks the corpus: it is sent, once however many calls wait for it, and the call repeated
    unreachable   or stopping: the next server; when none is left they are asked again after 0.1 s, 0.2 s, ... 1 s,
                  until the call's deadline, so that a restart of a server is a pause. A call that broke off half-way
                  runs again
    anything else ends the call
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mgrpo.errors import ConfigError, ToolError, ToolTimeout, UserError
from mgrpo.tools.base import CallContext, Tool
from mgrpo.tools.wire import call_body, corpus_body
from mgrpo.types import Corpus, ToolResult
from mgrpo.web.asking import Client, Refused, TimedOut, Unreachable, WebError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0

# What tools raise on purpose, by the name under which a server reports it.
_RAISED: Mapping[str, type[Exception]] = {kind.__name__: kind for kind in (ToolError, ToolTimeout, ConfigError)}


class ToolServers:
    """The tool servers of a run: ``urls()`` names the living ones, ``client`` carries the token."""

    def __init__(self, urls: Callable[[], Sequence[str]], client: Client) -> None:
        self._urls = urls
        self._client = client
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}  # by server and corpus

    async def call(self, tool: str, arguments: Mapping[str, Any], context: CallContext, timeout_s: float) -> ToolResult:
        """The result of one call.

        Raises what the tool raised, ToolError for a server's refusal, ToolTimeout where no server answered within
        ``timeout_s`` seconds, UserError where the servers want another token or cannot hold the corpus.
        """
        body = call_body(tool, arguments, context)
        trouble: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                return await self._persist(body, context, timeout_s, trouble)
        except TimeoutError as error:
            why = trouble[-1] if trouble else "the call was running"
            raise ToolTimeout(f"tool {tool} of {context.id} gave no result after {timeout_s:g} s: {why}") from error

    async def _persist(
        self, body: msgspec.Raw, context: CallContext, timeout_s: float, trouble: list[str]
    ) -> ToolResult:
        pause = FIRST_PAUSE_S
        while True:
            urls = _ranked(self._urls(), context)
            for url in urls:
                try:
                    return await self._ask(url, body, context.corpus, timeout_s)
                except (Unreachable, TimedOut) as error:
                    trouble.append(str(error))
                except Refused as error:
                    if not _passes(error):
                        raise _as_raised(error) from error
                    trouble.append(str(error))
                except WebError as error:
                    raise ToolError(str(error)) from error
            if not urls:
                trouble.append("no tool server is running")
            del trouble[:-1]
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _ask(self, url: str, body: msgspec.Raw, corpus: Corpus | None, timeout_s: float) -> ToolResult:
        try:
            found: ToolResult = await self._client.post(f"{url}/call", body, timeout_s, ToolResult)
        except Refused as error:
            if corpus is None or not _lacks_corpus(error):
                raise
            await self._send(url, corpus, timeout_s)
            found = await self._client.post(f"{url}/call", body, timeout_s, ToolResult)
        return found

    async def _send(self, url: str, corpus: Corpus, timeout_s: float) -> None:
        """Send ``corpus``, or wait for whoever is sending it. A caller that gives up does not stop the others."""
        key = url, corpus.name
        if key not in self._sending:
            task = self._sending[key] = asyncio.create_task(self._upload(url, corpus, timeout_s))
            task.add_done_callback(lambda task: self._sent(key, task))
        await asyncio.shield(self._sending[key])

    def _sent(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._sending[key]
        if not task.cancelled():
            task.exception()  # raised where calls wait for it; there may be none left

    async def _upload(self, url: str, corpus: Corpus, timeout_s: float) -> None:
        try:
            await self._client.post(f"{url}/corpora", corpus_body(corpus), timeout_s)
        except Refused as error:
            if error.status != 413:
                raise
            raise ConfigError(f"corpus {corpus.name!r} is too large for tool servers: {error}") from error


class RemoteTool:
    """``local``, run by ``servers``: same name, description and parameters. ``timeout_s`` bounds a call with waits."""

    def __init__(self, local: Tool, servers: ToolServers, timeout_s: float) -> None:
        self.name = local.name
        self.description = local.description
        self.parameters = local.parameters
        self._servers = servers
        self._timeout_s = timeout_s

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        return await self._servers.call(self.name, arguments, context, self._timeout_s)


def _ranked(urls: Sequence[str], context: CallContext) -> list[str]:
    """The order in which a call tries servers, by rendezvous hashing: one that leaves moves its own calls only.

    Calls on one corpus meet at one server, which then indexes it alone, unless many questions share the corpus.
    """
    key = f"{context.corpus.name if context.corpus else ''}/{context.id.group}"
    return sorted(urls, key=lambda url: hashlib.blake2b(f"{url}/{key}".encode(), digest_size=8).digest())


def _lacks_corpus(error: Refused) -> bool:
    return error.status == 409 and error.details.get("need") == "corpus"


def _passes(error: Refused) -> bool:
    """Stopping, or so short of room that the corpus just sent is gone again."""
    return error.status == 503 or _lacks_corpus(error)


def _as_raised(error: Refused) -> Exception:
    """What the tool itself raised, with its own words; else what the refusal means."""
    if error.status == 500 and (kind := _RAISED.get(str(error.details.get("type")))):
        return kind(str(error.details.get("message")))
    return UserError(str(error)) if error.status in (401, 403) else ToolError(str(error))
