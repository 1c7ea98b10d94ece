"""Search and visit over a corpus."""

from __future__ import annotations

import asyncio

import bm25s
import numpy as np
import pytest

from mgrpo.errors import ConfigError, ToolError
from mgrpo.tools import search, visit
from mgrpo.tools.base import CallContext
from mgrpo.types import Corpus, Page, Task, TrajectoryId
from mgrpo.worlds.pages import corpus_of
from mgrpo.worlds.world import WorldConfig, build_world

TASK = Task("t", "q")
PAGES = [
    Page("u/tarn", "Tarn", "# Tarn\n\nTarn is a peak in Zubora. Its height is 900."),
    Page("u/zubora", "Zubora", "Zubora is a country with the peak [Tarn](u/tarn)."),
    Page("u/lorn", "Lorn", "Lorn is a river."),
    Page("u/gone", "Lorn", ""),
]
CORPUS = Corpus("small", {page.url: page for page in PAGES})


def call(tool, arguments, corpus=CORPUS, turn=0, seed=0):
    context = CallContext(TrajectoryId(0, 0, "searcher", 0), turn, 0, TASK, corpus, seed)
    return asyncio.run(tool(arguments, context))


def test_compact_hits_are_title_then_url():
    result = call(search.Settings().build(), {"query": "Tarn"})
    assert result.text == "Tarn u/tarn ; Zubora u/zubora" and result.error is None


def test_prose_hits_are_numbered_links_with_snippets():
    text = call(search.Settings(style="prose", k=1).build(), {"query": "tarn height"}).text
    assert text == "1. [Tarn](u/tarn)\nTarn is a peak in Zubora. Its height is 900."
    long = Corpus("long", {"u": Page("u", "Word", " ".join(["word"] * 50))})
    assert len(call(search.Settings(style="prose").build(), {"query": "word"}, long).text.split("\n")[1].split()) == 20


@pytest.mark.parametrize("query", ["Qwertz", "Qwertz Asdf", "?!", "<call>", "é"])
def test_unknown_words_find_nothing_and_do_not_crash(query):
    assert call(search.Settings().build(), {"query": query}).text == "no results found"
    assert call(search.Settings(style="prose").build(), {"query": query}).text.startswith("No results found")
    assert call(search.Settings().build(), {"query": f"{query} Tarn"}).text.startswith("Tarn u/tarn")


def test_searching_nothing():
    assert call(search.Settings().build(), {"query": "Tarn"}, Corpus("empty", {})).text == "no results found"
    blank = Corpus("blank", {"u": Page("u", "", "")})
    assert call(search.Settings().build(), {"query": "Tarn"}, blank).text == "no results found"


def test_several_queries_and_urls_at_once():
    both = call(search.Settings(k=1).build(), {"query": ["Lorn river", "Zubora"]})
    assert both.text == "Lorn u/lorn ; Zubora u/zubora"
    prose = call(visit.Settings(style="prose").build(), {"url": ["u/lorn", "u/zubora"], "goal": "peaks"})
    assert prose.text == f"Lorn is a river.\n=======\n{PAGES[1].text}"


@pytest.mark.parametrize("value", [None, "", " ", 7, [], ["Tarn", 7], {"a": 1}])
def test_bad_arguments_are_the_models_mistake(value):
    found = call(search.Settings().build(), {"query": value})
    assert found.error and found.text == "error : search needs a query"
    read = call(visit.Settings().build(), {"url": value})
    assert read.error and read.text == "error : visit needs a url"
    assert call(search.Settings().build(), {}).error


def test_unknown_urls_are_a_mistake_and_dead_ones_are_bad_luck():
    unknown, dead = (call(visit.Settings().build(), {"url": url}) for url in ("u/none", "u/gone"))
    assert unknown.text == "no page u/none" and unknown.error
    assert dead.text == "no page u/gone" and dead.error is None
    assert "no page found at u/gone" in call(visit.Settings(style="prose").build(), {"url": "u/gone"}).text


