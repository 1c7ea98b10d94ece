"""The scripted teacher solves every family through the real tools, from the transcript alone."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import get_args

import pytest

from mgrpo.errors import ConfigError
from mgrpo.tasks.world import Settings
from mgrpo.tools import search, visit
from mgrpo.tools.base import CallContext
from mgrpo.types import Failure, Findings, Message, Parent, Reply, ToolCall, Trajectory, TrajectoryId
from mgrpo.worlds.questions import FAMILIES, FAMILIES_OOD
from mgrpo.worlds.teacher import Noise, Role, Teacher
from mgrpo.worlds.vocabulary import vocabulary

ROOT = TrajectoryId(0, 0, "planner", 0)
PIECES = re.compile(r"\w+|[^\w\s]")


class Play:
    """A minimal stand-in for the agent loop: a teacher for every role, the real tools, texts only."""

    def __init__(self, settings, teacher_seed=0, agents=("searcher",)):
        self.source = settings.build(0)
        self.seed = teacher_seed
        self.agents = dict(zip(agents, agents, strict=True))
        self.called: Counter[str] = Counter()
        tools = (search.Settings(style=settings.style).build(), visit.Settings(style=settings.style).build())
        self.tools = {tool.name: tool for tool in tools}
        self.texts: list[str] = []

    async def run(self, role, asks, task, id):
        teacher, messages = self.source.teacher(role, self.agents, self.seed), [Message("user", asks)]
        for turn in range(40):
            reply = teacher(id, messages)
            assert reply == teacher(id, messages)
            if reply.answer is not None:
                self.texts += [asks, reply.answer.answer]
                return reply.answer
            messages.append(Message("assistant", "whatever the chat renders"))
            for call, asked in enumerate(reply.calls):
                context = CallContext(id, turn, call, task, self.source.corpus(task))
                text = await self.call(asked, context, f"{id.invocation}{turn}{call}")
                messages.append(Message("tool", text, asked.name))
        raise AssertionError(f"{task.question} is not answered in 40 turns")

    async def call(self, asked, context, invocation):
        self.called[asked.name] += 1
        self.texts += [str(value) for value in asked.arguments.values()]
        if asked.name in self.tools:
            text = (await self.tools[asked.name](asked.arguments, context)).text
        else:
            child = TrajectoryId(context.id.group, 0, asked.name, int(invocation))
            found = await self.run(asked.name, asked.arguments["task"], context.task, child)
            text = f"{found.answer} from {found.sources[0]}" if found.sources else found.answer
        self.texts.append(text)
        return text

    def score(self, role, indexes):
        async def grades():
            for index in indexes:
                task = self.source.task(index)
                id = TrajectoryId(index, 0, role, 0)
                trajectory = Trajectory(id, task.question, (), "answer", await self.run(role, task.question, task, id))
                yield (await self.source.grade(task, trajectory)).value

        async def total():
            return [grade async for grade in grades()]

        return asyncio.run(total())


THREE = ("searcher", "comparer")
HARD = {"distractors": 25, "dead_links": 0.2, "shuffle_hits": True}


@pytest.mark.parametrize("role", ["planner", "solo"])
@pytest.mark.parametrize("knobs", [{}, HARD, {"names": "syllables", "style": "prose", **HARD}])
@pytest.mark.parametrize("split", ["train", "test_ood"])
def test_without_noise_every_family_is_solved(role, knobs, split):
    for family in FAMILIES_OOD if split == "test_ood" else FAMILIES:
        settings = Settings(split=split, families={family: 1.0}, tasks_per_world=6, **knobs)
        assert Play(settings).score(role, range(12)) == [1.0] * 12, family


@pytest.mark.parametrize("knobs", [{}, {"names": "syllables", "style": "prose", **HARD}])
def test_the_comparer_is_asked_once_in_every_comparison_and_never_else(knobs):
    for family in FAMILIES:
        play = Play(Settings(families={family: 1.0}, tasks_per_world=6, **knobs), agents=THREE)
        assert play.score("planner", range(12)) == [1.0] * 12, family
        assert play.called["comparer"] == (12 if family in ("compare", "argmax") else 0), family


@pytest.mark.parametrize("noise", [{}, {"hit": 0.5, "attribute": 0.5, "delegate": 0.3, "skip": 0.2, "compare": 0.5}])
@pytest.mark.parametrize("split", ["train", "dev", "test", "test_ood"])
def test_the_closed_vocabulary_covers_everything_said(noise, split):
    play = Play(Settings(split=split, noise=noise, dead_links=0.2, distractors=30, tasks_per_world=4), agents=THREE)
    play.score("planner", range(24))
    play.score("solo", range(24))
    pages = play.source.corpus(play.source.task(0)).pages.values()
    said = {piece for text in (*play.texts, *(page.text for page in pages)) for piece in PIECES.findall(text)}
    assert said <= set(vocabulary())


@pytest.mark.parametrize(
    ("kind", "family"),
    [("hit", "two_hop"), ("attribute", "two_hop"), ("delegate", "two_hop"), ("skip", "two_hop"), ("compare", "argmax")],
)
def test_each_noise_hurts_and_is_keyed_by_the_seed(kind, family):
    settings = Settings(noise={kind: 0.6}, families={family: 1.0}, tasks_per_world=4)
    scores = Play(settings, agents=THREE).score("planner", range(40))
    assert 0 < sum(scores) < 32
    assert scores == Play(settings, agents=THREE).score("planner", range(40))
    assert scores != Play(settings, 1, THREE).score("planner", range(40))


def test_skip_may_answer_without_delegating():
    reply = Teacher("planner", noise=Noise(skip=1.0))(ROOT, [Message("user", "What is the area of Tarn ?")])
    assert reply.answer == Findings("unknown")


def test_a_fan_out_asks_all_agents_in_one_turn():
    teacher = Teacher("planner", {"left": "searcher", "judge": "comparer", "right": "searcher"})
    asked = [Message("user", "Which neighbour of Tarn has the largest area ?"), Message("assistant", "")]
    reply = teacher(ROOT, [*asked, Message("tool", "Merova , Zubora , Lorn from p3", "left")])
    assert [call.name for call in reply.calls] == ["left", "right", "left"]
    assert [call.arguments["task"] for call in reply.calls] == ["area of Merova", "area of Zubora", "area of Lorn"]


def heard(teacher, asked, *texts):
    """The teacher's turn on a question, once each of ``texts`` came back in a turn of its own or of several calls."""
    turns = [[Message("assistant", ""), *(Message("tool", text) for text in turn)] for turn in texts]
    return teacher(ROOT, [Message("user", asked), *(message for turn in turns for message in turn)])


