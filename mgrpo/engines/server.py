"""An engine behind HTTP: vLLM's ``/v1/completions`` for token ids, so that one client speaks to both (see wire.py)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.routing import Route

from mgrpo.engines.base import Completion, Engine, Request, Sampling
from mgrpo.engines.wire import Asked, Choice, Decoded, Each, Health, LogProbs, Release, Reply, Usage
from mgrpo.errors import EngineError
from mgrpo.types import Message, TrajectoryId
from mgrpo.web.serving import Refusal, get, post

Status = Callable[[], Mapping[str, Any]]

_IDLE_S = 1800.0  # a trajectory without a turn for so long has lost its collector
_PLAIN = -1  # the group of requests that name no trajectory


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for. ``vocabulary``: ids from 0 to below it are known; None: not checked."""

    prompts: int = 1024
    prompt_tokens: int = 131_072
    new_tokens: int = 32_768
    vocabulary: int | None = None


def routes(engine: Engine, model: str, status: Status, limits: Limits | None = None) -> list[Route]:
    """Serve ``engine`` as ``model``.

    ``status`` says {"version", "instance", "state"} of this moment; a version below 0 means that nothing is served yet.
    A list of prompts is one batch for the engine, as `Engine.generate` would be given it in its own process.
    """
    served = _Served(engine, model, status, limits or Limits())
    return [
        post("/v1/completions", Asked, served.complete),
        post("/release", Release, served.release),
        get("/health", served.health),
        get("/v1/models", served.models),
    ]


@dataclass(frozen=True, slots=True, order=True)
class _Own(TrajectoryId):
    """A trajectory of one client. Another may run the same one, as long as it has not heard that its lease is lost:
    neither uses, nor drops, what is cached for the other, so that turns stay a pure function of their batches."""

    client: str


class _Served:
    def __init__(self, engine: Engine, model: str, status: Status, limits: Limits) -> None:
        self._engine = engine
        self._model = model
        self._status = status
        self._limits = limits
        self._started = int(time.time())
        # First come, first served; who hangs up while waiting never reaches the engine.
        self._places = asyncio.Semaphore(min(engine.max_calls, 2**16))
        self._used: OrderedDict[TrajectoryId, float] = OrderedDict()  # trajectory -> when it last had a turn

    async def complete(self, asked: Asked) -> Reply:
        self.health()
        prompts = self._prompts(asked)
        named = asked.mgrpo is not UNSET
        requests = _named(asked, prompts) if named else _plain(asked, prompts)
        self._check(requests)
        async with self._places:
            self._make_room(asked, requests)
            try:
                completions = await self._engine.generate(requests)
            finally:
                if not named:
                    self._forget(request.id for request in requests)
        return self._reply(asked, requests, completions)

    async def release(self, asked: Release) -> dict[str, int]:
        ids = [_trajectory(id, asked.client) for id in asked.ids]
        self._forget(ids)
        return {"released": len(ids)}

    def health(self) -> Health:
        now = Health(self._model, **self._status())
        if now.version < 0:
            raise Refusal(503, now.state or f"{self._model!r} is not served yet", instance=now.instance)
        return now

    def models(self) -> dict[str, Any]:
        entry = {"id": self._model, "object": "model", "created": self._started, "owned_by": "mgrpo"}
        return {"object": "list", "data": [entry]}

    def _prompts(self, asked: Asked) -> list[tuple[int, ...]]:
        if asked.model != self._model:
            said = f"the model {asked.model!r} does not exist; this server has {self._model!r}"
            raise Refusal(404, said, type="NotFoundError", param="model")
        if asked.stream or asked.echo is True:
            raise Refusal(400, "stream and echo are not served; leave them out")
        if not asked.return_token_ids:
            raise Refusal(400, "this server has token ids and no text; ask with return_token_ids = true")
        if asked.logprobs not in (None, 0):
            raise Refusal(400, "log-probabilities are those of the sampled tokens; ask with logprobs = 0")
        lists = [prompt for prompt in asked.prompt if isinstance(prompt, list)]
        if len(lists) == len(asked.prompt):
            return [tuple(prompt) for prompt in lists]
        if lists:
            raise Refusal(400, "prompt is a list of token ids or a list of such lists, not a mixture")
        return [tuple(id for id in asked.prompt if isinstance(id, int))]

    def _check(self, requests: Sequence[Request]) -> None:
        limits = self._limits
        if not 1 <= len(requests) <= limits.prompts:
            raise Refusal(400, f"{len(requests)} prompts; one request has from 1 to {limits.prompts}")
        if len({request.id for request in requests}) < len(requests):
            raise Refusal(400, "two prompts of one request name the same trajectory")
        for request in requests:
            length, new = len(request.prompt_ids), request.sampling.max_tokens
            if not 1 <= length <= limits.prompt_tokens:
                raise Refusal(400, f"{request.id}: {length} prompt tokens; from 1 to {limits.prompt_tokens} are served")
            if new > limits.new_tokens:
                raise Refusal(400, f"{request.id}: max_tokens = {new}; at most {limits.new_tokens} are served")
            if limits.vocabulary is not None and max(request.prompt_ids) >= limits.vocabulary:
                unknown = max(request.prompt_ids)
                raise Refusal(400, f"{request.id}: token id {unknown}; the model has ids below {limits.vocabulary}")

    def _make_room(self, asked: Asked, requests: Sequence[Request]) -> None:
        """Drop what is cached for trajectories that are over, begin anew, or have been left behind."""
        now = time.monotonic()
        while self._used and next(iter(self._used.values())) < now - _IDLE_S:
            self._forget([next(iter(self._used))])
        if asked.mgrpo is UNSET:
            return
        self._forget(_trajectory(id, asked.mgrpo.client) for id in asked.mgrpo.release)
        self._forget(request.id for request, each in zip(requests, asked.mgrpo.each, strict=True) if each.fresh)
        for request in requests:
            self._used[request.id] = now
            self._used.move_to_end(request.id)

    def _forget(self, ids: Iterable[TrajectoryId]) -> None:
        for id in ids:
            self._used.pop(id, None)
            self._engine.release(id)

    def _reply(self, asked: Asked, requests: Sequence[Request], completions: Sequence[Completion]) -> Reply:
        versions = {completion.version for completion in completions}
        if len(versions) != 1 or len(completions) != len(requests):
            raise EngineError(
                f"the engine returned {len(completions)} completions of versions {sorted(versions)}"
                f" for {len(requests)} prompts; one version must decode all of them"
            )
        read, written = sum(len(r.prompt_ids) for r in requests), sum(len(c.token_ids) for c in completions)
        echoed = asked.mgrpo is UNSET  # as vLLM does; our own client knows what it sent
        return Reply(
            [
                _choice(i, request.prompt_ids if echoed else None, completion, asked.logprobs is not None)
                for i, (request, completion) in enumerate(zip(requests, completions, strict=True))
            ],
            model=self._model,
            id=f"cmpl-{secrets.token_hex(8)}",
            object="text_completion",
            created=int(time.time()),
            usage=Usage(read, written, read + written),
            mgrpo=Decoded(versions.pop(), str(self._status().get("instance", ""))),
        )


