"""Fetch pages of a task's corpus by URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from mgrpo.tools.base import CallContext
from mgrpo.tools.search import corpus_at_hand, strings
from mgrpo.types import Corpus, ToolResult


class Settings(BaseModel, extra="forbid"):
    """``style`` "compact" answers a bad URL with words of the closed vocabulary."""

    type: Literal["visit"] = "visit"
    style: Literal["compact", "prose"] = "compact"

    def build(self) -> Visit:
        return Visit(self.style)


class Visit:
    """The tool. Pages of a corpus are short, so they are returned whole whatever the goal."""

    name = "visit"
    description = "Open web pages by URL and return their text."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "url": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
                "description": "The URL of one page, or several at once.",
            },
            "goal": {"type": "string", "description": "What you want to learn from the page."},
        },
        "required": ["url"],
    }

    def __init__(self, style: Literal["compact", "prose"]) -> None:
        self._style = style

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        urls = strings(arguments.get("url"))
        if urls is None:
            return ToolResult("error : visit needs a url", error="visit needs a url: a string or strings")
        corpus = corpus_at_hand(context, self.name)
        unknown = [url for url in urls if url not in corpus.pages]
        return ToolResult(
            (" " if self._style == "compact" else "\n=======\n").join(self._read(corpus, url) for url in urls),
            error=f"no page {', '.join(unknown)}" if unknown else None,
        )

    def _read(self, corpus: Corpus, url: str) -> str:
        page = corpus.pages.get(url)
        if page is not None and page.text:
            return page.text
        if self._style == "compact":
            return f"no page {url}"
        return f"Error: no page found at {url}. Open another search result."
