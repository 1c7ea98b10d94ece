"""Every tool gives in a tool server what it gives in this process: over real connections, through outages."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_team import agent, says
from web_server import TOKEN, served

from mgrpo.agents.loop import Episode, run
from mgrpo.agents.scheduler import Lockstep
from mgrpo.errors import ConfigError, MgrpoError, ToolError, ToolTimeout, UserError
from mgrpo.tools import search, visit
from mgrpo.tools.base import CallContext, Tool
from mgrpo.tools.remote import RemoteTool, ToolServers
from mgrpo.tools.server import routes
from mgrpo.types import Corpus, Failure, Page, Task, ToolResult, TrajectoryId
from mgrpo.web.asking import Client
from mgrpo.web.serving import application
from mgrpo.worlds.pages import corpus_of
from mgrpo.worlds.world import WorldConfig, build_world

QUERY: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
PLENTY = 2**24  # bytes of corpora
TASK = Task("t", "wer, was, wo ?", None, 2, {"n": 10**30, "nested": [{"a": None}], "text": "caf\u00e9"})


def world(name: str, **knobs: Any) -> Corpus:
    return corpus_of(build_world(WorldConfig(**knobs), "train", "0"), name)


PAGES = [
    Page("u/tarn", "Tarn", "Tarn is a peak in Zubora.", ("u/zubora",)),
    Page("u/zubora", "Zubora", "Zubora: a country \u2013 \u201cpeaks\u201d\n\x00 and \U0001f3d4."),
    Page("u/also", "Tarn", "Tarn is a peak in Zubora."),  # a tie, which the order of the corpus decides
    Page("u/gone", "Lorn", ""),
]
SMALL = Corpus("small", {page.url: page for page in PAGES})
CORPORA = (
    SMALL,
    world("world"),
    world("prose", names="syllables", style="prose"),
    world("faults", failing_tools=0.5, shuffle_hits=True, dead_links=0.2),
    None,
)
ARGUMENTS: Sequence[Mapping[str, Any]] = [
    {"query": "Tarn", "url": "u/tarn"},
    {"query": ["Tarn", "peak Zubora"], "url": ["u/zubora", "u/nowhere", "u/gone"]},
    {"query": "", "url": []},
    {"query": None, "url": {"a": [1, 2.5, 10**30]}},
    {"query": "\u00e9 \x00 <call>", "url": "\U0001f3d4"},
    {},
]


def context(corpus: Corpus | None = None, group: int = 0, turn: int = 0) -> CallContext:
    return CallContext(TrajectoryId(group, 1, "searcher", 2), turn, 0, TASK, corpus, seed=7)


async def outcome(call: Awaitable[ToolResult]) -> ToolResult | tuple[type[Exception], str]:
    try:
        return await call
    except MgrpoError as error:
        return type(error), str(error)


class Echo:
    """Says what reached it, after ``seconds``; ``asked`` counts."""

    name, description, parameters = "echo", "repeats", QUERY

    def __init__(
        self, say: Callable[[Mapping[str, Any], CallContext], object] = lambda own, _: own, seconds: float = 0.0
    ) -> None:
        self.asked = 0
        self._say = say
        self._seconds = seconds

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        self.asked += 1
        await asyncio.sleep(self._seconds)
        said = self._say(arguments, context)
        return said if isinstance(said, ToolResult) else ToolResult(str(said))


class Traffic:
    """An application that counts its requests by path; ``answers`` replace what it would answer, one each."""

    def __init__(self, *tools: Tool, max_corpora_bytes: int = PLENTY, token: str | None = None, **limits: int) -> None:
        self._app = application(routes({tool.name: tool for tool in tools}, max_corpora_bytes), token, **limits)
        self.paths: list[str] = []
        self.state = self._app.state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope.get("path", ""))
        scope["app"] = self._app
        await self._app(scope, receive, send)


@asynccontextmanager
async def remote(
    tool: Tool, *apps: Any, timeout_s: float = 10.0, token: str | None = None
) -> AsyncIterator[tuple[RemoteTool, list[str]]]:
    """``tool`` on a server for each of ``apps``, and their addresses; the list is what the client sees as alive."""
    client = Client(token)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(app)) for app in apps]
        stack.push_async_callback(client.close)
        yield RemoteTool(tool, ToolServers(lambda: urls, client), timeout_s), urls


# ---------------------------------------------------------------- the same results


def asked_of(corpus: Corpus | None) -> list[Mapping[str, Any]]:
    """`ARGUMENTS`, and some of the corpus's own titles and addresses, together and one by one."""
    pages = [] if corpus is None else random.Random(0).sample(list(corpus.pages.values()), 4)
    own = [{"query": page.title, "url": page.url} for page in pages]
    return [*ARGUMENTS, *own, {"query": [page.title for page in pages], "url": [page.url for page in pages]}]


