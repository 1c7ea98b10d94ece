"""What a tool and its server say to each other, as JSON.

::

    POST /call      Call                  the tool's result, or 409 with ``need = "corpus"`` where the pages are missing
    POST /corpora   Pages                 nothing; the server keeps the corpus by its name

Whatever a tool raises on purpose comes back as its type and message. Nothing is evaluated: an argument is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mgrpo.tools.base import CallContext
from mgrpo.types import Corpus, Page, Task, ToolResult, TrajectoryId
from mgrpo.worlds.pages import WorldPages


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`CallContext`, with the corpus by name and the id as it is printed."""

    id: str
    turn: int
    call: int
    task: Task
    seed: int
    corpus: str | None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tool: str
    arguments: dict[str, Any]
    context: Context


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a world injects into its tools; see `WorldPages`."""

    failing_tools: float
    shuffle_hits: bool


class Pages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A corpus. The order of ``pages`` is the corpus's own: it decides ties."""

    name: str
    pages: list[Page]
    faults: Faults | None = None


def call_body(tool: str, arguments: Mapping[str, Any], context: CallContext) -> msgspec.Raw:
    corpus = None if context.corpus is None else context.corpus.name
    own = Context(str(context.id), context.turn, context.call, context.task, context.seed, corpus)
    return _plain(Call(tool, dict(arguments), own))


def context_of(sent: Context, corpus: Corpus | None) -> CallContext:
    """Inverse of what `call_body` did. Raises ValueError where ``sent.id`` is none."""
    return CallContext(TrajectoryId.parse(sent.id), sent.turn, sent.call, sent.task, corpus, sent.seed)


def corpus_body(corpus: Corpus) -> msgspec.Raw:
    faults = None
    if isinstance(corpus.pages, WorldPages):
        faults = Faults(corpus.pages.failing_tools, corpus.pages.shuffle_hits)
    return _plain(Pages(corpus.name, list(corpus.pages.values()), faults))


def corpus_of(sent: Pages) -> Corpus:
    pages = {page.url: page for page in sent.pages}
    if sent.faults is None:
        return Corpus(sent.name, pages)
    return Corpus(sent.name, WorldPages(pages, sent.faults.failing_tools, sent.faults.shuffle_hits))


def result_body(result: ToolResult) -> msgspec.Raw:
    return _plain(result)


def _plain(value: object) -> msgspec.Raw:
    """As JSON. Pages can hold halves of surrogate pairs, which no UTF-8 can; agents read a "?" there anyway."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (OverflowError, UnicodeEncodeError):
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return msgspec.Raw(text.encode("utf-8", "replace"))
