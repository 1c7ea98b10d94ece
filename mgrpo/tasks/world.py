"""Tasks from the counterfactual web: a new world for every task, or for every few."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from mgrpo.errors import ConfigError
from mgrpo.tasks.grading import gaia_score
from mgrpo.types import Corpus, Grade, Task, Trajectory
from mgrpo.worlds.names import Split
from mgrpo.worlds.pages import corpus_of
from mgrpo.worlds.questions import (
    FAMILIES,
    FAMILIES_OOD,
    Family,
    Question,
    draw,
    gold_of_subtask,
    parse_question,
    solve,
    write_subtask,
)
from mgrpo.worlds.teacher import Noise, Role, Teacher
from mgrpo.worlds.vocabulary import vocabulary
from mgrpo.worlds.world import World, WorldConfig, build_world

_TASKS = 2**31  # worlds are drawn without end
_CACHED = 64  # worlds and corpora kept, a step of training touches a few dozen
_ONE_SEARCHER: Mapping[str, str] = MappingProxyType({"searcher": "searcher"})
_EVEN: dict[Family, float] = dict.fromkeys(FAMILIES, 1.0)


class NoiseSettings(BaseModel, extra="forbid"):
    """Probabilities of the teacher's wrong decisions, see `mgrpo.worlds.teacher.Noise`."""

    hit: float = Field(default=0.0, ge=0.0, le=1.0)
    attribute: float = Field(default=0.0, ge=0.0, le=1.0)
    delegate: float = Field(default=0.0, ge=0.0, le=1.0)
    skip: float = Field(default=0.0, ge=0.0, le=1.0)
    compare: float = Field(default=0.0, ge=0.0, le=1.0)


class Settings(BaseModel, extra="forbid"):
    """Knobs of `mgrpo.worlds.world.WorldConfig`, and what is asked.

    ``families`` maps a question family to its weight. Split "test_ood" asks the held-out templates of those families
    that have some (two_hop, three_hop, list) and drops the others.
    """

    type: Literal["world"] = "world"
    split: Split = "train"
    families: dict[Family, float] = Field(default=_EVEN, min_length=1)
    tasks_per_world: int = Field(default=1, ge=1)
    countries: int = 24
    names: Literal["word", "syllables"] = "word"
    style: Literal["compact", "prose"] = "compact"
    distractors: int = 0
    dead_links: float = 0.0
    failing_tools: float = 0.0
    shuffle_hits: bool = False
    noise: NoiseSettings = NoiseSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if min(self.families.values()) < 0:
            raise ValueError("families: a weight is negative")
        if not self.asked():
            raise ValueError(f"families: none with weight > 0 is asked in split {self.split!r}")
        try:
            self.world_config()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def asked(self) -> dict[Family, float]:
        """The families that this split asks, with their weights."""
        known = FAMILIES_OOD if self.split == "test_ood" else FAMILIES
        return {family: weight for family, weight in self.families.items() if weight > 0 and family in known}

    def world_config(self) -> WorldConfig:
        return WorldConfig(
            countries=self.countries,
            names=self.names,
            style=self.style,
            distractors=self.distractors,
            dead_links=self.dead_links,
            failing_tools=self.failing_tools,
            shuffle_hits=self.shuffle_hits,
        )

    def vocabulary(self) -> list[str]:
        """Every word of the closed vocabulary; raises ConfigError where these settings write free text."""
        if (self.names, self.style) != ("word", "compact"):
            raise ConfigError('the world has a closed vocabulary only with names = "word" and style = "compact"')
        return vocabulary()

    def build(self, seed: int = 0) -> WorldSource:
        """The source of this run: ``seed`` is the run's."""
        return WorldSource(self, seed)


