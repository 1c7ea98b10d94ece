"""Web applications of the package on a free loopback port, in this event loop or in a thread with one of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette

from mgrpo.web.serving import serve

TOKEN = "a-token-of-some-length"


@asynccontextmanager
async def served(app: Starlette, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The address of ``app`` while the block runs."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, host, 0, ready.set_result))
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        yield await (ready if ready.done() else serving)
    finally:
        serving.cancel()
        await asyncio.wait({serving})


@contextmanager
def served_beside(app: Starlette) -> Iterator[str]:
    """As `served`, for tests that run several event loops in turn."""
    ready, found = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        await serve(app, "127.0.0.1", 0, lambda url: (found.append(url), ready.set()))

    task: Any = loop.create_task(main())

    def run() -> None:
        loop.run_until_complete(asyncio.wait({task}))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        assert not thread.is_alive()