@pytest.mark.parametrize("style", ["compact", "prose"])
@pytest.mark.parametrize("kind", [search, visit], ids=["search", "visit"])
def test_results_are_those_of_the_local_tool(kind: Any, style: str) -> None:
    local = kind.Settings(style=style).build()

    async def main() -> None:
        async with remote(local, Traffic(kind.Settings(style=style).build())) as (tool, _):
            assert (tool.name, tool.description, tool.parameters) == (local.name, local.description, local.parameters)
            for corpus in CORPORA:
                for turn, arguments in enumerate(asked_of(corpus)):
                    own = context(corpus, turn=turn)
                    assert await outcome(tool(arguments, own)) == await outcome(local(arguments, own)), arguments

    asyncio.run(main())


def test_everything_about_a_call_reaches_the_tool() -> None:
    def say(arguments: Mapping[str, Any], own: CallContext) -> object:
        seen.append((dict(arguments), own))
        return ToolResult("x", "an error", Failure("ToolError", "as a value"))

    seen: list[Any] = []
    arguments = {"query": [10**30, -1.5, None, True, {"deep": ["\u00e9", "\x00"]}]}

    async def main() -> None:
        own = context(SMALL, group=3, turn=4)
        async with remote(Echo(), Traffic(Echo(say))) as (tool, _):
            assert await tool(arguments, own) == ToolResult("x", "an error", Failure("ToolError", "as a value"))
        assert seen == [(arguments, own)]
        assert dict(seen[0][1].corpus.pages) == dict(own.corpus.pages)  # type: ignore[union-attr]
        assert list(seen[0][1].corpus.pages) == [page.url for page in PAGES]

    asyncio.run(main())


def test_what_no_utf8_can_hold_arrives_as_agents_read_it() -> None:
    half = Corpus("half", {"u": Page("u", "Tarn", "half \ud83c of a pair")})

    async def main() -> None:
        async with remote(visit.Settings().build(), Traffic(visit.Settings().build())) as (tool, _):
            assert (await tool({"url": "u"}, context(half))).text == "half ? of a pair"

    asyncio.run(main())


@pytest.mark.parametrize("kind", [ToolError, ToolTimeout, ConfigError])
def test_what_a_tool_raises_on_purpose_is_raised_here(kind: type[Exception]) -> None:
    def broken(arguments: object, context: object) -> object:
        raise kind("the index is gone; rebuild it")

    async def main() -> None:
        async with remote(Echo(), Traffic(Echo(broken))) as (tool, _):
            assert await outcome(tool({}, context())) == (kind, "the index is gone; rebuild it")

    asyncio.run(main())


# ---------------------------------------------------------------- nothing is evaluated, nothing unasked gets in


