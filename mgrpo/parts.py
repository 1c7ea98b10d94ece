"""The processes of a run that is spread over several: each does one of four things and meets the others in the store.

::

    serve AGENT    the engine of one set of weights    loads what is published, and says which version it serves
    tools          all tools of the recipe
    collect        the loop of train.py, through the engines and tools of other processes; any number of them
    learn AGENT    the loop of train.py for one set of weights

Each announces itself in the store (`Part`) for as long as it lives, so nobody is told an address by hand.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgrpo.agents.loop import Limits as AgentLimits
from mgrpo.agents.loop import together
from mgrpo.config import Config
from mgrpo.config.registry import suggest
from mgrpo.engines.base import Engine
from mgrpo.engines.remote import Remote, Replica
from mgrpo.engines.server import Limits
from mgrpo.engines.server import routes as engine_routes
from mgrpo.errors import CheckpointError, InfrastructureError, UserError
from mgrpo.run import Hold, RunFolder
from mgrpo.session import RENEWALS, Session
from mgrpo.store.base import Part, Store, WeightVersion
from mgrpo.store.waiting import wait
from mgrpo.store.weights import WeightStore
from mgrpo.team import Team, chat_of, complete, engine_of, tools_of
from mgrpo.tools.base import Tool
from mgrpo.tools.remote import RemoteTool, ToolServers
from mgrpo.tools.server import routes as tool_routes
from mgrpo.web.access import check_binding, token
from mgrpo.web.asking import Client
from mgrpo.web.serving import application, serve

LOOK_S = 0.1  # between two looks at the store for newer weights
TOOLS_SEEN_S = 1.0  # between two looks at who serves tools
CORPORA_BYTES = 512 * 2**20  # of pages that a tool server keeps


def default_name(kind: str) -> str:
    return f"{kind}-{socket.gethostname()}-{os.getpid()}"


def end_cleanly() -> None:
    """SIGTERM ends this process as Ctrl-C does: what it holds is let go."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


# ---------------------------------------------------------------- the two loops


def collect_part(config: Config, folder: Path, name: str) -> None:
    """Collect groups until the run is complete. Raises InfrastructureError where something is waited for too long."""
    from mgrpo.collecting import Collector
    from mgrpo.train import collect

    with Session(config, folder, name=name, part=True) as session, _remote_team(session) as team:

        async def work() -> None:
            if session.config.launch.tool_server and session.config.tools:  # else every call would wait for one
                seconds = session.config.outage_timeout_s
                await wait(lambda: session.store.parts("tools") or None, "a tool server (mgrpo tools)", seconds)
            await collect(Collector(session, team))

        part = Part(name, "collect", instance=secrets.token_hex(8))
        complete(_while_announced(session.store, part, session.config.lease_s, work()))


def learn_part(config: Config, folder: Path, owner: str, name: str) -> None:
    """Train the weights of ``owner`` until the run is complete. Raises as `collect_part`."""
    from mgrpo.learning import Learner
    from mgrpo.train import learn

    _check_owner(config, owner, "learn")
    if owner not in config.learners:
        raise UserError(f"learn {owner}: its weights move in no stage; `mgrpo serve {owner}` is all that it needs")
    with Session(config, folder, name=name, part=True) as session:
        learner = Learner(session, owner)

        async def work() -> None:
            await learner.begin()
            await learn(learner)

        part = Part(name, "learn", owner, instance=secrets.token_hex(8))
        complete(_while_announced(session.store, part, session.config.lease_s, work()))


async def _while_announced(store: Store, part: Part, seconds: float, work: Coroutine[Any, Any, None]) -> None:
    announcing = asyncio.create_task(_announce(store, lambda: part, seconds))
    try:
        await work
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        store.retire(part.name)


async def _announce(
    store: Store, part: Callable[[], Part], seconds: float, changed: asyncio.Event | None = None
) -> None:
    """Keep saying that ``part`` is there, at once where it ``changed``. An outage of the store is sat out."""
    changed = changed or asyncio.Event()
    while True:
        changed.clear()
        with suppress(InfrastructureError):
            await asyncio.to_thread(store.announce, part(), seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), seconds / RENEWALS)


# ---------------------------------------------------------------- what a collector acts through


@contextmanager
def _remote_team(session: Session) -> Iterator[Team]:
    config, client = session.config, Client(token())
    engines = {owner: _remote_engine(session, owner, client) for owner in config.agents if config.owner(owner) == owner}
    tools: dict[str, Tool] = tools_of(config)
    if config.launch.tool_server:
        servers = ToolServers(_ToolUrls(session.store), client)
        seconds = AgentLimits().tool_timeout_s - 1.0  # so that the cause is told, and not only that time was up
        tools = {name: RemoteTool(tool, servers, seconds) for name, tool in tools.items()}
    with Team(config, session.folder.models(config), engines, tools) as team:
        try:
            yield team
        finally:
            complete(client.close())


def _remote_engine(session: Session, owner: str, client: Client) -> Engine:
    config, store = session.config, session.store

    def replicas() -> list[Replica]:
        return [Replica(p.name, p.url, p.instance, p.version, p.state) for p in store.parts("engine", owner)]

    return Remote(
        owner,
        replicas,
        client,
        deterministic=config.scheduler == "lockstep",
        load_timeout_s=config.outage_timeout_s,
        request_timeout_s=config.rollout.request_timeout_s,
        messages=config.agents[owner].engine.get("type") == "scripted",
        max_batch=int(config.agents[owner].engine.get("max_batch", 256)),
    )