def test_indexes_are_kept_by_corpus_name_and_let_go_in_turn(monkeypatch):
    built = []
    index = search.Index
    monkeypatch.setattr(search, "Index", lambda pages: built.append(len(pages)) or index(pages))
    monkeypatch.setattr(search, "_INDEXES_KEPT", 2)
    tool = search.Settings().build()
    for name in ("a", "a", "b", "a", "c", "a", "b"):
        call(tool, {"query": "Tarn"}, Corpus(name, CORPUS.pages))
    assert len(built) == 4  # a, b, c, and b once more


def test_the_index_equals_stock_bm25s():
    pages = list(corpus_of(build_world(WorldConfig(), "train", "0"), "c").pages.values())
    ours, stock = search.Index(pages), bm25s.BM25()
    tokens = [f"{page.title} {page.title} {page.text}".lower() for page in pages]
    stock.index([search._WORD.findall(text) for text in tokens], show_progress=False)
    for query in ("zubora", "country", "population", "110"):
        known = np.asarray([ours._words[query]]) if query in ours._words else None
        expected = stock.get_scores([query])
        if known is None:
            assert not expected.any()
        else:
            np.testing.assert_allclose(ours._bm25.get_scores_from_ids(known), expected, rtol=1e-6)


@pytest.mark.parametrize("knobs", [{"dead_links": 0.3}, {"names": "syllables", "style": "prose"}])
def test_the_page_of_a_name_is_among_three_hits(knobs):
    world = build_world(WorldConfig(distractors=20, **knobs), "train", "0")
    index = search.Index(list(corpus_of(world, "c").pages.values()))
    assert all(entity.url in {hit.url for hit in index.hits(entity.name, 3)} for entity in world.all())


def test_shuffled_hits_move_the_best_one_and_stay_put():
    worlds = [build_world(WorldConfig(shuffle_hits=shuffle), "train", "0") for shuffle in (False, True)]
    plain, mixed = (corpus_of(world, f"shuffle-{world.config.shuffle_hits}") for world in worlds)
    tool = search.Settings().build()
    titles = [page.title for page in plain.pages.values()]
    firsts = [call(tool, {"query": title}, mixed).text.startswith(f"{title} ") for title in titles]
    assert 0.15 < sum(firsts) / len(firsts) < 0.75
    assert all(call(tool, {"query": title}, plain).text.startswith(f"{title} ") for title in titles)
    again = call(search.Settings().build(), {"query": titles[0]}, mixed, turn=5)
    assert call(tool, {"query": titles[0]}, mixed) == again


def test_injected_failures_are_tool_errors_keyed_by_the_call():
    corpus = corpus_of(build_world(WorldConfig(failing_tools=0.3), "train", "0"), "failing")
    url = next(iter(corpus.pages))

    def outcomes(tool, arguments, seed):
        failed = []
        for turn in range(60):
            try:
                call(tool, arguments, corpus, turn, seed)
                failed.append(False)
            except ToolError as error:
                assert tool.name in str(error)
                failed.append(True)
        return failed

    for tool, arguments in ((search.Settings().build(), {"query": "Tarn"}), (visit.Settings().build(), {"url": url})):
        assert 5 < sum(outcomes(tool, arguments, 0)) < 35
        assert outcomes(tool, arguments, 0) == outcomes(tool, arguments, 0) != outcomes(tool, arguments, 1)


def test_a_task_without_corpus_is_a_wrong_recipe():
    for tool, arguments in ((search.Settings().build(), {"query": "a"}), (visit.Settings().build(), {"url": "a"})):
        with pytest.raises(ConfigError, match="no corpus"):
            call(tool, arguments, None)


def test_schemas_name_their_required_argument():
    for tool, required in ((search.Settings().build(), "query"), (visit.Settings().build(), "url")):
        assert tool.parameters["type"] == "object" and tool.parameters["required"] == [required]
        assert required in tool.parameters["properties"] and tool.description