class WorldSource:
    """Task ``index`` is a pure function of (settings, seed, index). Worlds of different splits share no seed."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._config = settings.world_config()
        self._content = zlib.crc32(repr(self._config).encode())  # two configs make different pages of one seed
        asked = settings.asked()
        self._families, self._weights = list(asked), list(asked.values())
        self._world = lru_cache(_CACHED)(self._build_world)
        self._corpus = lru_cache(_CACHED)(self._build_corpus)

    def __len__(self) -> int:
        return _TASKS

    def task(self, index: int) -> Task:
        if not 0 <= index < _TASKS:
            raise IndexError(f"task {index}: choose 0 to {_TASKS - 1}")
        label = f"{self._seed}-{index // self._settings.tasks_per_world}"
        rng = random.Random(f"question/{self._settings.split}/{self._seed}/{index}")
        (family,) = rng.choices(self._families, self._weights)
        world = self._world(label)
        return _task(f"world-{self._settings.split}-{self._seed}-{index}", draw(world, family, rng), world)

    def corpus(self, task: Task) -> Corpus:
        return self._corpus(str(task.info["world"]))

    def gold(self, task: Task, question: str) -> str | None:
        """The answer to any question about the world of ``task``; None where the world has none."""
        plan = parse_question(question)
        return None if plan is None else solve(self._world(str(task.info["world"])), plan).answer

    def like(self, task: Task, count: int) -> list[Task]:
        """``count`` other questions about the world of ``task``."""
        world, rng = self._world(str(task.info["world"])), random.Random(f"like/{task.id}")
        families = rng.choices(self._families, self._weights, k=count)
        return [_task(f"{task.id}-like-{i}", draw(world, family, rng), world) for i, family in enumerate(families)]

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        """GAIA rules for the root and, for a child, against the gold sub-answer.

        No answer is wrong (0). Unknown: the trajectory failed, or its subtask asks for no fact of the world and for
        no comparison that has an answer.
        """
        if trajectory.failure is not None:
            return Grade(None, f"{trajectory.failure.kind}: {trajectory.failure.message}", "gaia")
        if trajectory.parent is None:
            gold, grader = task.answer, "gaia"
        else:
            gold, grader = gold_of_subtask(self._world(str(task.info["world"])), trajectory.task), "gold_subtask"
        if gold is None:
            return Grade(None, f"no fact or comparison answers the subtask {trajectory.task!r}", grader)
        answered = trajectory.answer is not None and gaia_score(gold, trajectory.answer.answer)
        return Grade(float(answered), grader=grader)

    def teacher(self, role: Role, agents: Mapping[str, str] = _ONE_SEARCHER, seed: int = 0) -> Teacher:
        """A scripted teacher for one agent, with the noise of the settings.

        ``role`` of a sub-agent is its skill; ``agents`` maps a planner's sub-agents to theirs. Raises ConfigError for a
        skill that no teacher has, and for a planner without a searcher.
        """
        return Teacher(role, dict(agents), Noise(**self._settings.noise.model_dump()), seed)

    def _build_world(self, label: str) -> World:
        return build_world(self._config, self._settings.split, label)

    def _build_corpus(self, label: str) -> Corpus:
        return corpus_of(self._world(label), f"world-{self._content:08x}-{self._settings.split}-{label}")


def _task(id: str, question: Question, world: World) -> Task:
    """A task with GAIA's field names, so that whatever reads GAIA records reads it too."""
    steps = [write_subtask(attribute, name, world.config.style) for attribute, name in question.steps]
    pages = [entity.url for attribute, name in question.steps if (entity := world.find(attribute, name))]
    level = min(question.hops, 3)
    info = {
        "task_id": id,
        "Question": question.text,
        "Level": level,
        "Final answer": question.answer,
        "file_name": "",
        "Annotator Metadata": {
            "Steps": "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1)),
            "Number of steps": str(len(steps)),
            "Tools": "search, visit",
        },
        "hops": question.hops,
        "family": question.family,
        "split": world.split,
        "world": world.seed,
        "gold_urls": list(dict.fromkeys(pages)),
    }
    return Task(id, question.text, question.answer, level, info)
