"""Properties of worlds over seeds, and what can be known without reading them."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.tasks.grading import gaia_score
from mgrpo.tasks.world import Settings
from mgrpo.worlds.comparisons import parse_comparison, write_comparison
from mgrpo.worlds.names import WORD_NAMES, Split
from mgrpo.worlds.pages import corpus_of
from mgrpo.worlds.questions import FAMILIES, FAMILIES_OOD, draw, gold_of_subtask, solve, write_subtask
from mgrpo.worlds.world import WorldConfig, build_world

splits = st.sampled_from(get_args(Split))
WORLD = build_world(WorldConfig(countries=8), "train", "0")
configs = st.builds(
    WorldConfig,
    countries=st.integers(8, 14),
    names=st.sampled_from(["word", "syllables"]),
    style=st.sampled_from(["compact", "prose"]),
    distractors=st.integers(0, 40),
    dead_links=st.floats(0, 0.5),
    shuffle_hits=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(configs, splits, st.text(max_size=8))
def test_the_same_seed_gives_the_same_world_and_another_seed_another(config, split, seed):
    first, second = (build_world(config, split, seed) for _ in range(2))
    assert first == second
    assert dict(corpus_of(first, "c").pages) == dict(corpus_of(second, "c").pages)
    assert first != build_world(config, split, seed + "'")
    assert first.by_name != build_world(config, "dev" if split != "dev" else "train", seed).by_name


@settings(max_examples=25, deadline=None)
@given(configs, splits, st.integers(0, 10**6))
def test_answers_score_against_themselves_and_against_no_other_gold(config, split, seed):
    world, rng = build_world(config, split, str(seed)), random.Random(seed)
    families = FAMILIES_OOD if split == "test_ood" else FAMILIES
    questions = [draw(world, family, rng) for family in families for _ in range(4)]
    for question in questions:
        assert gaia_score(question.answer, question.answer)
        assert solve(world, question.plan).answer == question.answer
        for other in questions:
            assert gaia_score(question.answer, other.answer) == (question.answer == other.answer)
        for attribute, name in question.steps:
            assert gold_of_subtask(world, write_subtask(attribute, name, config.style)) is not None


numbers = st.lists(st.integers(0, 10**9), min_size=2, max_size=5)


@settings(max_examples=50, deadline=None)
@given(numbers, st.booleans(), st.sampled_from(["larger", "greater", "largest"]))
def test_a_written_comparison_is_read_back_and_answered_by_its_only_maximum(values, named, comparative):
    labels = list(WORD_NAMES[: len(values)]) if named else [str(value) for value in values]
    items = [f"{label} {value}" if named else label for label, value in zip(labels, values, strict=True)]
    text = write_comparison(comparative, items)
    assert parse_comparison(text) == list(zip(labels, values, strict=True))
    winners = {label for label, value in zip(labels, values, strict=True) if value == max(values)}
    assert gold_of_subtask(WORLD, text) == (winners.pop() if len(winners) == 1 else None)


def template_of(question):
    """The question with its names taken out."""
    return re.sub(r"\b(?:" + "|".join(WORD_NAMES) + r")\b", "_", question)


def closed_book(family, split, tasks):
    source = Settings(split=split, families={family: 1.0}, tasks_per_world=3).build(0)
    return [(template_of(task.question), task.answer) for task in map(source.task, range(tasks))]


def test_without_tools_there_is_only_guessing():
    """Answers learnt from 600 training tasks, most frequent by template, then asked on unseen worlds."""
    for family in FAMILIES:
        seen = closed_book(family, "train", 600)
        by_template = defaultdict(Counter)
        for template, answer in seen:
            by_template[template][answer] += 1
        assert Counter(answer for _, answer in seen).most_common(1)[0][1] / len(seen) <= 0.05, family
        guess = {template: answers.most_common(1)[0][0] for template, answers in by_template.items()}
        unseen = closed_book(family, "test", 300)
        right = sum(gaia_score(answer, guess.get(template, "")) for template, answer in unseen)
        assert right / len(unseen) <= 0.05, family


def test_splits_share_no_task_and_no_world():
    tasks = {split: [Settings(split=split).build(0).task(i) for i in range(60)] for split in ("train", "dev", "test")}
    texts = {split: {(task.question, task.answer) for task in found} for split, found in tasks.items()}
    assert not texts["train"] & texts["test"] and not texts["train"] & texts["dev"] and not texts["dev"] & texts["test"]
