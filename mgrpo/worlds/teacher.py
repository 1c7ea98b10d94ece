"""A scripted teacher: it acts on the transcript alone, with the grammar but no facts in its head.

Each role is a generator that yields the calls of a turn, is sent the texts that came back, and returns its findings.
`Teacher` replays it over the tool messages seen so far. A turn's noise is keyed by (seed, trajectory, turn), so the
replay meets the same decisions again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from mgrpo.errors import ConfigError
from mgrpo.types import Findings, Message, Reply, ToolCall, TrajectoryId
from mgrpo.worlds.comparisons import largest, parse_comparison, write_comparison
from mgrpo.worlds.questions import COMPARATIVES, Plan, parse_question, parse_subtask, write_subtask
from mgrpo.worlds.reading import UNKNOWN, answer_of, facts_of, hits_of, number_of
from mgrpo.worlds.schema import ATTRIBUTES, KINDS, KINDS_WITH, SCHEMA

Role = Literal["planner", "solo", "searcher", "comparer"]
SKILLS: tuple[Role, ...] = ("searcher", "comparer")  # what a sub-agent can be played as
Calls = tuple[ToolCall, ...]
Texts = Sequence[str]
Ask = Callable[[Sequence[tuple[str, str]]], Generator[Calls, Texts, list[str]]]  # (attribute, name) -> answers


@dataclass(frozen=True, slots=True)
class Noise:
    """Probabilities of a wrong decision; copying is never noisy.

    ``hit`` opens another hit, ``attribute`` reads another value of the page, ``delegate`` asks for another attribute
    of the same thing, ``skip`` answers with what is there instead of asking on, ``compare`` names another of the
    compared.
    """

    hit: float = 0.0
    attribute: float = 0.0
    delegate: float = 0.0
    skip: float = 0.0
    compare: float = 0.0


class _Done(Exception):
    """The planner answers early."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A searcher and a solo agent search and visit, a comparer only answers, a planner delegates.

    ``agents`` are the planner's: tool -> what plays it. Look-ups go to the searchers in turn, a comparison to the first
    comparer; without one the planner compares by itself.
    """

    role: Role
    agents: Mapping[str, str] = field(default_factory=lambda: {"searcher": "searcher"})
    noise: Noise = Noise()
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [skill for skill in self.agents.values() if skill not in SKILLS]
        if unknown or self.role not in get_args(Role):
            known = " and ".join(SKILLS)
            raise ConfigError(f"skill {(unknown or [self.role])[0]!r}: the teacher of a world has {known}")
        if self.role == "planner" and not self.played_as("searcher"):
            raise ConfigError("the teacher of a planner needs a sub-agent with skill 'searcher' to look things up")

    def played_as(self, skill: Role) -> list[str]:
        return [name for name, played in self.agents.items() if played == skill]

    def __call__(self, id: TrajectoryId, messages: Sequence[Message]) -> Reply:
        """The next turn. A second user message asks to stop: the reply is then an answer."""
        users = [message.content for message in messages if message.role == "user"]
        texts = [message.content for message in messages if message.role == "tool"]
        if not users:
            raise ValueError(f"{id}: the teacher needs a user message that asks something")
        run = _Run(self, id, _style_of(users[0]))
        if self.role == "comparer":
            return Reply(answer=run.compared(users[0]))
        if messages[-1].role == "user" and len(users) > 1:
            return Reply(answer=run.best_of(texts))
        return run.replay(users[0], texts)


def _style_of(text: str) -> str:
    """The style of a question: only compact sets its last mark apart. Subtasks are worded in the same style."""
    return "compact" if text.rstrip().endswith((" ?", " .")) else "prose"


class _Run:
    """One trajectory, replayed from its start."""

    def __init__(self, teacher: Teacher, id: TrajectoryId, style: str) -> None:
        self.teacher, self.id, self.style, self.turn = teacher, id, style, 0
        self.best = UNKNOWN  # what an early answer would be
        self.thought = ""  # quoted before acting on it: a short quotation is easier to copy from than a long text
        self._draws: random.Random | None = None

    def replay(self, task: str, texts: Sequence[str]) -> Reply:
        script = self._searcher(task) if self.teacher.role == "searcher" else self._planner(task)
        try:
            calls = next(script)
            while texts:
                self.turn, self._draws, self.thought = self.turn + 1, None, ""
                received, texts = texts[: len(calls)], texts[len(calls) :]
                calls = script.send(received)
        except StopIteration as end:
            return Reply(self.thought, answer=end.value)
        return Reply(self.thought, calls)

    def best_of(self, texts: Sequence[str]) -> Findings:
        """The answer when the turns are over: the last value that was seen."""
        for text in reversed(texts):
            if self.teacher.role == "planner":
                return Findings(answer_of(text) or UNKNOWN)
            if facts := facts_of(text):
                return Findings(next(iter(facts.values())))
        return Findings(UNKNOWN)

    # ------------------------------------------------------------ noise

    def errs(self, probability: float) -> bool:
        return probability > 0 and self.draws.random() < probability

    @property
    def draws(self) -> random.Random:
        if self._draws is None:
            self._draws = random.Random(f"{self.teacher.seed}/{self.id}/{self.turn}")
        return self._draws

    def other(self, choices: Sequence[str], right: str) -> str:
        """A wrong choice, or the right one where there is no other."""
        return self.draws.choice([choice for choice in choices if choice != right] or [right])

    # ------------------------------------------------------------ planner and solo

    def _planner(self, question: str) -> Generator[Calls, Texts, Findings]:
        plan = parse_question(question)
        if plan is None:
            return Findings(UNKNOWN)
        ask = self._delegate if self.teacher.role == "planner" else self._find_all
        try:
            return Findings((yield from self._follow(plan, ask)))
        except _Done:
            return Findings(self.best)

    def _follow(self, plan: Plan, ask: Ask) -> Generator[Calls, Texts, str]:
        names = list(plan.entities)
        if plan.op == "chain":
            for attribute in plan.path:
                names = yield from ask([(attribute, names[0])])
            return names[0]
        if plan.op != "max":
            near = yield from ask([(plan.path[0], names[0])])
            names = near[0].split(", ")
        values = yield from ask([(plan.path[-1], name) for name in names])
        if plan.op == "list":
            return ", ".join(sorted(values))
        return (yield from self._compare(plan, names, values))

    def _compare(self, plan: Plan, names: Sequence[str], values: Sequence[str]) -> Generator[Calls, Texts, str]:
        """The largest value, or whose it is. What are no numbers no comparer can compare."""
        named = plan.op == "argmax"
        comparative = "largest" if named else COMPARATIVES.get(plan.path[-1], "larger")
        items = [f"{name} {value}" for name, value in zip(names, values, strict=True)] if named else values
        task = write_comparison(comparative, items)
        comparers = self.teacher.played_as("comparer") if self.teacher.role == "planner" else []
        if not comparers or parse_comparison(task) is None:
            best = max(range(len(values)), key=lambda i: number_of(values[i]))
            return names[best] if named else values[best]
        if self.errs(self.teacher.noise.skip):
            raise _Done
        (text,) = yield (ToolCall(comparers[0], {"task": task}),)
        return answer_of(text) or UNKNOWN

    def _delegate(self, wanted: Sequence[tuple[str, str]]) -> Generator[Calls, Texts, list[str]]:
        """All sub-questions of a turn at once, spread over the sub-agents."""
        noise, agents = self.teacher.noise, self.teacher.played_as("searcher")
        if self.errs(noise.skip):
            raise _Done
        calls = []
        for i, (attribute, name) in enumerate(wanted):
            asked = self.other(_siblings(attribute), attribute) if self.errs(noise.delegate) else attribute
            calls.append(ToolCall(agents[i % len(agents)], {"task": write_subtask(asked, name, self.style)}))
        answers = [answer_of(text) or UNKNOWN for text in (yield tuple(calls))]
        self.best = answers[-1]
        return answers

    def _find_all(self, wanted: Sequence[tuple[str, str]]) -> Generator[Calls, Texts, list[str]]:
        """One look-up after another: a solo agent reads every page itself."""
        answers = []
        for attribute, name in wanted:
            if self.errs(self.teacher.noise.skip):
                raise _Done
            found = yield from self._find(attribute, name)
            self.best = found.answer
            answers.append(found.answer)
        return answers

    # ------------------------------------------------------------ comparer

    def compared(self, task: str) -> Findings:
        items = parse_comparison(_asked(task))
        right = None if items is None else largest(items)
        if items is None or right is None:
            return Findings(UNKNOWN)
        wrong = self.errs(self.teacher.noise.compare)
        return Findings(self.other([answer for answer, _ in items], right) if wrong else right)

    # ------------------------------------------------------------ searcher

    def _searcher(self, task: str) -> Generator[Calls, Texts, Findings]:
        parsed = parse_subtask(_asked(task))
        return Findings(UNKNOWN) if parsed is None else (yield from self._find(*parsed))

    def _find(self, attribute: str, name: str) -> Generator[Calls, Texts, Findings]:
        """Search, open the hit of that title, read; on a dead link the next hit."""
        noise = self.teacher.noise
        (listed,) = yield (ToolCall("search", {"query": name}),)
        hits = sorted(hits_of(listed), key=lambda hit: _mismatch(hit[0], name, attribute))
        titles = {url: title for title, url in hits}
        urls = [url for _, url in hits]
        while urls:
            url = self.other(urls, urls[0]) if self.errs(noise.hit) else urls[0]
            urls.remove(url)
            self.thought = f"{titles[url]} {url}"
            (text,) = yield (ToolCall("visit", {"url": url}),)
            if facts := facts_of(text):
                read = self.other(list(facts), attribute) if self.errs(noise.attribute) else attribute
                read = read if read in facts else next(iter(facts))
                self.thought = f"{read} {facts[read]}"
                return Findings(facts[read], sources=(url,))
        return Findings(UNKNOWN)


def _asked(task: str) -> str:
    """The subtask itself: a context may follow it."""
    return task.strip().partition("\n")[0]


def _siblings(attribute: str) -> list[str]:
    """Attributes of the kinds that have ``attribute``."""
    return [sibling for sibling in ATTRIBUTES if any(sibling in SCHEMA[kind] for kind in KINDS_WITH[attribute])]


def _mismatch(title: str, name: str, attribute: str) -> int:
    """0 for the title that should hold the fact, more for worse ones. A title may carry a kind, see `Entity.title`."""
    words = title.replace("(", "").replace(")", "").split()
    if words[:1] != [name]:
        return 3
    kinds = [kind for kind in KINDS if kind in words[1:]]
    if not kinds:
        return 1
    return 0 if kinds[0] in KINDS_WITH[attribute] else 2
