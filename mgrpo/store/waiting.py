"""Waiting for another loop: always with a deadline, always saying for what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from mgrpo.errors import StoreTimeout

T = TypeVar("T")


async def wait(
    poll: Callable[[], T | None],
    what: str | Callable[[], str],
    seconds: float,
    *,
    first_sleep: float = 0.001,
    longest_sleep: float = 0.05,
) -> T:
    """Calls ``poll`` until it returns something other than None, and returns that.

    ``what`` names what is waited for, as it stands when the time is up. Sleeps grow from ``first_sleep`` by doubling to
    ``longest_sleep`` (seconds). ``poll`` is called at least once, and once more at the deadline. Raises StoreTimeout
    after ``seconds``; what ``poll`` raises passes through. ``poll`` runs in a thread: a store that is gone for a while
    holds up nothing else.
    """
    deadline = time.monotonic() + seconds
    sleep = first_sleep
    while True:
        overdue = time.monotonic() >= deadline
        if (found := await asyncio.to_thread(poll)) is not None:
            return found
        if overdue:
            raise StoreTimeout(f"waited {seconds:g} s for {what if isinstance(what, str) else what()}")
        await asyncio.sleep(max(0.0, min(sleep, deadline - time.monotonic())))
        sleep = min(2 * sleep, longest_sleep)
