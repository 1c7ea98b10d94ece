"""Tools over HTTP: what `mgrpo tools` answers. The asking half is tools/remote.py, the messages are tools/wire.py."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping

import msgspec
from starlette.routing import Route

from mgrpo.config.registry import suggest
from mgrpo.tools.base import Tool
from mgrpo.tools.wire import Call, Pages, context_of, corpus_of, result_body
from mgrpo.types import Corpus
from mgrpo.web.serving import Refusal, post


def routes(tools: Mapping[str, Tool], max_corpora_bytes: int) -> list[Route]:
    """The routes of a tool server. ``tools`` is keyed by name; ``max_corpora_bytes`` bounds the pages that are kept."""
    corpora = _Corpora(max_corpora_bytes)

    async def call(asked: Call) -> msgspec.Raw:
        tool = tools.get(asked.tool)
        if tool is None:
            raise Refusal(404, f"no tool {asked.tool!r} here{suggest(asked.tool, tools)}")
        name = asked.context.corpus
        corpus = None if name is None else corpora.get(name)
        if name is not None and corpus is None:
            raise Refusal(409, f"corpus {name!r} is not here; send it to /corpora", need="corpus")
        try:
            context = context_of(asked.context, corpus)
        except ValueError as error:
            raise Refusal(400, f"/call: {error}") from error
        return result_body(await tool(asked.arguments, context))

    async def keep(sent: Pages) -> object:
        corpora.keep(corpus_of(sent))
        return {}

    return [post("/call", Call, call), post("/corpora", Pages, keep)]


class _Corpora:
    """The corpora used last, by name, as many as ``max_bytes`` of text hold. Equal names are equal pages."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[Corpus, int]] = OrderedDict()
        self._bytes = 0

    def get(self, name: str) -> Corpus | None:
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def keep(self, corpus: Corpus) -> None:
        """Raises Refusal (413) for one that would not fit alone."""
        if self.get(corpus.name) is not None:  # two senders met; tools may have indexed the first one's
            return
        size = _bytes_of(corpus)
        if size > self._max_bytes:
            raise Refusal(
                413, f"corpus {corpus.name!r} takes {size} bytes, this tool server keeps {self._max_bytes} at most"
            )
        self._kept[corpus.name] = (corpus, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed


def _bytes_of(corpus: Corpus) -> int:
    """What the texts of the pages take in memory."""
    pages = corpus.pages.values()
    return sum(sys.getsizeof(text) for page in pages for text in (page.url, page.title, page.text, *page.links))