def test_a_comparison_goes_to_the_first_comparer_with_what_the_searchers_found():
    teacher = Teacher("planner", {"judge": "comparer", "finder": "searcher", "other": "comparer"})
    larger = "What is the greater height of Tarn and Merova ?"
    found = ["410 from p3", "230 from p4"]
    assert heard(teacher, larger, found).calls == (ToolCall("judge", {"task": "greater of 410 and 230"}),)
    assert heard(teacher, larger, found, ["230"]).answer == Findings("230")  # believed, right or wrong
    which = "Which neighbour of Tarn has the largest area ?"
    reply = heard(teacher, which, ["Kinix , Merova from p1"], found)
    assert reply.calls[0].arguments == {"task": "largest of Kinix 410 and Merova 230"}
    assert heard(teacher, which, ["Kinix , Merova from p1"], found, ["Merova"]).answer == Findings("Merova")


@pytest.mark.parametrize("found", [["410 from p3", "unknown"], ["Kinix from p3", "230"]])
def test_what_is_no_number_is_compared_without_the_comparer(found):
    teacher = Teacher("planner", {"searcher": "searcher", "comparer": "comparer"})
    numbers = [text.split()[0] for text in found if text[0].isdigit()]
    assert heard(teacher, "What is the larger area of Tarn and Merova ?", found).answer == Findings(numbers[0])


