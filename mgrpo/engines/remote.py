"""An engine on other machines: one or several replicas that serve an agent's weights over HTTP.

::

    load      asks the replicas until one serves the version; with ``deterministic`` until all that are well do
    generate  a trajectory stays with the replica that has its prefix; new ones are shared out evenly (`spread`)
    lost      EngineLost with ``deterministic``, else its requests go to another replica, EngineLost when none is left

Nothing is pushed: servers find new weights by themselves, and every completion has the version that its reply names.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from zlib import crc32

from mgrpo.engines.base import Completion, Request
from mgrpo.engines.wire import Asked, Choice, Extension, Health, Reply, common, own
from mgrpo.errors import EngineError, EngineLost, EngineTimeout, InfrastructureError, SamplingEvidenceError
from mgrpo.types import StopReason, TrajectoryId
from mgrpo.web.asking import Client, Refused, TimedOut, Unreachable, WebError

T = TypeVar("T")

_REFRESH_S = 2.0  # how old the list of replicas may be
_SHUNNED_S = 10.0  # a replica that was lost gets no new trajectories for so long
_HEALTH_S = 5.0
_STOP_REASONS: Mapping[str | None, StopReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Replica:
    """A server as it announces itself. ``instance`` changes with every start, ``state`` says what is not well."""

    name: str
    url: str
    instance: str = ""
    version: int = -1
    state: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.instance


class _Lost(Exception):
    """A replica did not serve a request that another one may."""


def spread(ids: Iterable[TrajectoryId], names: Sequence[str]) -> dict[TrajectoryId, str]:
    """A name for every id, each name as often as any other (give or take one).

    Neighbouring ids, the rollouts of a group, share a name: their prompts begin alike. A single id may get any name.
    """
    ordered = sorted(ids)
    first = crc32(str(ordered[0]).encode()) if ordered else 0
    return {id: names[(first + i * len(names) // len(ordered)) % len(names)] for i, id in enumerate(ordered)}


class Remote:
    """``replicas`` names the servers of ``model`` that are alive; it may block, and is called in a thread.

    ``extended``: the servers are this package's own (server.py); others, such as vLLM, get one sampling per request,
    no seed, and their version is what ``replicas`` says. ``messages``: they script their turns, so send conversations.
    """

    def __init__(
        self,
        model: str,
        replicas: Callable[[], Sequence[Replica]],
        client: Client,
        *,
        deterministic: bool,
        load_timeout_s: float,
        request_timeout_s: float = 600.0,
        pause_s: float = 0.1,
        extended: bool = True,
        messages: bool = False,
        max_batch: int = 256,
        calls_per_replica: int = 1,
    ) -> None:
        self.max_batch = max_batch
        self._model = model
        self._replicas = replicas
        self._client = client
        self._deterministic = deterministic
        self._load_timeout_s = load_timeout_s
        self._request_timeout_s = request_timeout_s
        self._pause_s = pause_s
        self._extended = extended
        self._messages = messages
        self._calls_per_replica = calls_per_replica
        self._name = secrets.token_hex(8)  # by which servers tell its trajectories from those of other clients
        self._wanted = 0
        self._known: dict[str, Replica] = {}  # by name
        self._looked = -float("inf")  # when `_known` was read
        self._looking: asyncio.Task[None] | None = None
        self._shunned: dict[tuple[str, str], float] = {}  # key of a lost replica -> until when
        self._homes: dict[TrajectoryId, tuple[str, str]] = {}  # who has a trajectory's prefix
        self._released: dict[tuple[str, str], list[str]] = {}  # what a replica has not been told yet

    @property
    def max_calls(self) -> int:
        """Grows and shrinks with the number of replicas."""
        return self._calls_per_replica * max(1, len(self._known))

    async def load(self, version: int, handle: str) -> None:
        """Wait until ``version`` is served; EngineLost at the deadline. ``handle`` is the servers' business."""
        self._wanted = version
        deadline = time.monotonic() + self._load_timeout_s
        while True:
            self._know(await self._inspected())
            found = self._known.values()
            behind = [replica for replica in found if replica.version < version and not replica.state]
            ready = len(self._ready())
            late = time.monotonic() >= deadline
            if ready and (late or not (behind and self._deterministic)):
                self._shunned.clear()
                return
            if late:
                states = "; ".join(f"{r.name} at {r.url}: {_state(r)}" for r in found) or "no server is alive"
                raise EngineLost(
                    f"no server of {self._model!r} had version {version} within {self._load_timeout_s:g} s: {states}"
                )
            await asyncio.sleep(max(0.0, min(self._pause_s, deadline - time.monotonic())))

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Raises EngineLost, and EngineError or EngineTimeout with the server's own words."""
        await self._look_again()
        done: dict[TrajectoryId, Completion] = {}
        lost: dict[tuple[str, str], str] = {}
        left = list(requests)
        while left:
            shares = self._shares(left, lost)
            outcomes = await asyncio.gather(*(self._ask(*share) for share in shares), return_exceptions=True)
            left = []
            for (replica, batch), outcome in zip(shares, outcomes, strict=True):
                if isinstance(outcome, _Lost):
                    self._shun(replica)
                    lost[replica.key] = str(outcome)
                    left += batch
                elif not isinstance(outcome, BaseException):
                    done |= {request.id: completion for request, completion in zip(batch, outcome, strict=True)}
            if left and self._deterministic:
                raise self._all_lost(left, lost)
            _unless_failed([outcome for outcome in outcomes if not isinstance(outcome, _Lost)])
        return [done[request.id] for request in requests]

    def release(self, id: TrajectoryId) -> None:
        """The replica is told with its next batch."""
        home = self._homes.pop(id, None)
        if home is not None and self._extended:
            self._released.setdefault(home, []).append(str(id))

    async def close(self) -> None:
        """Tell replicas what is over, where they can be reached. The client stays open: others may use it."""
        released, self._released = self._released, {}
        for replica in self._known.values():
            if ids := released.get(replica.key):
                try:
                    await self._client.post(f"{replica.url}/release", {"ids": ids, "client": self._name}, _HEALTH_S)
                except WebError:
                    continue  # it forgets them by itself when they have been idle for long

    # ---------------------------------------------------------------- who is there

    async def _look_again(self) -> None:
        """Keep up with who comes and goes, without waiting for it. Deterministic batches change at `load` alone."""
        if not self._known:
            self._know(await self._inspected())
            return
        idle = self._looking is None or self._looking.done()
        if idle and not self._deterministic and time.monotonic() - self._looked > _REFRESH_S:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            announced = await asyncio.to_thread(self._replicas)
        except InfrastructureError:
            self._looked = time.monotonic()  # those known so far may do
            return
        versions = {replica.key: replica.version for replica in self._known.values()}
        self._know([replace(r, version=max(r.version, versions.get(r.key, -1))) for r in announced])

    async def _inspected(self) -> list[Replica]:
        """The replicas that are announced, as they say themselves that they are."""
        announced = await asyncio.to_thread(self._replicas)
        if not self._extended:
            return list(announced)
        return list(await asyncio.gather(*(self._asked(replica) for replica in announced)))

    async def _asked(self, replica: Replica) -> Replica:
        try:
            health: Health = await self._client.get(f"{replica.url}/health", _HEALTH_S, Health)
        except WebError as error:
            return replace(replica, version=-1, state=replica.state or str(error))
        if health.model != self._model:
            return replace(replica, version=-1, state=f"it serves {health.model!r}")
        return replace(replica, version=health.version, instance=health.instance, state=health.state)

    def _know(self, replicas: Iterable[Replica]) -> None:
        self._known = {replica.name: replica for replica in replicas}
        self._looked = time.monotonic()
        keys = {replica.key for replica in self._known.values()}
        self._released = {key: ids for key, ids in self._released.items() if key in keys}

    def _ready(self, lost: Iterable[tuple[str, str]] = ()) -> list[str]:
        """Who may take new trajectories, by name; one that is not well, or was lost, only where there is no other."""
        ready = [r for _, r in sorted(self._known.items()) if r.version >= max(self._wanted, 0) and r.key not in lost]
        now = time.monotonic()
        well = [r.name for r in ready if not r.state and self._shunned.get(r.key, now) <= now]
        return well or [r.name for r in ready]

    def _shun(self, replica: Replica) -> None:
        self._shunned[replica.key] = time.monotonic() + _SHUNNED_S

    # ---------------------------------------------------------------- who gets what

    def _shares(
        self, requests: Sequence[Request], lost: Mapping[tuple[str, str], str]
    ) -> list[tuple[Replica, list[Request]]]:
        """What each replica is asked, in the order of ``requests``, replicas by name. Raises EngineLost."""
        living = {replica.key: name for name, replica in self._known.items() if replica.key not in lost}
        places = {r.id: living[home] for r in requests if (home := self._homes.get(r.id)) in living}
        new = [request.id for request in requests if request.id not in places]
        if new:
            ready = self._ready(lost)
            if not ready:
                raise self._all_lost(requests, lost)
            places |= spread(new, ready)
        names = sorted(set(places.values()))
        return [(self._known[name], [r for r in requests if places[r.id] == name]) for name in names]

    def _all_lost(self, requests: Sequence[Request], lost: Mapping[tuple[str, str], str]) -> EngineLost:
        states = [f"{r.name}: {lost.get(r.key) or _state(r)}" for r in self._known.values()]
        return EngineLost(
            f"no server of {self._model!r} (version {self._wanted} or newer) took {_named(requests)}: "
            + ("; ".join(states) or "none is alive")
        )

    async def _ask(self, replica: Replica, requests: Sequence[Request]) -> list[Completion]:
        """One replica's completions. Raises _Lost where another may serve, EngineError where none will."""
        fresh = [self._homes.pop(request.id, None) != replica.key for request in requests]
        if self._extended:
            found = await self._post(replica, self._extended_body(replica, requests, fresh), requests)
        else:
            alike = _alike(requests)
            posts = (self._post(replica, self._body(some), some) for some in alike)
            answers = _unless_failed(await asyncio.gather(*posts, return_exceptions=True))
            by_id = {r.id: c for some, got in zip(alike, answers, strict=True) for r, c in zip(some, got, strict=True)}
            found = [by_id[request.id] for request in requests]
        self._homes |= {request.id: replica.key for request in requests}
        return found

    def _extended_body(self, replica: Replica, requests: Sequence[Request], fresh: Sequence[bool]) -> Asked:
        body = self._body(requests)
        body.seed = requests[0].sampling.seed
        each = [own(r, body, f, self._messages) for r, f in zip(requests, fresh, strict=True)]
        body.mgrpo = Extension(each, self._released.pop(replica.key, []), self._name)
        return body

    def _body(self, requests: Sequence[Request]) -> Asked:
        body = common(self._model, requests[0])
        body.prompt = [list(request.prompt_ids) for request in requests]
        return body

    async def _post(self, replica: Replica, body: Asked, requests: Sequence[Request]) -> list[Completion]:
        url = f"{replica.url}/v1/completions"
        try:
            reply: Reply = await self._client.post(url, body, self._request_timeout_s, Reply)
        except Unreachable as error:
            raise _Lost(str(error)) from error
        except TimedOut as error:
            self._shun(replica)
            raise EngineTimeout(f"{self._model}: {error} for {_named(requests)}") from error
        except Refused as error:
            if error.status == 503:  # it stops, or has no weights
                raise _Lost(str(error)) from error
            raise EngineError(f"{self._model}: {error}; asked for {_named(requests)}") from error
        except WebError as error:
            raise EngineError(f"{self._model}: {error}; asked for {_named(requests)}") from error
        return self._completions(replica, reply, requests)

    def _completions(self, replica: Replica, reply: Reply, requests: Sequence[Request]) -> list[Completion]:
        version = replica.version
        if self._extended:
            if reply.mgrpo is None:
                raise EngineError(f"{replica.url} does not say which weights decoded {_named(requests)}")
            version = reply.mgrpo.version
            if self._deterministic and (version < self._wanted or reply.mgrpo.instance != replica.instance):
                raise _Lost(f"{replica.url} restarted: it replied with version {version}")
        choices = sorted(reply.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(requests))):
            raise EngineError(f"{replica.url} sent {len(choices)} choices for {_named(requests)}")
        return [_completion(replica.url, r, c, version) for r, c in zip(requests, choices, strict=True)]