def test_source_code_is_text_to_a_tool_and_no_request_to_a_server(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    source = f'__import__("os").system("touch {marker}")'

    async def main() -> None:
        async with remote(Echo(lambda a, _: a["query"]), Traffic(Echo(lambda a, _: a["query"]))) as (tool, urls):
            assert (await tool({"query": source}, context())).text == source
            async with httpx.AsyncClient(trust_env=False) as http:
                for bad in (source, f'{{"tool": "echo", "arguments": {source}}}', '{"tool": "echo"}', "[1, 2, 3]"):
                    kind = {"Content-Type": "application/json"}
                    refused = await http.post(f"{urls[0]}/call", content=bad, headers=kind)
                    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("/call: ")

    asyncio.run(main())
    assert not marker.exists()


def test_refusals_are_tool_errors_with_the_servers_line_and_a_missing_token_ends_the_run() -> None:
    async def main() -> None:
        async with remote(Echo(), Traffic(visit.Settings().build())) as (tool, _):
            with pytest.raises(ToolError, match="HTTP 404: no tool 'echo' here; known: visit"):
                await tool({}, context())
        async with remote(Echo(), Traffic(Echo(), max_bytes=2000)) as (tool, _):
            with pytest.raises(ToolError, match="HTTP 413: this part reads at most 2000 bytes"):
                await tool({"query": "x" * 3000}, context())
        async with remote(Echo(), Traffic(Echo(lambda *_: 1 / 0))) as (tool, _):
            with pytest.raises(ToolError, match="HTTP 500: ZeroDivisionError, see the log of this part"):
                await tool({}, context())
        async with remote(Echo(), Traffic(Echo(), token=TOKEN)) as (tool, _):
            with pytest.raises(UserError, match="HTTP 401: this part needs its token"):
                await tool({}, context())
        async with remote(Echo(), Traffic(Echo(), token=TOKEN), token=TOKEN) as (tool, _):
            assert await tool({"query": "x"}, context()) == ToolResult(repr({"query": "x"}))

    asyncio.run(main())


# ---------------------------------------------------------------- corpora


def test_a_corpus_is_sent_once_for_calls_and_tools_at_once() -> None:
    app = Traffic(search.Settings().build(), visit.Settings().build())

    async def main() -> None:
        async with remote(search.Settings().build(), app) as (_, urls):
            client = Client(None)
            servers = ToolServers(lambda: urls, client)
            tools = [RemoteTool(kind.Settings().build(), servers, 10.0) for kind in (search, visit)]
            arguments = {"query": "Tarn", "url": "u/tarn"}
            calls = [tool(arguments, context(SMALL, turn=turn)) for tool in tools for turn in range(8)]
            found = await asyncio.gather(*calls)
            assert {result.text for result in found} == {"Tarn u/tarn ; Tarn u/also", PAGES[0].text}
            assert app.paths.count("/corpora") == 1
            await tools[0](arguments, context(SMALL, turn=9))
            assert app.paths.count("/corpora") == 1
            await client.close()

    asyncio.run(main())


def test_a_server_keeps_the_corpora_used_last_and_asks_again_for_others() -> None:
    some = [Corpus(name, {"u": Page("u", "Tarn", name * 1000)}) for name in "abc"]
    app = Traffic(visit.Settings().build(), max_corpora_bytes=2500)

    async def main() -> None:
        async with remote(visit.Settings().build(), app) as (tool, _):
            for name, sent in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
                corpus = some["abc".index(name)]
                assert (await tool({"url": "u"}, context(corpus))).text == name * 1000
                assert app.paths.count("/corpora") == sent, "b was used longest ago when c came"
            with pytest.raises(ConfigError, match="corpus 'pages' is too large for tool servers: .* keeps 2500"):
                await tool({"url": "u"}, context(Corpus("pages", {"u": Page("u", "Tarn", "x" * 3000)})))

    asyncio.run(main())


def test_callers_that_give_up_do_not_stop_a_corpus_on_its_way() -> None:
    app = Traffic(visit.Settings().build())

    async def main() -> None:
        async with remote(visit.Settings().build(), app) as (tool, _):
            calls = [asyncio.ensure_future(tool({"url": "u/tarn"}, context(SMALL))) for _ in range(2)]
            while "/corpora" not in app.paths:
                await asyncio.sleep(0)
            calls[0].cancel()
            assert (await calls[1]).text == PAGES[0].text
            assert app.paths.count("/corpora") == 1

    asyncio.run(main())


def test_a_long_corpus_is_indexed_once_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[threading.Thread] = []
    index = search.Index
    monkeypatch.setattr(search, "Index", lambda pages: built.append(threading.current_thread()) or index(pages))
    monkeypatch.setattr(search, "_LONG", 10)

    async def main() -> None:
        async with remote(search.Settings().build(), Traffic(search.Settings().build())) as (tool, _):
            calls = [tool({"query": "Tarn"}, context(SMALL, turn=turn)) for turn in range(6)]
            assert len({result.text for result in await asyncio.gather(*calls)}) == 1

    asyncio.run(main())
    assert len(built) == 1 and built[0] is not threading.main_thread()


# ---------------------------------------------------------------- outages


def test_calls_of_a_lost_server_go_to_the_others_and_come_back() -> None:
    echoes = [Echo(), Echo()]

    async def main() -> None:
        async with remote(Echo(), *map(Traffic, echoes)) as (tool, urls):
            for group in range(20):
                await tool({}, context(group=group))
            assert all(echo.asked >= 4 for echo in echoes), "questions spread over servers"
            await tool({}, context(group=0))
            assert sum(echo.asked for echo in echoes) == 21

    asyncio.run(main())

    async def lost() -> None:
        client, echo = Client(None), Echo()
        async with served(Traffic(echo)) as url:
            async with served(Traffic(Echo())) as gone:
                pass
            tool = RemoteTool(Echo(), ToolServers(lambda: [gone, url], client), 10.0)
            await asyncio.gather(*(tool({}, context(group=group)) for group in range(10)))
            assert echo.asked == 10
        await client.close()

    asyncio.run(lost())


def test_a_server_that_comes_back_within_the_deadline_is_waited_for() -> None:
    async def main() -> None:
        client, urls, asked = Client(None), list[str](), list[float]()

        def alive() -> Sequence[str]:
            asked.append(asyncio.get_running_loop().time())
            return urls

        tool = RemoteTool(visit.Settings().build(), ToolServers(alive, client), 10.0)
        waiting = asyncio.ensure_future(tool({"url": "u/tarn"}, context(SMALL)))
        while len(asked) < 3:
            await asyncio.sleep(0.01)
        async with served(Traffic(visit.Settings().build())) as url:
            urls.append(url)
            assert (await waiting).text == PAGES[0].text
        waits = [after - before for before, after in zip(asked, asked[1:], strict=False)]
        assert waits[0] >= 0.1 and waits[1] >= 0.2, "each wait is twice the one before"
        await client.close()

    asyncio.run(main())


def test_a_call_that_broke_off_runs_again_when_the_server_stops_or_dies() -> None:
    slow, quick = Echo(seconds=30.0), Echo()

    async def main() -> None:
        client, urls = Client(None), list[str]()
        tool = RemoteTool(Echo(), ToolServers(lambda: urls, client), 20.0)
        async with served(Traffic(slow)) as first:
            urls.append(first)
            waiting = asyncio.ensure_future(tool({"query": "x"}, context()))
            while not slow.asked:
                await asyncio.sleep(0.01)
        async with served(Traffic(quick)) as second:
            urls[:] = [second]
            assert (await waiting).text == repr({"query": "x"}) and quick.asked == 1
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [False, True], ids=["nobody there", "no answer"])
def test_the_deadline_says_what_was_waited_for(hangs: bool) -> None:
    async def main() -> None:
        async with remote(Echo(), Traffic(Echo(seconds=30.0)), timeout_s=0.3) as (tool, urls):
            if not hangs:
                urls.clear()
            why = "the call was running" if hangs else "no tool server is running"
            with pytest.raises(ToolTimeout, match=f"tool echo of g0/r1/searcher/2 gave no result after 0.3 s: {why}"):
                await tool({}, context())

    asyncio.run(main())


def test_an_agent_reads_that_a_tool_failed_and_the_failure_is_recorded() -> None:
    async def main() -> None:
        client = Client(None)
        tool = RemoteTool(search.Settings().build(), ToolServers(lambda: [], client), 30.0)
        caller = agent(says("<call> search Tarn </call>", "<answer> Merova </answer>"), tool, tool_timeout_s=0.05)
        episode = Episode(TASK, 5, 2, Lockstep(5.0))
        episode.scheduler.join(episode.member)
        trajectory = await run(caller, episode.root(caller.name), TASK.question, "", None, episode)
        assert trajectory.ending == "answer" and trajectory.failure is not None
        assert trajectory.failure.kind == "ToolTimeout" and "gave no result after 0.05 s" in trajectory.failure.message
        await client.close()

    asyncio.run(main())