def test_skip_may_answer_without_comparing():
    teacher = Teacher("planner", {"s": "searcher", "c": "comparer"}, Noise(skip=0.5))
    asked = [Message("user", "What is the larger area of Tarn and Merova ?"), Message("assistant", "")]
    back = [*asked, Message("tool", "410 from p3"), Message("tool", "230 from p4")]
    replies = [teacher(TrajectoryId(group, 0, "planner", 0), back) for group in range(60)]
    compares = [reply for reply in replies if reply.calls]
    assert 10 < len(compares) < 50
    assert {reply.answer.answer for reply in replies if reply.answer} == {"230", "unknown"}  # the last, or none at all


def test_a_comparer_answers_at_once_and_says_when_it_cannot():
    comparer = Teacher("comparer", noise=Noise(compare=1.0))
    for subtask, right, wrong in (("larger of 410 and 230", "410", "230"), ("largest of A 5 and B 7", "B", "A")):
        asked = [Message("user", f"{subtask}\n\ncontext: heights")]
        assert Teacher("comparer")(ROOT, asked) == Reply(answer=Findings(right))
        assert Teacher("comparer")(ROOT, [*asked, Message("user", "answer now")]) == Reply(answer=Findings(right))
        assert comparer(ROOT, asked) == Reply(answer=Findings(wrong))
    for subtask in ("area of Tarn", "larger of 410", "largest of A 5 and B 5"):
        assert comparer(ROOT, [Message("user", subtask)]) == Reply(answer=Findings("unknown"))


def test_a_request_to_stop_is_answered_with_what_is_there():
    asked = [Message("user", "What is the area of the peak of Tarn ?"), Message("assistant", "")]
    heard = [*asked, Message("tool", "Merova from p3", "searcher"), Message("user", "answer now")]
    assert Teacher("planner")(ROOT, heard).answer == Findings("Merova")
    read = [Message("user", "area of Tarn"), Message("tool", "Tarn p3"), Message("tool", "Tarn : peak . height 110 .")]
    assert Teacher("searcher")(ROOT, [*read, Message("user", "answer now")]).answer == Findings("110")
    assert Teacher("searcher")(ROOT, [read[0], Message("user", "answer now")]).answer == Findings("unknown")


@pytest.mark.parametrize("text", ["no results found", "tool failed", "", "error : search needs a query"])
def test_a_searcher_that_finds_nothing_says_so(text):
    messages = [Message("user", "area of Tarn"), Message("assistant", ""), Message("tool", text, "search")]
    assert Teacher("searcher")(ROOT, messages).answer == Findings("unknown")


def test_a_context_behind_the_subtask_is_no_part_of_it():
    reply = Teacher("searcher")(ROOT, [Message("user", "area of Tarn\n\ncontext: a country")])
    assert reply.calls[0].arguments == {"query": "Tarn"}


def test_a_dead_link_is_followed_by_the_next_hit_of_that_title():
    hits = Message("tool", "Tarn p3 ; Merova p9 ; Tarn p4")
    messages = [Message("user", "area of Tarn"), hits, Message("tool", "no page p3")]
    assert Teacher("searcher")(ROOT, messages).calls[0].arguments == {"url": "p4"}


def test_what_the_teacher_does_not_understand_is_unknown():
    for role in get_args(Role):
        assert Teacher(role)(ROOT, [Message("user", "Sing a song.")]).answer == Findings("unknown")
    with pytest.raises(ValueError, match="user message"):
        Teacher("solo")(ROOT, [])


