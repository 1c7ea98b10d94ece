"""An engine whose turns are written by a script: a rule, a teacher, or replies from a file. No model, no torch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, model_validator

from mgrpo.config.registry import load_object
from mgrpo.engines.base import Completion, Request
from mgrpo.errors import ConfigError, DataError
from mgrpo.types import Reply, TrajectoryId

Script = Callable[[Request], Reply | str]
Encode = Callable[[Reply | str], tuple[int, ...]]


class Scripted:
    """ "Samples" what ``script`` says, encoded by ``encode`` (agents/chat.py), with log-probability 0.0.

    ``encode`` puts the end of turn behind the text. A turn longer than the request allows is cut, as a model's is.
    """

    def __init__(self, script: Script, encode: Encode, version: int = 0) -> None:
        self._script = script
        self._encode = encode
        self._version = version
        self.max_batch = self.max_calls = sys.maxsize

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await asyncio.sleep(0)  # a turn of the event loop, as for any engine
        return [self._complete(request) for request in requests]

    async def load(self, version: int, handle: str) -> None:
        self._version = version

    def release(self, id: TrajectoryId) -> None:
        """Nothing is kept for a trajectory."""

    async def close(self) -> None:
        """Nothing is open."""

    def _complete(self, request: Request) -> Completion:
        ids = self._encode(self._script(request))
        limit = request.sampling.max_tokens
        cut = len(ids) > limit
        ids = ids[:limit]
        return Completion(ids, (0.0,) * len(ids), self._version, "length" if cut else "stop")


class Settings(BaseModel, extra="forbid", frozen=True):
    """``path``: a JSON file {agent name: [text of turn 0, text of turn 1, ...]}. ``function``: "module:function"."""

    type: Literal["scripted"] = "scripted"
    path: Path | None = None
    function: str | None = None

    @model_validator(mode="after")
    def _one_script(self) -> Settings:
        if (self.path is None) == (self.function is None):
            raise ValueError('a scripted engine has either path = "replies.json" or function = "module:function"')
        return self

    def build(self, encode: Encode, **_: Any) -> Scripted:
        """Raises ConfigError when the file or function is not there or is no script."""
        return Scripted(self._script(), encode)

    def check(self, folder: Path | None) -> None:
        """Raise what `build` would. A script needs no model, so ``folder`` is not looked at."""
        self._script()

    def _script(self) -> Script:
        return _from_file(self.path) if self.path is not None else _imported(self.function or "")


def _from_file(path: Path) -> Script:
    try:
        replies = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"scripted replies {path}: {error}") from error
    if not _is_table(replies):
        raise ConfigError(f'scripted replies {path}: expected {{"agent name": ["text of turn 0", ...]}}')
    return _Table(replies, str(path))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(turns, list) and all(isinstance(text, str) for text in turns) for turns in value.values()
    )


class _Table:
    """Replies by agent and number of the turn."""

    def __init__(self, replies: Mapping[str, Sequence[str]], source: str) -> None:
        self._replies = replies
        self._source = source

    def __call__(self, request: Request) -> str:
        turn = sum(message.role == "assistant" for message in request.messages)
        replies = self._replies.get(request.id.agent, ())
        if turn >= len(replies):
            raise DataError(f"{self._source} has no reply for turn {turn} of {request.id}; add one")
        return replies[turn]


def _imported(path: str) -> Script:
    script = load_object(path, "engine.function")
    if not callable(script):
        raise ConfigError(f"engine.function: {path!r} is not callable; name a function that takes a Request")
    return script  # type: ignore[no-any-return]
