"""What kinds of things a world holds, and which words name their attributes.

The grammar of pages, questions and subtasks is public: an agent may know that a city has a mayor, never who it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Kind = Literal["country", "city", "peak", "currency", "person", "river"]
Value = str | tuple[str, ...]  # a number in plain digits, a name, or several names (neighbours only)

NUMBER: Final = "number"

# kind -> attribute -> kind of its value, or NUMBER
SCHEMA: Mapping[Kind, Mapping[str, Kind | Literal["number"]]] = {
    "country": {
        "capital": "city",
        "peak": "peak",
        "currency": "currency",
        "leader": "person",
        "river": "river",
        "area": NUMBER,
        "population": NUMBER,
        "neighbours": "country",
    },
    "city": {"population": NUMBER, "founded": NUMBER, "mayor": "person", "country": "country"},
    "peak": {"height": NUMBER, "climber": "person", "country": "country"},
    "currency": {"rate": NUMBER, "country": "country"},
    "person": {"birth": NUMBER, "home": "city"},
    "river": {"length": NUMBER, "mouth": "city"},
}
KINDS: tuple[Kind, ...] = tuple(SCHEMA)
ATTRIBUTES: tuple[str, ...] = tuple(dict.fromkeys(a for attributes in SCHEMA.values() for a in attributes))
KINDS_WITH: Mapping[str, frozenset[Kind]] = {
    attribute: frozenset(kind for kind in KINDS if attribute in SCHEMA[kind]) for attribute in ATTRIBUTES
}

# Number ranges of the "syllables" style, upper end excluded; the "word" style draws from names.WORD_VALUES.
RANGES: Mapping[str, tuple[int, int]] = {
    "area": (1_000, 999_999),
    "population": (10_000, 9_999_999),
    "founded": (800, 1_990),
    "height": (900, 8_999),
    "rate": (2, 9_999),
    "birth": (1_850, 2_010),
    "length": (50, 6_999),
}

# A namesake is a second thing of the same name. Its kind shares no attribute with the first, so that
# "{attribute} of {name}" keeps exactly one answer.
NAMESAKE_KIND: Mapping[Kind, Kind] = {
    "country": "person",
    "city": "river",
    "peak": "river",
    "currency": "river",
    "person": "river",
    "river": "person",
}

# Prose says what a single token cannot: attribute -> phrase.
_PHRASES: Mapping[str, str] = {"founded": "founding year", "birth": "birth year", "rate": "exchange rate"}
_ATTRIBUTE_OF: Mapping[str, str] = {phrase: attribute for attribute, phrase in _PHRASES.items()} | {
    attribute: attribute for attribute in ATTRIBUTES
}
ANY_PHRASE = "|".join(sorted(_ATTRIBUTE_OF, key=len, reverse=True))  # a regular expression alternative


def phrase_of(attribute: str, style: str) -> str:
    """The words for ``attribute`` in texts of ``style`` ("compact" or "prose")."""
    return _PHRASES.get(attribute, attribute) if style == "prose" else attribute


def attribute_of(phrase: str) -> str | None:
    """Inverse of `phrase_of` for either style; None for words that name no attribute."""
    return _ATTRIBUTE_OF.get(phrase)
