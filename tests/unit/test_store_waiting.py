"""Every wait has a deadline and names what it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mgrpo.errors import StoreTimeout
from mgrpo.store.waiting import wait


def test_what_is_there_comes_at_once_even_with_no_time_left() -> None:
    assert asyncio.run(wait(lambda: "rows", "groups 0..15", 0.0)) == "rows"


def test_zero_and_empty_are_answers() -> None:
    assert asyncio.run(wait(lambda: 0, "a number", 0.0)) == 0
    assert asyncio.run(wait(lambda: [], "a list", 0.0)) == []


def test_polls_until_the_answer_arrives() -> None:
    answers: Iterator[int | None] = iter([None, None, None, 5])
    assert asyncio.run(wait(lambda: next(answers), "the fourth answer", 10.0)) == 5


def test_the_deadline_names_what_was_awaited() -> None:
    with pytest.raises(StoreTimeout, match=r"^waited 0.02 s for groups 4\.\.7 of planner$"):
        asyncio.run(wait(lambda: None, "groups 4..7 of planner", 0.02))


def test_an_answer_that_arrives_during_the_last_sleep_is_taken() -> None:
    polls = 0

    def second_poll() -> str | None:
        nonlocal polls
        polls += 1
        return "late" if polls == 2 else None

    assert asyncio.run(wait(second_poll, "a late answer", 0.25, first_sleep=5.0)) == "late"


def test_sleeps_grow_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    answers: Iterator[bool | None] = iter([None] * 8 + [True])
    assert asyncio.run(wait(lambda: next(answers), "the ninth answer", 60.0))
    assert slept == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]


def test_other_work_goes_on_meanwhile() -> None:
    async def both() -> list[str]:
        arrived: list[str] = []

        async def produce() -> None:
            arrived.append("group")

        found, _ = await asyncio.gather(wait(lambda: arrived or None, "a group", 10.0), produce())
        return found

    assert asyncio.run(both()) == ["group"]


def test_a_fault_in_the_poll_is_not_swallowed() -> None:
    def broken() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        asyncio.run(wait(broken, "anything", 10.0))