@pytest.mark.parametrize(
    ("role", "agents", "complaint"),
    [
        ("planner", {}, "searcher"),
        ("planner", {"judge": "comparer"}, "searcher"),
        ("planner", {"judge": "comparrer"}, "comparrer.*searcher and comparer"),
        ("planner", {"other": "planner"}, "'planner'.*searcher and comparer"),
        ("comparrer", {}, "comparrer.*searcher and comparer"),
    ],
)
def test_a_team_that_no_teacher_can_play_is_refused(role, agents, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Settings().build(0).teacher(role, agents)


# ---------------------------------------------------------------- the task source


def grade(source, task, trajectory):
    return asyncio.run(source.grade(task, trajectory))


def test_tasks_are_a_function_of_settings_seed_and_index():
    first, second = Settings().build(5), Settings().build(5)
    assert [first.task(i) for i in (3, 0, 3)] == [second.task(i) for i in (3, 0, 3)]
    assert first.task(0) != Settings().build(6).task(0)
    assert len(first) == 2**31
    assert len({first.task(i).id for i in range(50)}) == 50
    assert len({first.task(i).info["world"] for i in range(50)}) == 50
    shared = Settings(tasks_per_world=10).build(5)
    assert len({shared.task(i).info["world"] for i in range(50)}) == 5
    with pytest.raises(IndexError, match="choose"):
        first.task(-1)


def test_a_corpus_is_named_by_its_content():
    source = Settings(tasks_per_world=2).build(0)
    assert source.corpus(source.task(0)) is source.corpus(source.task(1))
    others = [Settings(**knobs).build(0) for knobs in ({"split": "dev"}, {"split": "test"}, {"dead_links": 0.1})]
    assert len({other.corpus(other.task(0)).name for other in (source, *others)}) == 4


def test_records_carry_gaia_fields_and_their_gold_pages():
    source = Settings(families={"argmax": 1.0}).build(0)
    task = source.task(0)
    assert {"task_id", "Question", "Level", "Final answer", "file_name", "Annotator Metadata"} <= task.info.keys()
    assert (task.info["Final answer"], task.info["Level"], task.info["hops"]) == (task.answer, 3, 3)
    pages = source.corpus(task).pages
    assert all(pages[url].text for url in task.info["gold_urls"]) and len(task.info["gold_urls"]) >= 3
    assert task.answer in {pages[url].title for url in task.info["gold_urls"]}


def test_grades_of_roots_and_children():
    source = Settings(families={"two_hop": 1.0}).build(0)
    task = source.task(0)
    child = TrajectoryId(0, 0, "searcher", 0)
    subtask = task.info["Annotator Metadata"]["Steps"].splitlines()[-1].split(". ", 1)[1]

    def run(id, text, answer, parent=None, failure=None):
        found = None if answer is None else Findings(answer)
        return Trajectory(id, text, (), "answer", found, parent, failure=failure)

    assert grade(source, task, run(ROOT, task.question, task.answer)).value == 1.0
    assert grade(source, task, run(ROOT, task.question, "wrong")).value == 0.0
    assert grade(source, task, run(ROOT, task.question, None)).value == 0.0
    parent = Parent(ROOT, 0, 0)
    assert grade(source, task, run(child, subtask, task.answer, parent)).value == 1.0
    assert grade(source, task, run(child, subtask, "wrong", parent)).value == 0.0
    for text in ("sing a song", "larger of 410", "largest of Tarn 410 and Merova 410"):
        unknown = grade(source, task, run(child, text, "410", parent))
        assert unknown.value is None and text in unknown.cause
    comparer = TrajectoryId(0, 0, "comparer", 0)
    assert grade(source, task, run(comparer, "larger of 230 and 410", "410", parent)).value == 1.0
    assert grade(source, task, run(comparer, "larger of 230 and 410", "230", parent)).value == 0.0
    failed = grade(source, task, run(ROOT, task.question, None, failure=Failure("ToolTimeout", "search: 5 s")))
    assert failed.value is None and "ToolTimeout" in failed.cause


@pytest.mark.parametrize(
    "knobs",
    [
        {"families": {"sums": 1.0}},
        {"families": {}},
        {"families": {"one_hop": 0.0}},
        {"families": {"one_hop": -1.0, "two_hop": 2.0}},
        {"families": {"one_hop": 1.0}, "split": "test_ood"},
        {"countries": 90},
        {"noise": {"hit": 2}},
        {"noise": {"compare": -1}},
        {"colour": "red"},
    ],
)
def test_bad_settings_are_refused(knobs):
    with pytest.raises(ValueError, match=r"families|world|hit|compare|colour"):
        Settings(**knobs)


def test_only_closed_worlds_have_a_vocabulary():
    assert Settings().vocabulary() == vocabulary()
    with pytest.raises(ConfigError, match="closed vocabulary"):
        Settings(style="prose").vocabulary()