class _ToolUrls:
    """The addresses of the tool servers that are alive; asked for at every call, so read once in a while only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = -float("inf")
        self._urls: list[str] = []

    def __call__(self) -> Sequence[str]:
        now = time.monotonic()
        if now - self._read > TOOLS_SEEN_S or not self._urls:
            self._read, self._urls = now, [part.url for part in self._store.parts("tools")]
        return self._urls


# ---------------------------------------------------------------- engines and tools


def serve_part(config: Config, folder: Path, owner: str, name: str, host: str, port: int) -> None:
    """Serve the weights of ``owner``, always the newest that could be loaded, until interrupted."""
    _check_owner(config, owner, "serve")
    check_binding(host, token())
    with _held(RunFolder(folder), config) as hold:
        model = RunFolder(folder).models(hold.config)[owner]
        engine = engine_of(hold.config, owner, model, chat_of(model, hold.config.agents[owner].format))
        words = json.loads((model / "config.json").read_text(encoding="utf-8")).get("vocab_size")
        longest = max(hold.config.agents[user].max_context for user in hold.config.sharing(owner))
        limits = Limits(prompt_tokens=longest, new_tokens=longest, vocabulary=words)
        weights = RunFolder(folder).weight_store(hold.config, hold.store.run, outage_s=0.0)  # it looks again by itself
        complete(_EngineServer(hold, weights, owner, engine, name).run(host, port, limits))


def tools_part(config: Config, folder: Path, name: str, host: str, port: int) -> None:
    """Serve the tools of the recipe until interrupted."""
    check_binding(host, token())
    if not config.tools:
        raise UserError("tools: the recipe has none")
    with _held(RunFolder(folder), config) as hold:
        complete(_serve_tools(hold, name, host, port))


async def _serve_tools(hold: Hold, name: str, host: str, port: int) -> None:
    told: list[Part] = []
    listening = asyncio.Event()

    def ready(url: str) -> None:
        told.append(Part(name, "tools", url=url, instance=secrets.token_hex(8)))
        print(f"{name}: {', '.join(hold.config.tools)} at {url}", flush=True)
        listening.set()

    async def announce() -> None:
        await listening.wait()
        await _announce(hold.store, lambda: told[0], hold.config.lease_s)

    try:
        app = application(tool_routes(tools_of(hold.config), CORPORA_BYTES), token())
        await together([serve(app, host, port, ready), announce()])
    finally:
        hold.store.retire(name)


class _EngineServer:
    """One engine, what it serves at the moment, and what keeps it at the newest weights."""

    def __init__(self, hold: Hold, weights: WeightStore, owner: str, engine: Engine, name: str) -> None:
        self._store, self._weights, self._lease_s = hold.store, weights, hold.config.lease_s
        self._learns = owner in hold.config.learners
        self._engine = engine
        self._part = Part(name, "engine", owner, instance=secrets.token_hex(8))
        self._changed = asyncio.Event()
        self._listening = asyncio.Event()

    async def run(self, host: str, port: int, limits: Limits) -> None:
        app = application(engine_routes(self._engine, self._part.agent, self._status, limits), token())
        try:
            await together([serve(app, host, port, self._ready), self._follow(), self._announce()])
        finally:
            self._store.retire(self._part.name)
            await self._engine.close()

    def _status(self) -> dict[str, Any]:
        return {name: getattr(self._part, name) for name in ("version", "instance", "state")}

    def _ready(self, url: str) -> None:
        print(f"{self._part.name}: {self._part.agent} at {url}", flush=True)
        self._tell(url=url)
        self._listening.set()

    def _tell(self, **news: Any) -> None:
        self._part = replace(self._part, **news)
        self._changed.set()

    async def _announce(self) -> None:
        await self._listening.wait()
        await _announce(self._store, lambda: self._part, self._lease_s, self._changed)

    async def _follow(self) -> None:
        """Load what is published. Where that fails the older weights are served, and the state says why."""
        if not self._learns:
            self._tell(version=0)
            return
        while True:
            newest = await self._newest()
            if newest is None and self._part.version < 0:
                self._tell(version=0)  # where training begins: the model's own folder, which the engine has loaded
            elif newest is not None and newest.version != self._part.version:
                await self._load(newest)
            await asyncio.sleep(LOOK_S)

    async def _newest(self) -> WeightVersion | None:
        while True:  # an outage of the store is sat out with the weights there are
            with suppress(InfrastructureError):
                return await asyncio.to_thread(self._store.latest, self._part.agent)

    async def _load(self, newest: WeightVersion) -> None:
        try:
            folder = await asyncio.to_thread(self._weights.get, newest.handle, newest.checksum)
            await self._engine.load(newest.version, str(folder))
        except (CheckpointError, InfrastructureError, OSError) as error:
            state = f"version {newest.version} could not be loaded: {error}"
            if state != self._part.state:
                print(f"{self._part.name}: {state}", flush=True)
                self._tell(state=state)
            return
        self._tell(version=newest.version, state="")


# ---------------------------------------------------------------- what they share


@contextmanager
def _held(folder: RunFolder, config: Config) -> Iterator[Hold]:
    hold = folder.join(config)
    try:
        yield hold
    finally:
        hold.close()


def _check_owner(config: Config, agent: str, command: str) -> None:
    if agent not in config.agents:
        raise UserError(f"{command} {agent}: the recipe has no such agent{suggest(agent, config.agents)}")
    if (owner := config.owner(agent)) != agent:
        raise UserError(f"{command} {agent}: it shares the weights of {owner!r}; name that one")
