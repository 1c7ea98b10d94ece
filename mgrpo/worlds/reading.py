"""What can be read off the texts of tools and sub-agents: hits, facts, answers. Tolerant, since models write too."""

from __future__ import annotations

import json
import re

from mgrpo.worlds.schema import ANY_PHRASE, ATTRIBUTES, attribute_of

UNKNOWN = "unknown"  # the answer of who has found nothing

_PROSE_HIT = re.compile(r"^\d+\. \[(.+?)\]\((\S+)\)", re.MULTILINE)
_PROSE_FACT = re.compile(rf"\b(?:The|Its) ({ANY_PHRASE})(?: of \w+)? (?:is|are) ([^.\n]+)\.")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
# Where a compact answer ends and what it rests on begins.
_SUPPORT = re.compile(r"\s*(?:<source>|<evidence>|\s:\s|\bfrom (?:p\d+\b|https?://)).*", re.DOTALL)


def hits_of(content: str) -> list[tuple[str, str]]:
    """(title, url) of every search hit in the text of either style, in order; [] for texts that list none."""
    if prose := _PROSE_HIT.findall(content):
        return prose
    items = [item.split() for item in content.split(" ; ")]
    return [(" ".join(words[:-1]), words[-1]) for words in items if len(words) > 1 and re.fullmatch(r"p\d+", words[-1])]


def facts_of(content: str) -> dict[str, str]:
    """Attribute -> value of every fact on the page, in order, lists joined by ", "; {} for texts that are no page."""
    found: dict[str, str] = {}
    for sentence in content.split(" ."):
        attribute, _, value = sentence.strip().partition(" ")
        if attribute in ATTRIBUTES and value:
            found[attribute] = value.replace(" , ", ", ")
    for phrase, value in _PROSE_FACT.findall(_LINK.sub(r"\1", content)):
        if (known := attribute_of(phrase)) is not None:
            found[known] = value
    return found


def answer_of(content: str) -> str:
    """The answer in what a sub-agent returned: the JSON field "answer", or the text before its sources."""
    if content.lstrip().startswith("{"):
        try:
            return str(json.loads(content)["answer"]).strip()
        except (ValueError, KeyError):
            return content.strip()
    return _SUPPORT.sub("", content).strip().replace(" , ", ", ")


def number_of(text: str) -> float:
    """A number for comparison; minus infinity where the text is none."""
    try:
        return float(text)
    except ValueError:
        return float("-inf")
