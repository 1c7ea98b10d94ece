"""Rules that compare an answer with the gold one. No judge, no tolerance.

`gaia_score` restates the official GAIA scorer (Hugging Face space gaia-benchmark/leaderboard, scorer.py): the gold
answer decides whether a number, a list or a string is compared.
"""

from __future__ import annotations

import math
import re
import string

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def gaia_score(gold: str, prediction: str | None) -> bool:
    """Whether ``prediction`` equals ``gold`` under GAIA's normalisation. A missing prediction reads "None".

    Number: ``$``, ``%`` and ``,`` are dropped from the prediction, which must then be the same float. List (the gold
    has ``,`` or ``;``): as many elements, compared in order. String: whitespace, case and ASCII punctuation are
    ignored; articles, accents and units are not.
    """
    given = "None" if prediction is None else prediction
    if _is_float(gold):
        return _number(given) == float(gold)
    if re.search("[,;]", gold):
        golds, parts = re.split("[,;]", gold), re.split("[,;]", given)
        return len(golds) == len(parts) and all(map(_same_element, golds, parts))
    return _squeeze(gold).translate(_NO_PUNCTUATION) == _squeeze(given).translate(_NO_PUNCTUATION)


def exact_match(gold: str, prediction: str | None) -> bool:
    """Equality after folding case, outer whitespace and runs of whitespace."""
    return prediction is not None and prediction.casefold().split() == gold.casefold().split()


def _same_element(gold: str, given: str) -> bool:
    # Unlike in whole-string answers, punctuation inside list elements counts.
    return _number(given) == float(gold) if _is_float(gold) else _squeeze(gold) == _squeeze(given)


def _squeeze(text: str) -> str:
    return re.sub(r"\s", "", text).lower()


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float:
    """The prediction as a number; +inf where it is none, as in the official scorer."""
    try:
        return float(re.sub("[$%,]", "", text))
    except ValueError:
        return math.inf