def _choice(index: int, prompt: Sequence[int] | None, completion: Completion, logprobs: bool) -> Choice:
    return Choice(
        index,
        token_ids=list(completion.token_ids),
        prompt_token_ids=None if prompt is None else list(prompt),
        logprobs=LogProbs(list(completion.logprobs)) if logprobs else None,
        finish_reason=completion.stop_reason,
    )


def _named(asked: Asked, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Requests of our own client: each has its trajectory."""
    assert asked.mgrpo is not UNSET
    each = asked.mgrpo.each
    if len(each) != len(prompts):
        raise Refusal(400, f"mgrpo.each has {len(each)} entries for {len(prompts)} prompts")
    return [_request(asked, prompt, one) for prompt, one in zip(prompts, each, strict=True)]


def _plain(asked: Asked, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Requests of any client: the same seed gives the same turns, and nothing is kept for a next one."""
    seed = asked.seed if isinstance(asked.seed, int) else secrets.randbits(63)
    ids = [TrajectoryId(_PLAIN, i, "plain", 0) for i in range(len(prompts))]
    return [_request(asked, p, Each(str(id), seed=seed)) for p, id in zip(prompts, ids, strict=True)]


def _request(asked: Asked, prompt: tuple[int, ...], own: Each) -> Request:
    def value(name: str) -> Any:
        found = getattr(own, name)
        return getattr(asked, name) if found is None else found

    seed = value("seed")
    sampling = Sampling(
        temperature=value("temperature"),
        max_tokens=value("max_tokens"),
        seed=seed if isinstance(seed, int) else 0,
        top_p=value("top_p"),
        top_k=max(value("top_k"), 0),
        min_p=value("min_p"),
    )
    messages = tuple(Message(role, content, name) for role, content, name in own.messages or ())
    id = _trajectory(own.id, "" if asked.mgrpo is UNSET else asked.mgrpo.client)
    return Request(id, prompt, sampling, tuple(value("stop_token_ids")), messages)


def _trajectory(text: str, client: str) -> TrajectoryId:
    try:
        id = TrajectoryId.parse(text)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    return _Own(id.group, id.rollout, id.agent, id.invocation, client)
