"""Search over a task's corpus: BM25 on twice the title and the text, indexed when a corpus is first asked."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import bm25s
import numpy as np
from pydantic import BaseModel, Field

from mgrpo.errors import ConfigError, ToolError
from mgrpo.tools.base import CallContext
from mgrpo.types import Corpus, Page, SearchHit, ToolResult
from mgrpo.worlds.pages import WorldPages

_WORD = re.compile(r"\w+")
_LINK_TARGET = re.compile(r"\]\([^)]*\)")  # URLs would count the names in them again
_SNIPPET_WORDS = 20
_INDEXES_KEPT = 64  # one per corpus; a step of training touches a few dozen
_LONG = 500_000  # characters, which take some 50 ms to index


class Settings(BaseModel, extra="forbid"):
    """``k`` hits per query; ``style`` "compact" writes titles and URLs only, for closed vocabularies."""

    type: Literal["search"] = "search"
    k: int = Field(default=3, ge=1, le=50)
    style: Literal["compact", "prose"] = "compact"

    def build(self) -> Search:
        return Search(self.k, self.style)


class _Bm25(bm25s.BM25):  # type: ignore[misc]
    """BM25, Lucene variant. bm25s loops over documents in Python, which on hundreds of short pages is most of the cost
    of a new world; this builds the same matrix in one pass over all tokens."""

    def build_index_from_ids(
        self, unique_token_ids: Any, corpus_token_ids: Any, show_progress: bool = False, leave_progress: bool = False
    ) -> dict[str, Any]:
        self.nonoccurrence_array = None  # in this variant a word that does not occur scores 0
        n = len(corpus_token_ids)
        lengths = np.fromiter(map(len, corpus_token_ids), np.int64, n)
        words = np.fromiter(chain.from_iterable(corpus_token_ids), np.int64, int(lengths.sum()))
        # One number per (word, document), so that sorting gives the columns of the matrix.
        entries, counts = np.unique(words * n + np.repeat(np.arange(n), lengths), return_counts=True)
        columns, rows = np.divmod(entries, n)
        frequency = np.bincount(columns, minlength=len(unique_token_ids))
        idf = np.log1p((n - frequency + 0.5) / (frequency + 0.5))
        saturation = counts / (counts + self.k1 * (1 - self.b + self.b * lengths / lengths.mean())[rows])
        return {
            "data": (idf[columns] * saturation).astype(self.dtype),
            "indices": rows.astype(self.int_dtype),
            "indptr": np.concatenate([[0], np.cumsum(frequency)]).astype(self.int_dtype),
            "num_docs": n,
        }


class Index:
    """The pages of one corpus, ranked by BM25 (k1 1.5, b 0.75)."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = pages
        self._words: dict[str, int] = {}
        texts = [page.text if "](" not in page.text else _LINK_TARGET.sub("]", page.text) for page in pages]
        documents = [self._ids(f"{page.title} {page.title} {text}") for page, text in zip(pages, texts, strict=True)]
        self._bm25: Any = None
        if self._words:  # bm25s cannot index nothing
            self._bm25 = _Bm25()
            self._bm25.index((documents, self._words), create_empty_token=False, show_progress=False)

    def _ids(self, text: str) -> list[int]:
        words = self._words
        return [words.setdefault(word, len(words)) for word in _WORD.findall(text.lower())]

    def hits(self, query: str, k: int) -> list[SearchHit]:
        """At most ``k`` pages that share a word with ``query``, best first, ties in the order of the corpus."""
        known = [self._words[word] for word in _WORD.findall(query.lower()) if word in self._words]
        if not known:
            return []
        scores = self._bm25.get_scores_from_ids(np.asarray(known))
        found = np.flatnonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")[:k]]
        return [self._hit(self.pages[i], float(scores[i])) for i in best.tolist()]

    @staticmethod
    def _hit(page: Page, score: float) -> SearchHit:
        return SearchHit(page.title, page.url, _snippet(page.text), score)


def _snippet(text: str) -> str:
    """The first words of the first line that is no heading."""
    line = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    return " ".join(line.split()[:_SNIPPET_WORDS])


class Search:
    """The tool. Indexes are kept for the corpora used last, by name."""

    name = "search"
    description = "Search the web. Returns the titles and URLs of the best matching pages."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "query": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
                "description": "One query, or several at once.",
            }
        },
        "required": ["query"],
    }

    def __init__(self, k: int, style: Literal["compact", "prose"]) -> None:
        self._k = k
        self._style = style
        self._indexes: OrderedDict[str, Index] = OrderedDict()
        self._building: dict[str, asyncio.Task[Index]] = {}

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        queries = strings(arguments.get("query"))
        if queries is None:
            return ToolResult("error : search needs a query", error="search needs a query: a string or strings")
        corpus = corpus_at_hand(context, self.name)
        index = await self._index(corpus)
        listed = [self._write(query, self._hits(corpus, index, query)) for query in queries]
        return ToolResult((" ; " if self._style == "compact" else "\n=======\n").join(listed))

    def _hits(self, corpus: Corpus, index: Index, query: str) -> list[SearchHit]:
        hits = index.hits(query, self._k)
        if isinstance(corpus.pages, WorldPages):
            return corpus.pages.order(hits, f"{corpus.name}/{query}")
        return hits

    async def _index(self, corpus: Corpus) -> Index:
        """Of a long corpus it is built in a thread, once however many calls wait for it."""
        name = corpus.name
        if name in self._indexes:
            self._indexes.move_to_end(name)
            return self._indexes[name]
        if name not in self._building:
            pages = list(corpus.pages.values())
            if sum(len(page.text) for page in pages) < _LONG:
                return self._keep(name, Index(pages))
            task = self._building[name] = asyncio.create_task(asyncio.to_thread(Index, pages))
            task.add_done_callback(lambda task: self._built(name, task))
        return await asyncio.shield(self._building[name])

    def _built(self, name: str, task: asyncio.Task[Index]) -> None:
        del self._building[name]
        if not task.cancelled() and task.exception() is None:
            self._keep(name, task.result())

    def _keep(self, name: str, index: Index) -> Index:
        self._indexes[name] = index
        if len(self._indexes) > _INDEXES_KEPT:
            self._indexes.popitem(last=False)
        return index

    def _write(self, query: str, hits: Sequence[SearchHit]) -> str:
        if self._style == "compact":
            return " ; ".join(f"{hit.title} {hit.url}" for hit in hits) or "no results found"
        if not hits:
            return f"No results found for {query!r}. Try other words."
        return "\n".join(f"{i}. [{hit.title}]({hit.url})\n{hit.snippet}".rstrip() for i, hit in enumerate(hits, 1))


def strings(value: object) -> list[str] | None:
    """The argument as a list of strings: one string, or a non-empty list of them; None for anything else."""
    if isinstance(value, str) and value.strip():
        return [value]
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) and item.strip() for item in value):
        return list(value)
    return None


def corpus_at_hand(context: CallContext, tool: str) -> Corpus:
    """The corpus that the call works on.

    Raises ToolError where the world injects a failure into this call, ConfigError where the task has no corpus.
    """
    corpus = context.corpus
    if corpus is None:
        raise ConfigError(f"tool {tool!r}: task {context.task.id!r} has no corpus; give its source one")
    key = f"{context.seed}/{corpus.name}/{context.id}/{context.turn}/{context.call}/{tool}"
    if isinstance(corpus.pages, WorldPages) and corpus.pages.fails(key):
        raise ToolError(f"{tool}: injected failure at {context.id} turn {context.turn} call {context.call}")
    return corpus
