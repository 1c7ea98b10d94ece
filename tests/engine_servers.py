"""Engines behind real HTTP servers on loopback, with a status as a serving process keeps it, and clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from starlette.applications import Starlette
from web_server import TOKEN, served, served_beside

from mgrpo.engines.base import Engine, Request, Sampling
from mgrpo.engines.remote import Remote, Replica
from mgrpo.engines.server import Limits, routes
from mgrpo.types import TrajectoryId
from mgrpo.web.asking import Client
from mgrpo.web.serving import application

MODEL = "planner"
_instances = count()


@dataclass
class Serving:
    """An engine, what its server says of it, and the server's address once it listens."""

    engine: Engine
    name: str = "serve-planner-0"
    version: int = 0
    state: str = ""
    url: str = ""
    limits: Limits | None = None

    def __post_init__(self) -> None:
        self.instance = f"start-{next(_instances)}"

    async def load(self, version: int, handle: str) -> None:
        await self.engine.load(version, handle)
        self.version = version

    def app(self) -> Starlette:
        return application(routes(self.engine, MODEL, self._status, self.limits), TOKEN)

    def replica(self) -> Replica:
        return Replica(self.name, self.url, self.instance, self.version, self.state)

    def _status(self) -> dict[str, Any]:
        return {"version": self.version, "instance": self.instance, "state": self.state}


def asks(*rollouts: int, **sampling: Any) -> list[Request]:
    """One request of each of these rollouts of group 5; the prompt of rollout r is (r, r + 1)."""
    return [Request(TrajectoryId(5, r, "planner", 0), (r, r + 1), Sampling(**sampling), (1,)) for r in rollouts]


@asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[Serving]:
    found = Serving(engine, **options)
    async with served(found.app()) as found.url:
        yield found


def remote(*servings: Serving, **options: Any) -> Remote:
    return over(lambda: [serving.replica() for serving in servings], **options)


def over(replicas: Callable[[], Sequence[Replica]], token: str = TOKEN, **options: Any) -> Remote:
    options = {"deterministic": True, "load_timeout_s": 30.0, "request_timeout_s": 30.0, "pause_s": 0.01, **options}
    return Remote(MODEL, replicas, Client(token), **options)


class Apart(Remote):
    """A remote engine whose server runs in a thread of its own, until it is closed."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self._serving, self._open = Serving(engine), ExitStack()
        self._serving.url = self._open.enter_context(served_beside(self._serving.app()))
        super().__init__(
            MODEL,
            lambda: [self._serving.replica()],
            Client(TOKEN),
            deterministic=True,
            load_timeout_s=30.0,
            request_timeout_s=30.0,
            **options,
        )

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._open.close)
