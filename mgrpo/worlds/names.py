"""Invented names and numbers, in two styles.

"word": closed inventories for closed-vocabulary models; every item is one ``\\w+`` token. All splits share them,
since a token that was never trained cannot be copied: worlds redraw every fact instead.
"syllables": names without limit; a hash assigns each name to exactly one split, while all splits share the syllables.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "dev", "test", "test_ood"]

_STEMS = "Zu Me Ta Ke Lo Fa Bri Dro Gly Ho Ja Ki No Pel Qua Ri Sha Tho Vel Wy Xa Ul"
_ENDINGS = "bora rova rn lvo dane mir nix phi sko tul tis vane wick zar goth"
WORD_NAMES: tuple[str, ...] = tuple(stem + ending for stem in _STEMS.split() for ending in _ENDINGS.split())  # 330
WORD_VALUES: tuple[str, ...] = tuple(str(value) for value in range(110, 1910, 30))  # 60, increasing
WORD_URLS: tuple[str, ...] = tuple(f"p{number}" for number in range(250))

_ONSETS = "b d f g h j k l m n p r s t v z br dr kr st tr"
_SYLLABLES = tuple(onset + vowel for onset in _ONSETS.split() for vowel in "aeiou")
_CODAS = ("", "", "l", "n", "r", "s", "x")
# Syllables can spell words of the grammar, which would make texts ambiguous, and floats, which GAIA reads as numbers.
_RESERVED = frozenset({"rate", "home", "page", "tool", "search", "nan", "inf", "the", "unknown", "here"})
_SHARES: tuple[Split, ...] = ("train",) * 6 + ("dev",) * 2 + ("test",) * 2


def split_of_name(name: str) -> Split:
    """The split that owns a "syllables" name: 6/2/2 tenths for train, dev and test ("test_ood" shares test's)."""
    return _SHARES[zlib.crc32(name.encode()) % 10]


def syllable_names(rng: random.Random, split: Split) -> Iterator[str]:
    """Distinct capitalised names of three or four syllables that belong to ``split``, without end."""
    owner = "test" if split == "test_ood" else split
    seen: set[str] = set()
    while True:
        syllables = rng.choices(_SYLLABLES, k=3 if rng.random() < 0.7 else 4)
        name = "".join(syllables).capitalize() + rng.choice(_CODAS)
        if name not in seen and name.lower() not in _RESERVED and split_of_name(name) == owner:
            seen.add(name)
            yield name
