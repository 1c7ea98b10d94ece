"""What goes between `remote` and `server`: the fields of vLLM's ``POST /v1/completions``, and one field of our own.

::

    {"model": "planner", "prompt": [[1, 7, 2], [1, 8, 2]], "max_tokens": 64, "temperature": 1.0, "seed": 7, ...
     "mgrpo": {"each": [{"id": "g5/r0/planner/0", "fresh": true}, {"id": "g5/r1/planner/0", "max_tokens": 12}]}}

    {"choices": [{"index": 0, "token_ids": [20, 2], "logprobs": {"token_logprobs": [-0.1, -0.5]},
                  "finish_reason": "stop"}, ...], "mgrpo": {"version": 3, "instance": "..."}}

"mgrpo" in a request holds what each prompt has of its own, in a reply what decoded it. Servers that do not know it
leave it out of both. Log-probabilities survive: JSON has every digit of a float64.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from mgrpo.engines.base import Request

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1)]
Temperature = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1)]  # 0 and -1: all
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Each(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One prompt's own: its trajectory, and what differs from the request's fields.

    ``fresh``: the client has no turn of this trajectory from this server yet, so nothing cached may be used for it.
    ``messages``: [role, content, name] each, for engines that are no language model.
    """

    id: str
    fresh: bool = False
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop_token_ids: list[TokenId] | None = None
    messages: list[tuple[str, str, str]] | None = None


class Extension(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """``release``: trajectories that are over. ``client``: whose all of them are."""

    each: list[Each]
    release: list[str] = []
    client: str = ""


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """A request. Fields without an effect here are known with the one value that asks for none."""

    model: str
    prompt: list[TokenId | list[TokenId]]
    max_tokens: Count = 16
    temperature: Temperature = 1.0
    top_p: Share = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    seed: Seed | None | UnsetType = UNSET
    stop_token_ids: list[TokenId] = []
    logprobs: int | None = None
    return_token_ids: bool = False
    n: Annotated[int, Meta(ge=1, le=1)] = 1
    stream: bool = False
    echo: bool | UnsetType = UNSET
    user: str | None | UnsetType = UNSET
    mgrpo: Extension | UnsetType = UNSET


class Release(Struct, forbid_unknown_fields=True):
    ids: list[str]
    client: str = ""


class LogProbs(Struct):
    token_logprobs: list[float | None] | None = None


class Choice(Struct):
    index: int
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: LogProbs | None = None
    finish_reason: str | None = None


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


class Decoded(Struct):
    """By which weights, in which incarnation of the server."""

    version: int
    instance: str = ""


class Reply(Struct, omit_defaults=True):
    choices: list[Choice]
    model: str = ""
    id: str = ""
    object: str = ""
    created: int = 0
    usage: Usage | None = None
    mgrpo: Decoded | None = None


class Health(Struct):
    """``version`` -1: nothing is served yet. ``state`` is "" while all is well, else says in one line what is not."""

    model: str
    version: int = -1
    instance: str = ""
    state: str = ""


def common(model: str, request: Request) -> Asked:
    """A request without prompts, with the sampling of ``request``."""
    sampling = request.sampling
    return Asked(
        model=model,
        prompt=[],
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=list(request.stop_ids),
        logprobs=0,
        return_token_ids=True,
    )


def own(request: Request, shared: Asked, fresh: bool, messages: bool) -> Each:
    """What ``request`` has of its own, beside what it has in common with the others."""
    each = Each(str(request.id), fresh)
    for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        value = getattr(request.sampling, name)
        if value != getattr(shared, name):
            setattr(each, name, value)
    if list(request.stop_ids) != shared.stop_token_ids:
        each.stop_token_ids = list(request.stop_ids)
    if messages:
        each.messages = [(message.role, message.content, message.name) for message in request.messages]
    return each
