"""Pages of a world, in two renderings, and the faults that a world injects into its tools.

"compact", for closed vocabularies, attribute word then value, attributes in a random order per page::

    Merova : city . population 4120 . founded 1512 . mayor Kelvo . country Zubora .

"prose", markdown::

    # Merova

    Merova is a city.

    The population of Merova is 4120. Its founding year is 1512. Its mayor is [Kelvo](https://web.local/person/kelvo).

    See also: [Zubora](https://web.local/country/zubora)
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from mgrpo.types import Corpus, Page
from mgrpo.worlds.schema import NUMBER, SCHEMA, Value, phrase_of
from mgrpo.worlds.world import Entity, World

T = TypeVar("T")


class WorldPages(Mapping[str, Page]):
    """Pages by URL, with the world's faults at hand. A page without text is indexed but cannot be fetched."""

    def __init__(self, pages: Mapping[str, Page], failing_tools: float = 0.0, shuffle_hits: bool = False) -> None:
        self._pages = pages
        self.failing_tools = failing_tools
        self.shuffle_hits = shuffle_hits

    def __getitem__(self, url: str) -> Page:
        return self._pages[url]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def fails(self, key: str) -> bool:
        """Whether the call named ``key`` meets an infrastructure failure: always the same answer for one key."""
        return self.failing_tools > 0 and zlib.crc32(key.encode()) < self.failing_tools * 2**32

    def order(self, hits: Sequence[T], key: str) -> list[T]:
        """Best first, or in an order that depends on ``key`` (world and query) alone."""
        return random.Random(key).sample(hits, len(hits)) if self.shuffle_hits else list(hits)


def corpus_of(world: World, name: str) -> Corpus:
    """All pages of ``world``, mirrors included, as the corpus called ``name``."""
    rng = random.Random(f"pages/{world.split}/{world.seed}")
    write = _compact if world.config.style == "compact" else _prose
    pages: dict[str, Page] = {}
    for entity in world.all():
        page = write(world, entity, rng)
        pages[page.url] = page
        if entity.mirror is not None:
            pages[entity.mirror] = Page(entity.mirror, page.title, "")
    return Corpus(name, WorldPages(pages, world.config.failing_tools, world.config.shuffle_hits))


def _shuffled(entity: Entity, rng: random.Random) -> list[tuple[str, Value]]:
    facts = list(entity.facts.items())
    rng.shuffle(facts)
    return facts


def _compact(world: World, entity: Entity, rng: random.Random) -> Page:
    parts = [f"{entity.name} : {entity.kind} ."]
    linked: list[str] = []
    for attribute, value in _shuffled(entity, rng):
        parts.append(f"{attribute} {value if isinstance(value, str) else ' , '.join(value)} .")
        linked += _targets(entity, attribute, value)
    return Page(entity.url, entity.title("compact"), " ".join(parts), _urls(world, linked))


def _prose(world: World, entity: Entity, rng: random.Random) -> Page:
    sentences: list[str] = []
    linked: list[str] = []
    for attribute, value in _shuffled(entity, rng):
        targets = _targets(entity, attribute, value)
        linked += targets
        subject = "Its" if sentences and rng.random() < 0.7 else "The"
        owner = "" if subject == "Its" else f" of {entity.name}"
        verb = "is" if isinstance(value, str) else "are"
        said = ", ".join(f"[{target}]({_main(world, target).url})" for target in targets) or value
        sentences.append(f"{subject} {phrase_of(attribute, 'prose')}{owner} {verb} {said}.")
    body = f"# {entity.title('prose')}\n\n{entity.name} is a {entity.kind}.\n\n{' '.join(sentences)}"
    more = [_main(world, name) for name in dict.fromkeys(linked)]
    also = ", ".join(f"[{other.name}]({other.mirror or other.url})" for other in more)
    return Page(entity.url, entity.title("prose"), f"{body}\n\nSee also: {also}", _urls(world, linked))


def _targets(entity: Entity, attribute: str, value: Value) -> tuple[str, ...]:
    """Names that the fact refers to."""
    if SCHEMA[entity.kind][attribute] == NUMBER:
        return ()
    return (value,) if isinstance(value, str) else value


def _main(world: World, name: str) -> Entity:
    """Facts refer to the first thing of a name; namesakes come after it."""
    return world.by_name[name][0]


def _urls(world: World, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_main(world, name).url for name in names))
