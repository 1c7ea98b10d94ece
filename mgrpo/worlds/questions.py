"""Questions and subtasks: drawn from a world, written as text, parsed back to a plan, solved from the facts.

=========  ==================================================================  ==========================
family     text (compact; prose has no space before punctuation)               answer
=========  ==================================================================  ==========================
one_hop    What is the height of Tarn ?                                        number or name
two_hop    What is the population of the capital of Zubora ?                   number or name
three_hop  What is the birth of the mayor of the capital of Zubora ?           number or name
compare    What is the larger area of Zubora and Merova ?                      number
argmax     Which neighbour of Zubora has the largest area ?                    name
list       List the capitals of the neighbours of Zubora in alphabetical order .   names, joined by ", "
subtask    population of Merova                                                any fact, lists joined by ", "
           larger of 410 and 230                                               see `mgrpo.worlds.comparisons`
=========  ==================================================================  ==========================

``compare`` asks for the value, not for the country, so that no answer stands in its own question.
Bridges over a river or a mouth are held out: they are asked in split "test_ood" and nowhere else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mgrpo.worlds.comparisons import largest, parse_comparison
from mgrpo.worlds.schema import ANY_PHRASE, KINDS, NUMBER, RANGES, SCHEMA, Kind, Value, attribute_of, phrase_of
from mgrpo.worlds.world import World

Family = Literal["one_hop", "two_hop", "three_hop", "compare", "argmax", "list"]
HOPS: Mapping[Family, int] = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "compare": 2, "argmax": 3, "list": 3}
FAMILIES: tuple[Family, ...] = tuple(HOPS)
FAMILIES_OOD: tuple[Family, ...] = ("two_hop", "three_hop", "list")

COMPARATIVES: Mapping[str, str] = {"area": "larger", "population": "larger", "height": "greater", "rate": "greater"}
PLURALS: Mapping[str, str] = {
    "capital": "capitals",
    "peak": "peaks",
    "currency": "currencies",
    "leader": "leaders",
    "river": "rivers",
}
_SINGULAR: Mapping[str, str] = {plural: attribute for attribute, plural in PLURALS.items()}
_SUPERLATIVES = ("area", "population")
_HELD_OUT_BRIDGES = frozenset({"river", "mouth"})


@dataclass(frozen=True, slots=True)
class Plan:
    """What a question asks for. ``path`` is in the order of the hops, nearest to the named entities first.

    "chain" follows the path; "max" compares the last attribute of all ``entities``; "argmax" and "list" fan out over
    the neighbours, which are the first hop.
    """

    op: Literal["chain", "max", "argmax", "list"]
    entities: tuple[str, ...]
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    family: Family
    text: str
    answer: str
    plan: Plan
    steps: tuple[tuple[str, str], ...]  # (attribute, name) of every look-up, in order

    @property
    def hops(self) -> int:
        """Longest chain of look-ups, counting a final comparison or sort as one."""
        return HOPS[self.family]


def _paths(kind: Kind, hops: int, seen: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Attribute chains from ``kind`` that visit no kind twice, so that none is a detour back to its start."""
    for attribute, target in SCHEMA[kind].items():
        if attribute == "neighbours" or target in (*seen, kind):
            continue
        if hops == 1:
            yield (attribute,)
        elif target != NUMBER:
            yield from ((attribute, *rest) for rest in _paths(target, hops - 1, (*seen, kind)))


def _chains(hops: int, held_out: bool) -> tuple[tuple[Kind, tuple[str, ...]], ...]:
    return tuple(
        (kind, path)
        for kind in KINDS
        for path in _paths(kind, hops)
        if (not _HELD_OUT_BRIDGES.isdisjoint(path[:-1])) == held_out
    )


_CHAINS = {
    (family, held_out): _chains(HOPS[family], held_out)
    for family in ("one_hop", "two_hop", "three_hop")
    for held_out in (False, True)
}
_COMPARED = tuple((kind, attribute) for kind in KINDS for attribute in COMPARATIVES if attribute in SCHEMA[kind])


def draw(world: World, family: Family, rng: random.Random) -> Question:
    """A question with exactly one answer that does not stand in its text; draws again where there is none.

    Raises ValueError for a family that the world's split has no templates for.
    """
    held_out = world.split == "test_ood"
    if held_out and family not in FAMILIES_OOD:
        raise ValueError(f"family {family!r} has no held-out templates; test_ood knows {', '.join(FAMILIES_OOD)}")
    for _ in range(1000):
        plan = _draw_plan(world, family, held_out, rng)
        text = write_question(plan, world.config.style)
        solved = solve(world, plan)
        if solved.answer is not None and not _gives_away(text, solved.answer):
            return Question(family, text, solved.answer, plan, tuple(solved.steps))
    raise AssertionError(f"no {family} question in 1000 draws from world {world.seed}")


def _draw_plan(world: World, family: Family, held_out: bool, rng: random.Random) -> Plan:
    def name(kind: Kind) -> str:
        return rng.choice(world.entities[kind]).name

    if family == "compare":
        kind, attribute = rng.choice(_COMPARED)
        first, second = rng.sample(world.entities[kind], 2)
        return Plan("max", (first.name, second.name), (attribute,))
    if family == "argmax":
        return Plan("argmax", (name("country"),), ("neighbours", rng.choice(_SUPERLATIVES)))
    if family == "list":
        listed = [attribute for attribute in PLURALS if (attribute in _HELD_OUT_BRIDGES) == held_out]
        return Plan("list", (name("country"),), ("neighbours", rng.choice(listed)))
    kind, path = rng.choice(_CHAINS[family, held_out])
    return Plan("chain", (name(kind),), path)


