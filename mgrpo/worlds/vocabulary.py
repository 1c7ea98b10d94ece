"""The closed vocabulary of compact texts: every ``\\w+|[^\\w\\s]`` piece that a world, tool or agent can write."""

from __future__ import annotations

from mgrpo.worlds.names import WORD_NAMES, WORD_URLS, WORD_VALUES
from mgrpo.worlds.questions import COMPARATIVES, PLURALS
from mgrpo.worlds.schema import ATTRIBUTES, KINDS

_PUNCTUATION = ". , ; : ? ! ( ) [ ] { } < > / \\ | ' \" - _ = + * # & % $ @"
_NUMERALS = tuple(str(number) for number in range(33))
_GRAMMAR = "What is the of and Which neighbour has largest List neighbours in alphabetical order"
# What tools answer when something is amiss, what agents are told, and what a reply can name.
_COMMON = """
    a an answer answers argument arguments array at bad be both but by call calls can cannot context ended error
    evidence failed final find format found from get give given got has have in invalid is it limit malformed many
    message missing more must needs neither no not now of one only or page parse query read reached reply result
    results search searcher planner solo agent solver goal source sources string sub task text that the this time to
    too tool tools turn unclosed unexpected unknown url use user visit was what which with without wrong you your
"""


def vocabulary() -> list[str]:
    """Sorted and stable; at most 900 words. Special tokens are the tokenizer's own business."""
    words = {*_GRAMMAR.split(), *_NUMERALS, *KINDS, *ATTRIBUTES, *COMPARATIVES.values(), *PLURALS.values()}
    return sorted(words | common_words() | {*WORD_NAMES, *WORD_VALUES, *WORD_URLS})


def common_words() -> set[str]:
    """What tools and agents say whatever the world is about, and punctuation."""
    return {*f"{_PUNCTUATION} {_COMMON}".split()}
