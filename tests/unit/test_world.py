"""The counterfactual web: facts, pages, knobs, questions, vocabulary."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict

import pytest

from mgrpo.errors import ConfigError
from mgrpo.worlds.names import WORD_NAMES, WORD_URLS, WORD_VALUES, split_of_name
from mgrpo.worlds.pages import corpus_of
from mgrpo.worlds.questions import (
    FAMILIES,
    FAMILIES_OOD,
    draw,
    gold_of_subtask,
    parse_question,
    parse_subtask,
    solve,
    text_of,
    write_question,
    write_subtask,
)
from mgrpo.worlds.reading import answer_of, facts_of, hits_of
from mgrpo.worlds.schema import ATTRIBUTES, KINDS, KINDS_WITH, NAMESAKE_KIND, SCHEMA
from mgrpo.worlds.vocabulary import vocabulary
from mgrpo.worlds.world import WorldConfig, build_world

PIECES = re.compile(r"\w+|[^\w\s]")
PROSE = WorldConfig(names="syllables", style="prose")
HARD = WorldConfig(countries=16, distractors=30, dead_links=0.4, shuffle_hits=True)
HARD_PROSE = WorldConfig(countries=16, names="syllables", style="prose", distractors=30, dead_links=0.4)


def test_the_closed_inventories_are_single_tokens_apart_from_each_other_and_from_the_grammar():
    assert len(set(WORD_NAMES)) == 330 and len(set(WORD_VALUES)) == 60 and len(WORD_URLS) == 250
    assert [int(value) for value in WORD_VALUES] == sorted(int(value) for value in WORD_VALUES)
    for word in (*WORD_NAMES, *WORD_VALUES, *WORD_URLS, *ATTRIBUTES, *KINDS):
        assert PIECES.findall(word) == [word]
    others = set(vocabulary()) - set(WORD_NAMES)
    assert not {name.lower() for name in WORD_NAMES} & {word.lower() for word in others}
    assert not set(WORD_VALUES) & {str(number) for number in range(33)}


def test_the_vocabulary_is_sorted_stable_and_small():
    words = vocabulary()
    assert words == sorted(set(words)) == vocabulary()
    assert len(words) <= 900
    assert all(PIECES.findall(word) == [word] for word in words)


@pytest.mark.parametrize("config", [WorldConfig(), PROSE, HARD, HARD_PROSE])
def test_a_world_keeps_its_schema(config):
    world = build_world(config, "train", "0-1")
    names = [entity.name for kind in KINDS for entity in world.entities[kind]]
    assert len(set(names)) == len(names) == config.countries * 7
    of_kind = {kind: {entity.name for entity in world.entities[kind]} for kind in KINDS}
    for entity in world.all():
        assert set(entity.facts) == set(SCHEMA[entity.kind])
        for attribute, target in SCHEMA[entity.kind].items():
            for part in text_of(entity.facts[attribute]).split(", "):
                assert part.isdigit() if target == "number" else part in of_kind[target]
    for country in world.entities["country"]:
        near = country.facts["neighbours"]
        assert 2 <= len(near) <= 4 and country.name not in near and len(set(near)) == len(near)
        assert all(country.name in world.look_up("neighbours", other) for other in near)
        assert world.look_up("country", text_of(country.facts["capital"])) == country.name


def test_namesakes_share_no_attribute_so_a_subtask_has_one_answer():
    for kind, other in NAMESAKE_KIND.items():
        assert not SCHEMA[kind].keys() & SCHEMA[other].keys()
    world = build_world(HARD, "train", "3")
    assert sum(len(twins) == 2 for twins in world.by_name.values()) == 30
    titles = Counter(page.title for page in corpus_of(world, "c").pages.values() if page.text)
    assert max(titles.values()) == 1


@pytest.mark.parametrize("config", [WorldConfig(), PROSE, HARD, HARD_PROSE])
def test_pages_say_exactly_the_facts_in_an_order_that_varies(config):
    world = build_world(config, "train", "0-1")
    pages = corpus_of(world, "c").pages
    orders = set()
    for entity in world.all():
        page = pages[entity.url]
        read = facts_of(page.text)
        assert read == {attribute: text_of(value) for attribute, value in entity.facts.items()}
        assert set(page.links) <= set(pages)
        if entity.kind == "country":
            orders.add(tuple(read))
    assert len(orders) > 5


def test_prose_pages_are_markdown_with_links():
    world = build_world(PROSE, "train", "0")
    city = world.entities["city"][0]
    text = corpus_of(world, "c").pages[city.url].text
    mayor = world.find("birth", text_of(city.facts["mayor"]))
    assert city.url == f"https://web.local/city/{city.name.lower()}"
    assert text.startswith(f"# {city.name}\n\n{city.name} is a city.\n\n")
    assert f"[{mayor.name}]({mayor.url})" in text and "See also: " in text


def test_dead_links_are_indexed_without_text_and_leave_the_true_page():
    world = build_world(HARD_PROSE, "train", "0")
    pages = corpus_of(world, "c").pages
    dead = [page for page in pages.values() if not page.text]
    assert len(dead) == round(0.4 * 16 * 7)
    titles = {page.title for page in pages.values() if page.text}
    assert all(page.title in titles for page in dead)
    assert any(page.url in other.text for page in dead for other in pages.values())


def test_injected_failures_come_at_their_rate_and_stay_put():
    pages = corpus_of(build_world(WorldConfig(failing_tools=0.25), "train", "0"), "c").pages
    fails = [pages.fails(f"call {i}") for i in range(4000)]
    assert 0.22 < sum(fails) / 4000 < 0.28
    assert fails == [pages.fails(f"call {i}") for i in range(4000)]
    sound = corpus_of(build_world(WorldConfig(), "train", "0"), "c").pages
    assert not any(sound.fails(f"call {i}") for i in range(4000))


@pytest.mark.parametrize(
    "knobs",
    [
        {"countries": 7},
        {"countries": 121, "names": "syllables"},
        {"countries": 36},
        {"distractors": 90},
        {"distractors": -1},
        {"dead_links": 1.0},
        {"failing_tools": -0.1},
    ],
)
def test_impossible_worlds_are_refused(knobs):
    with pytest.raises(ConfigError, match="world"):
        WorldConfig(**knobs)


def test_large_worlds_build_in_both_styles():
    assert len(build_world(WorldConfig(countries=35), "train", "0").by_name) == 245
    assert len(build_world(WorldConfig(countries=120, names="syllables"), "dev", "0").by_name) == 840


def test_no_name_leaks_across_splits_while_syllables_are_shared():
    names = {}
    for split in ("train", "dev", "test"):
        worlds = [build_world(PROSE, split, str(seed)) for seed in range(12)]
        names[split] = {name for world in worlds for name in world.by_name}
        assert all(split_of_name(name) == split for name in names[split])
    assert not names["train"] & names["dev"] and not names["train"] & names["test"] and not names["dev"] & names["test"]
    starts = {split: {name[:2] for name in found} for split, found in names.items()}
    assert starts["test"] <= starts["train"] and starts["dev"] <= starts["train"]
    assert {split_of_name(name) for name in build_world(PROSE, "test_ood", "0").by_name} == {"test"}


# ---------------------------------------------------------------- questions


def facts_table(world):
    table = defaultdict(list)
    for entity in world.all():
        for attribute, value in entity.facts.items():
            table[attribute, entity.name].append(value)
    return table


def brute_force(table, plan):
    """All answers that follow from the flat table, without `solve`."""
    names = list(plan.entities)
    if plan.op == "chain":
        for attribute in plan.path:
            names = [text_of(value) for name in names for value in table[attribute, name]]
        return set(names)
    if plan.op != "max":
        names = [name for value in table[plan.path[0], names[0]] for name in value]
    values = [(text_of(value), name) for name in names for value in table[plan.path[-1], name]]
    if plan.op == "list":
        return {", ".join(sorted(value for value, _ in values))}
    top = max(int(value) for value, _ in values)
    return {name if plan.op == "argmax" else value for value, name in values if int(value) == top}


@pytest.mark.parametrize("config", [WorldConfig(), PROSE, HARD, HARD_PROSE])
@pytest.mark.parametrize("split", ["train", "test_ood"])
def test_every_question_has_one_answer_by_brute_force_and_does_not_give_it_away(config, split):
    world = build_world(config, split, "7")
    table, rng = facts_table(world), random.Random(0)
    for family in FAMILIES_OOD if split == "test_ood" else FAMILIES:
        for _ in range(60):
            question = draw(world, family, rng)
            assert brute_force(table, question.plan) == {question.answer}
            assert parse_question(question.text) == question.plan
            parts = question.answer.split(", ")
            assert (len(parts) >= 2 and parts == sorted(parts)) if family == "list" else len(parts) == 1
            assert not any(part.lower() in question.text.lower() for part in parts)
            assert ";" not in question.answer
            assert len(question.steps) >= question.hops - (family in ("argmax", "list"))


def test_comparisons_never_tie():
    world, rng = build_world(WorldConfig(), "train", "1"), random.Random(0)
    for _ in range(200):
        question = draw(world, "compare", rng)
        first, second = (world.look_up(question.plan.path[0], name) for name in question.plan.entities)
        assert first != second


@pytest.mark.parametrize(
    "text",
    [
        "What is the larger capital of {0} and {1} ?",
        "Which neighbour of {0} has the largest capital ?",
        "Which neighbour of {0} has the largest neighbours ?",
        "What is the capital of the neighbours of {0} ?",
    ],
)
def test_what_is_no_number_cannot_be_compared(text):
    world = build_world(WorldConfig(countries=8), "test", "0")
    first, second, *_ = (country.name for country in world.entities["country"])
    plan = parse_question(text.format(first, second))
    assert plan is not None and solve(world, plan).answer is None


def test_bridges_over_rivers_are_asked_in_test_ood_only():
    def bridges(split, families):
        world, rng = build_world(WorldConfig(), split, "1"), random.Random(0)
        questions = [draw(world, family, rng) for family in families for _ in range(150)]
        return [q.plan.path[-1:] if q.plan.op == "list" else q.plan.path[:-1] for q in questions]

    assert all({"river", "mouth"} & set(bridge) for bridge in bridges("test_ood", FAMILIES_OOD))
    assert not any({"river", "mouth"} & set(bridge) for bridge in bridges("train", FAMILIES))
    with pytest.raises(ValueError, match="held-out"):
        draw(build_world(WorldConfig(), "test_ood", "1"), "compare", random.Random(0))


def test_text_examples():
    world, rng = build_world(PROSE, "train", "0"), random.Random(3)
    assert draw(world, "argmax", rng).text.endswith("?") and " ?" not in draw(world, "two_hop", rng).text
    plan = parse_question("What is the birth of the mayor of the capital of Zubora ?")
    assert (plan.op, plan.entities, plan.path) == ("chain", ("Zubora",), ("capital", "mayor", "birth"))
    assert write_question(plan, "prose") == "What is the birth year of the mayor of the capital of Zubora?"
    assert parse_question("Who are you?") is None


def test_subtasks_have_their_gold():
    world = build_world(WorldConfig(), "train", "0")
    country = world.entities["country"][0]
    assert gold_of_subtask(world, f"neighbours of {country.name}") == ", ".join(country.facts["neighbours"])
    assert gold_of_subtask(world, f"What is the capital of {country.name} ?") == country.facts["capital"]
    nested = f"capital of peak of {country.name}"
    for other in (f"height of {country.name}", "capital of Nowhere", "capital", "", nested):
        assert gold_of_subtask(world, other) is None
    for style in ("compact", "prose"):
        assert all(parse_subtask(write_subtask(a, "Tarn", style)) == (a, "Tarn") for a in ATTRIBUTES)
    assert set(KINDS_WITH) == set(ATTRIBUTES)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("larger of 410 and 230", "410"),
        ("greater of 230 and 410", "410"),
        ("What is the larger of 230 and 1410 ?", "1410"),
        ("the largest of 5, 17, and 9.", "17"),
        ("largest of 5 , 17 , 9", "17"),
        ("larger of 410 and 410", "410"),
        ("largest of Kinix 410 and Merova 230 and Tarn 320", "Kinix"),
        ("largest of Kinix 4120 , Merova 4121", "Merova"),
        ("largest of Kinix 410 and Merova 410", None),
        ("larger of 410", None),
        ("larger of 410 and Tarn", None),
        ("largest of Kinix 410 and 230", None),
        ("larger of 410 230", None),
        ("larger of 410 and 230 and", None),
        ("larger area of Kinix and Merova", None),
        ("410 and 230", None),
    ],
)
def test_comparisons_have_their_gold_from_the_text_alone(text, gold):
    world = build_world(WorldConfig(countries=8), "train", "0")
    assert gold_of_subtask(world, text) == gold
    assert parse_subtask(text) is None and parse_question(text) is None


# ---------------------------------------------------------------- reading


def test_reading_hits():
    assert hits_of("Merova p12 ; Tarn river p7") == [("Merova", "p12"), ("Tarn river", "p7")]
    assert hits_of("no results found") == hits_of("tool failed") == hits_of("") == []
    assert hits_of("1. [A (city)](https://x/a)\nA is\n2. [B](u)") == [("A (city)", "https://x/a"), ("B", "u")]


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("Merova from p12", "Merova"),
        ("Merova <source> p12", "Merova"),
        ("A , B , C from p3", "A, B, C"),
        ("Zubora from https://web.local/city/x", "Zubora"),
        ('{"answer": "4120", "sources": ["p1"]}', "4120"),
        ('{"evidence": "x"}', '{"evidence": "x"}'),
        ("{broken", "{broken"),
        ("no answer", "no answer"),
        ("", ""),
    ],
)
def test_reading_answers(content, answer):
    assert answer_of(content) == answer


def test_reading_facts_from_texts_that_are_no_page():
    assert facts_of("no page p7") == facts_of("tool failed") == facts_of("Merova p12 ; Tarn p7") == {}
