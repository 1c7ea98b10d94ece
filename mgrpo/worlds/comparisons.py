"""What a planner hands to a comparer: numbers, or things with their numbers. The text alone says the answer.

=====================================  ======
text (both styles)                     answer
=====================================  ======
larger of 410 and 230                  410
largest of Kinix 410 and Merova 230    Kinix
=====================================  ======
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Item = tuple[str, int]  # what the answer would be, and its number

_COMPARISON = re.compile(r"(?:what is |find )?(?:the )?(?:larger|greater|largest) of (.+?)\s*[?.]?", re.IGNORECASE)
_SEPARATOR = re.compile(r"\s*,\s*(?:and\s+)?|\s+and\s+")
_ITEM = re.compile(r"(?:([^\W\d]\w*) )?([0-9]{1,15})")


def write_comparison(comparative: str, items: Sequence[str]) -> str:
    """What a planner delegates: "{comparative} of {item} and {item} ...", each "{number}" or "{name} {number}"."""
    return f"{comparative} of {' and '.join(items)}"


def parse_comparison(text: str) -> list[Item] | None:
    """The two or more things that are compared, all named or none; None for any other text."""
    found = _COMPARISON.fullmatch(text.strip())
    parts = [_ITEM.fullmatch(part) for part in _SEPARATOR.split(found[1])] if found else []
    matched = [part for part in parts if part is not None]
    if len(matched) < max(2, len(parts)) or len({part[1] is None for part in matched}) > 1:
        return None
    return [(part[1] or part[2], int(part[2])) for part in matched]


def largest(items: Sequence[Item]) -> str | None:
    """The answer that goes with the largest number; None where different ones tie."""
    top = max(number for _, number in items)
    answers = {answer for answer, number in items if number == top}
    return answers.pop() if len(answers) == 1 else None