def _completion(url: str, request: Request, choice: Choice, version: int) -> Completion:
    """Raises SamplingEvidenceError where it is not certain what was sampled, and with which probability."""
    ids, logprobs = choice.token_ids, None if choice.logprobs is None else choice.logprobs.token_logprobs
    reason = _STOP_REASONS.get(choice.finish_reason)
    if reason is None:
        raise EngineError(f"{url} ended {request.id} with finish_reason {choice.finish_reason!r}")
    if ids is None:
        raise SamplingEvidenceError(f"{url} sent no token ids for {request.id}; it must know return_token_ids")
    if logprobs is None or len(logprobs) != len(ids):
        count = 0 if logprobs is None else len(logprobs)
        raise SamplingEvidenceError(f"{url} sent {len(ids)} tokens but {count} log-probabilities for {request.id}")
    numbers = tuple(value for value in logprobs if value is not None)
    if len(numbers) < len(logprobs):
        raise SamplingEvidenceError(f"{url} sent a token without its log-probability for {request.id}")
    if choice.prompt_token_ids is not None and tuple(choice.prompt_token_ids) != request.prompt_ids:
        raise SamplingEvidenceError(f"{url} decoded {request.id} from another prompt than it was sent")
    return Completion(tuple(ids), numbers, version, reason)


def _unless_failed(outcomes: Sequence[T | BaseException]) -> list[T]:
    """All of what came, or the first error: raised once nothing is in flight any more."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _alike(requests: Sequence[Request]) -> list[list[Request]]:
    """Those that one set of fields can ask for are together."""
    groups: dict[object, list[Request]] = {}
    for request in requests:
        groups.setdefault((replace(request.sampling, seed=0), request.stop_ids), []).append(request)
    return list(groups.values())


def _state(replica: Replica) -> str:
    version = f"version {replica.version}" if replica.version >= 0 else "no version"
    return f"{version}, {replica.state}" if replica.state else version


def _named(requests: Sequence[Request]) -> str:
    more = f" and {len(requests) - 8} more" if len(requests) > 8 else ""
    return ", ".join(str(request.id) for request in requests[:8]) + more