def _gives_away(text: str, answer: str) -> bool:
    lowered = text.lower()
    return any(part in lowered for part in answer.lower().split(", "))


# ---------------------------------------------------------------- solving


@dataclass(slots=True)
class Solution:
    """``answer`` is None where a fact is missing, no number to compare, or tied with another."""

    answer: str | None = None
    steps: list[tuple[str, str]] = field(default_factory=list)

    def look_up(self, world: World, attribute: str, name: str) -> Value:
        value = world.look_up(attribute, name)
        if value is None:
            raise KeyError(f"{attribute} of {name}")
        self.steps.append((attribute, name))
        return value


def solve(world: World, plan: Plan) -> Solution:
    """Follow ``plan`` through the facts."""
    solution = Solution()
    try:
        solution.answer = _follow(world, plan, solution)
    except KeyError:
        solution.answer = None
    return solution


def _follow(world: World, plan: Plan, solution: Solution) -> str | None:
    if plan.op == "chain":
        value: Value = plan.entities[0]
        for attribute in plan.path:
            value = solution.look_up(world, attribute, text_of(value))
        return text_of(value)
    names = plan.entities
    if plan.op != "max":
        near = solution.look_up(world, plan.path[0], plan.entities[0])
        names = (near,) if isinstance(near, str) else near
    values = {name: text_of(solution.look_up(world, plan.path[-1], name)) for name in names}
    if plan.op == "list":
        return ", ".join(sorted(values.values()))
    if plan.path[-1] not in RANGES:
        return None
    ranked = sorted(((int(value), name) for name, value in values.items()), reverse=True)
    if len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
        return None
    return ranked[0][1] if plan.op == "argmax" else str(ranked[0][0])


def text_of(value: Value) -> str:
    """A fact as an answer: lists joined by ", " in the order of the page."""
    return value if isinstance(value, str) else ", ".join(value)


# ---------------------------------------------------------------- text


def write_question(plan: Plan, style: str) -> str:
    """The question's text; `parse_question` inverts it."""
    last = phrase_of(plan.path[-1], style)
    if plan.op == "max":
        text = f"What is the {COMPARATIVES[plan.path[-1]]} {last} of {plan.entities[0]} and {plan.entities[1]} ?"
    elif plan.op == "argmax":
        text = f"Which neighbour of {plan.entities[0]} has the largest {last} ?"
    elif plan.op == "list":
        text = f"List the {PLURALS[plan.path[-1]]} of the neighbours of {plan.entities[0]} in alphabetical order ."
    else:
        hops = " ".join(f"the {phrase_of(attribute, style)} of" for attribute in reversed(plan.path))
        text = f"What is {hops} {plan.entities[0]} ?"
    return text if style == "compact" else re.sub(r" ([?.])", r"\1", text)


_HOP = rf"the ({ANY_PHRASE}) of "
_CHAIN = re.compile(rf"What is ((?:{_HOP})+)(\w+)")
_MAX = re.compile(rf"What is the (?:larger|greater) ({ANY_PHRASE}) of (\w+) and (\w+)")
_ARGMAX = re.compile(rf"Which neighbour of (\w+) has the largest ({ANY_PHRASE})")
_LIST = re.compile(rf"List the ({'|'.join(_SINGULAR)}) of the neighbours of (\w+) in alphabetical order")
_SUBTASK = re.compile(rf"(?:what is |find |look up )?(?:the )?({ANY_PHRASE}) of (\w+)\s*[?.]?", re.IGNORECASE)


def parse_question(text: str) -> Plan | None:
    """The plan of a question of either style; None for any other text."""
    if found := _MAX.search(text):
        return Plan("max", (found[2], found[3]), (_attribute(found[1]),))
    if found := _ARGMAX.search(text):
        return Plan("argmax", (found[1],), ("neighbours", _attribute(found[2])))
    if found := _LIST.search(text):
        return Plan("list", (found[2],), ("neighbours", _SINGULAR[found[1]]))
    if found := _CHAIN.search(text):
        hops = re.findall(_HOP, found[1])
        return Plan("chain", (found[3],), tuple(_attribute(hop) for hop in reversed(hops)))
    return None


def _attribute(phrase: str) -> str:
    attribute = attribute_of(phrase.lower())
    assert attribute is not None, phrase  # the patterns match known phrases only
    return attribute


def write_subtask(attribute: str, name: str, style: str) -> str:
    """What a planner delegates: "{attribute} of {name}"."""
    return f"{phrase_of(attribute, style)} of {name}"


def parse_subtask(text: str) -> tuple[str, str] | None:
    """(attribute, name) of a subtask of either style; None for any other text."""
    found = _SUBTASK.fullmatch(text.strip())
    return None if found is None else (_attribute(found[1]), found[2])


def gold_of_subtask(world: World, text: str) -> str | None:
    """The gold sub-answer; None where the text is no subtask, the world has no such fact or a comparison ties."""
    if (items := parse_comparison(text)) is not None:
        return largest(items)
    parsed = parse_subtask(text)
    value = None if parsed is None else world.look_up(*parsed)
    return None if value is None else text_of(value)
