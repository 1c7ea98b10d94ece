"""GAIA's rules with every edge case we know of, and exact match."""

from __future__ import annotations

import pytest

from mgrpo.tasks.grading import exact_match, gaia_score

RIGHT = [
    ("17", "$17"),
    ("17", "17%"),
    ("17", "17.0"),
    ("1234", "1,234"),
    ("1000", "1e3"),
    ("17", "1_7"),
    ("17", " 17 "),
    ("Paris", "PARIS."),
    ("sea gull", "seagull"),
    ("a,b", "a; b"),
    ("a, b", "A,B"),
    ("3, b", "3.0, b"),
    ("A, B, C", "A , B , C"),
    ("inf", "no number at all"),
    ("None", None),
]
WRONG = [
    ("1,234", "1234"),
    ("17", "17 km"),
    ("17", "seventeen"),
    ("17", ""),
    ("17", None),
    ("17", "\u221217"),
    ("-17", "\u221217"),
    ("Paris", "the Paris"),
    ("Paris", "Paris, France"),
    ("a, b", "b, a"),
    ("a, b", "a, b."),
    ("a, b", "a, b,"),
    ("a, b", "a"),
    ("3, b", "three, b"),
    ("S\u00e3o", "Sao"),
    ("Paris", "\u201cParis\u201d"),
    ("nan", "nan"),
    ("17", "17.0001"),
]


@pytest.mark.parametrize(("gold", "prediction"), RIGHT)
def test_gaia_accepts(gold, prediction):
    assert gaia_score(gold, prediction)


@pytest.mark.parametrize(("gold", "prediction"), WRONG)
def test_gaia_refuses(gold, prediction):
    assert not gaia_score(gold, prediction)


def test_exact_match_folds_case_and_space_only():
    assert exact_match("New  York", " new york ")
    assert not exact_match("New York", "New York.") and not exact_match("a", None) and not exact_match("17", "17.0")
