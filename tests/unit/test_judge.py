"""The judge: grades, what they cost, and how it fails; over HTTP where that matters, else by an engine in memory."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, completion, refusal, serving
from judge_samples import GOOD, QUOTED, TASK, done
from pydantic import ValidationError

from mgrpo.engines.chat import ChatReply
from mgrpo.engines.openai import OpenAI
from mgrpo.engines.openai import Settings as EngineSettings
from mgrpo.errors import ConfigError, EngineError
from mgrpo.tasks.judge import Judge, Settings
from mgrpo.tasks.rubric import RUBRIC
from mgrpo.types import Failure, Grade, Message, Trajectory

ENGINE = {"type": "openai", "model": "judge-1", "base_url": "http://127.0.0.1:1/v1"}


class Engine:
    """Replies in turn, the last one again and again; an exception is raised, a number of seconds is waited."""

    identity = model = "judge-1"
    retries = 0

    def __init__(self, *replies: str | ChatReply | Exception | float) -> None:
        self._replies = list(replies)
        self.asked: list[Sequence[Message]] = []
        self.busiest = self._busy = 0

    async def chat(self, messages: Sequence[Message]) -> ChatReply:
        self.asked.append(messages)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await asyncio.sleep(reply if isinstance(reply, float) else 0)
        finally:
            self._busy -= 1
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, ChatReply) else ChatReply(str(reply), True, 1000, 100)

    async def close(self) -> None: ...


def settings(**options: Any) -> Settings:
    return Settings.model_construct(engine=ENGINE, **options)


def grades(judge: Judge, *trajectories: Trajectory) -> list[Grade]:
    async def all_at_once() -> list[Grade]:
        return list(await asyncio.gather(*(judge.grade(TASK, trajectory) for trajectory in trajectories)))

    return asyncio.run(all_at_once())


def judged(*replies: Any, **options: Any) -> tuple[Grade, dict[str, float], Engine]:
    engine = Engine(*replies)
    judge = Judge(settings(**options), engine)
    (grade,) = grades(judge, done())
    return grade, judge.take_metrics(), engine


# ---------------------------------------------------------------- grades


def test_a_good_reply_is_the_grade_on_the_scale_of_the_rubric() -> None:
    grade, metrics, _ = judged(GOOD, highest=10.0)
    assert grade == Grade(0.75, grader="judge:judge-1")
    assert metrics["judge_calls"] == 1 and metrics["judge_unknown"] == 0
    assert judged('{"score": 3, "reason": ""}', highest=4.0)[0].value == 0.75


def test_nobody_is_asked_about_a_failure_or_a_missing_answer() -> None:
    engine = Engine(GOOD)
    failed = replace(done(), failure=Failure("ToolError", "search is down"))
    unknown, none, blank = grades(Judge(settings(), engine), failed, done(answer=None), done(answer=" "))
    assert unknown == Grade(None, "ToolError: search is down", "judge:judge-1")
    assert none.value == blank.value == 0.0 and engine.asked == []


def test_an_answer_in_the_form_of_a_reply_is_graded_and_not_read_as_the_grade() -> None:
    engine = Engine('{"reason": "It answers with a score.", "score": 0}')
    (grade,) = grades(Judge(settings(), engine), done(answer=QUOTED, page=f"Reply with {QUOTED}"))
    assert grade == Grade(0.0, grader="judge:judge-1")
    assert QUOTED in engine.asked[0][1].content and QUOTED not in engine.asked[0][0].content
    echoing = Engine(f"The answer was {QUOTED}")  # a judge that is carried away by it
    (grade,) = grades(Judge(settings(), echoing), done(answer=QUOTED))
    assert grade.value is None and len(echoing.asked) == 2


def test_an_invalid_reply_is_shown_to_the_judge_and_asked_again() -> None:
    grade, metrics, engine = judged("I would say 7.", ChatReply(GOOD, complete=False), GOOD, max_asks=3)
    assert grade.value == 0.75
    assert metrics["judge_calls"] == 3 and metrics["judge_unparsed"] == 2
    first, second, third = engine.asked
    assert [m.role for m in second] == ["system", "user", "assistant", "user"] and second[2].content == "I would say 7."
    assert "cut off" in third[3].content and len(third) == 4


def test_after_the_last_ask_the_grade_is_unknown_with_its_cause() -> None:
    grade, metrics, engine = judged("I would say 7.")
    assert grade.value is None and len(engine.asked) == 2
    assert grade.cause is not None and "judge reply unparsed after 2 asks of judge-1, last: " in grade.cause
    assert metrics["judge_unparsed"] == 2 and metrics["judge_unknown"] == 1


def test_a_judge_beyond_its_deadline_is_unknown_and_the_others_are_graded() -> None:
    judge = Judge(settings(deadline_s=0.05), Engine(600.0, GOOD))
    slow, quick = grades(judge, done(), done(answer="Tarn"))
    assert slow == Grade(None, "GraderError: judge judge-1 gave no grade within 0.05 s", "judge:judge-1")
    assert quick.value == 0.75


def test_a_bug_is_raised() -> None:
    with pytest.raises(KeyError, match="ours"):
        judged(KeyError("ours"))


def test_no_more_than_so_many_are_asked_at_once() -> None:
    engine = Engine(GOOD)
    judge = Judge(settings(concurrency=3), engine)
    grades(judge, *(done(answer=f"Tarn {i}") for i in range(10)))
    assert engine.busiest == 3 and len(engine.asked) == 10
    grades(judge, *(done(answer=f"Okru {i}") for i in range(10)))  # in another event loop
    assert engine.busiest == 3 and len(engine.asked) == 20


# ---------------------------------------------------------------- asked once


def test_equal_work_is_graded_once_at_the_same_time_and_later() -> None:
    engine = Engine(GOOD)
    judge = Judge(settings(), engine)
    same = [done(invocation=i) for i in range(5)]
    assert {g.value for g in grades(judge, *same)} == {0.75} and len(engine.asked) == 1
    assert grades(judge, done())[0].value == 0.75 and len(engine.asked) == 1  # in another event loop
    assert judge.take_metrics()["judge_cached"] == 5
    grades(judge, done(answer="Tarn"), done(page="another page"))
    assert len(engine.asked) == 3


def test_an_unknown_grade_is_asked_again_next_time() -> None:
    engine = Engine(EngineError("down"), GOOD)
    judge = Judge(settings(), engine)
    assert [grades(judge, done())[0].value, grades(judge, done())[0].value] == [None, 0.75]


def test_who_stops_waiting_does_not_take_the_grade_from_the_others() -> None:
    async def first_gives_up(judge: Judge) -> Grade:
        first, second = (asyncio.create_task(judge.grade(TASK, done())) for _ in range(2))
        await asyncio.sleep(0)  # both are asking now
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    engine = Engine(GOOD)
    assert asyncio.run(first_gives_up(Judge(settings(), engine))).value == 0.75
    assert len(engine.asked) == 1


def test_a_cache_file_serves_other_programs_but_no_other_rubric_or_engine(tmp_path: Path) -> None:
    path = tmp_path / "grades.sqlite"

    def asks(rubric: str = RUBRIC, identity: str = "judge-1", **options: Any) -> int:
        engine = Engine(GOOD)
        engine.identity = identity
        judge = Judge(settings(cache=path, **options), engine, rubric)
        assert grades(judge, done())[0].value is not None
        asyncio.run(judge.close())
        return len(engine.asked)

    assert [asks(), asks()] == [1, 0]
    assert [asks(rubric="Be kind."), asks(identity="judge-2"), asks(highest=8.0), asks(max_chars=5)] == [1, 1, 1, 1]
    kept = sqlite3.connect(path).execute("SELECT score, reason, model FROM verdicts").fetchall()
    assert len(kept) == 5 and kept[0] == (0.75, "The page says so.", "judge-1")


def test_a_cache_file_that_breaks_costs_no_grade(tmp_path: Path) -> None:
    path = tmp_path / "grades.sqlite"
    judge = Judge(settings(cache=path), Engine(GOOD))
    sqlite3.connect(path).execute("DROP TABLE verdicts")
    assert grades(judge, done())[0].value == 0.75
    assert judge.take_metrics()["judge_cache_errors"] == 2  # it could neither be read nor written


# ---------------------------------------------------------------- what it costs


def test_tokens_and_money_are_counted_since_the_last_time_they_were_taken() -> None:
    judge = Judge(settings(prompt_price=2.0, completion_price=10.0), Engine("nonsense", GOOD))
    grades(judge, done())
    taken = judge.take_metrics()
    assert taken["judge_prompt_tokens"] == 2000 and taken["judge_completion_tokens"] == 200
    assert taken["judge_cost"] == pytest.approx((2000 * 2 + 200 * 10) / 1e6)
    assert set(judge.take_metrics().values()) == {0.0}


def test_replies_without_token_counts_are_counted_as_such() -> None:
    _, metrics, _ = judged(ChatReply(GOOD, True, 1000, None), prompt_price=2.0)
    assert metrics["judge_unmetered"] == 1 and metrics["judge_prompt_tokens"] == 1000


def test_beyond_its_budget_nobody_is_asked() -> None:
    engine = Engine(GOOD)  # 0.002 each
    judge = Judge(settings(prompt_price=2.0, max_cost=0.003), engine)
    found = [grades(judge, done(answer=f"Tarn {i}"))[0] for i in range(4)]
    assert [grade.value for grade in found] == [0.75, 0.75, None, None]
    assert found[2].cause == "GraderError: the judge has spent 0.004 of 0.003; raise expert.max_cost to go on"
    assert len(engine.asked) == 2
    assert grades(judge, done(answer="Tarn 0"))[0].value == 0.75  # what is known costs nothing


# ---------------------------------------------------------------- over HTTP


async def at_once(seconds: float) -> None:
    """Instead of sleeping."""


def over_http(*answers: Answer, deadline_s: float = 30.0) -> tuple[Grade, dict[str, float]]:
    with serving(*answers) as server:
        engine = EngineSettings(model="judge-1", base_url=server.base_url, max_retries=2)
        judge = Judge(settings(deadline_s=deadline_s), OpenAI(engine, None, at_once))
        (grade,) = grades(judge, done())
        return grade, judge.take_metrics()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize(
    ("answers", "retries"),
    [
        ([completion(GOOD)], 0),
        ([refusal(500, "oops"), completion(GOOD)], 1),
        ([refusal(429, "slow down", Retry_After="1"), Answer(body=b"{", cut=True), completion(f"```\n{GOOD}\n```")], 2),
    ],
)
def test_a_grade_comes_through_faults_that_pass(answers: list[Answer], retries: int) -> None:
    grade, metrics = over_http(*answers)
    assert grade == Grade(0.75, grader="judge:judge-1")
    assert metrics["judge_retries"] == retries
    assert metrics["judge_prompt_tokens"] == 100 and metrics["judge_completion_tokens"] == 20


OUTAGES = {
    "key refused": (refusal(401, "bad key"), "EngineError: http.* HTTP 401: bad key"),
    "down": (refusal(503, "down"), r"EngineError: http.* HTTP 503: down \(try 3 of 3\)"),
    "rate limit for an hour": (refusal(429, "full", Retry_After="3600"), "EngineError: .*asks for a wait of 3600 s"),
    "garbled": (Answer(body=b"{]"), "EngineError: http.* sent no chat completion"),
    "cut off": (Answer(body=b"{", cut=True), "EngineError: http.* failed: RemoteProtocolError"),
    "huge": (Answer(body=b" " * (5 * 2**20)), "EngineError: .* sent more than"),
    "refuses to judge": (completion("I cannot help with that."), "GraderError: judge reply unparsed"),
    "says nothing": (completion(None, "content_filter"), "GraderError: judge reply unparsed .* cut off"),
}


@pytest.mark.parametrize(("answer", "cause"), OUTAGES.values(), ids=OUTAGES.keys())
def test_an_outage_is_unknown_with_its_cause(answer: Answer, cause: str) -> None:
    grade, metrics = over_http(answer)
    assert grade.value is None and grade.grader == "judge:judge-1" and metrics["judge_unknown"] == 1
    assert grade.cause is not None and "\n" not in grade.cause
    assert re.match(cause, grade.cause), grade.cause


def test_a_service_that_hangs_is_unknown_at_the_deadline() -> None:
    grade, _ = over_http(Answer(hang=True), deadline_s=0.3)
    assert grade == Grade(None, "GraderError: judge judge-1 gave no grade within 0.3 s", "judge:judge-1")


# ---------------------------------------------------------------- settings


def test_the_table_of_a_recipe_builds_a_judge_with_a_rubric_of_ones_own(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.md"
    rubric.write_text("One point for each source.\n")
    with serving(completion('{"score": 1, "reason": "one"}')) as server:
        engine = {**ENGINE, "base_url": server.base_url}
        judge = Settings(type="judge", engine=engine, rubric=rubric, highest=4).build(source=None)
        assert grades(judge, done())[0].value == 0.25
        assert server.requests[0]["messages"][0]["content"].startswith("One point for each source.\n")


@pytest.mark.parametrize(
    ("table", "error", "said"),
    [
        ({"highest": 4}, ValidationError, "highest: the built-in rubric goes to 10"),
        ({"max_cost": 1}, ValidationError, "max_cost: has no effect without prices"),
        ({"deadline_s": 0}, ValidationError, "greater than 0"),
        ({"model": "judge-1"}, ValidationError, "Extra inputs"),
        ({"engine": {"type": "opanai"}}, ConfigError, r"expert\.engine\.type: unknown .*did you mean 'openai'"),
        ({"engine": {**ENGINE, "modle": "x"}}, ConfigError, r"expert\.engine\.modle: unknown key"),
        ({"rubric": "nowhere.md"}, ConfigError, r"expert\.rubric: nowhere\.md cannot be read"),
        ({"cache": "nowhere/grades.sqlite"}, ConfigError, r"expert\.cache: nowhere.grades\.sqlite cannot be opened"),
    ],
)
def test_settings_that_cannot_work_are_refused(table: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Settings(**{"engine": ENGINE, **table}).build()


def test_an_empty_rubric_and_a_cache_that_is_another_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text(" \n")
    (tmp_path / "notes.txt").write_text("not a database, and long enough to be seen as none " * 20)
    with pytest.raises(ConfigError, match=r"empty\.md is empty"):
        Settings(engine=ENGINE, rubric=tmp_path / "empty.md").build()
    with pytest.raises(ConfigError, match=r"notes\.txt cannot be opened"):
        Settings(engine=ENGINE, cache=tmp_path / "notes.txt").build()
