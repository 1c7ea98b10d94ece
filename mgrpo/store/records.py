"""Values <-> bytes, exactly: what is decoded equals what was encoded, to the last bit of every float.

The ordinary form is msgpack. It cannot hold two things that a model is free to write in a tool call's JSON: an
integer beyond 64 bits and half of a surrogate pair. Such a value is kept as ASCII JSON; the first byte tells the two
forms apart, since every record is a msgpack map or array and those never begin with ``{`` or ``[``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from mgrpo.types import Failure, Sample, Task

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Member:
    """What a rollout holds besides its trajectories."""

    index: int
    trajectories: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class GroupHead:
    """What a group holds besides its trajectories; members in the group's own order."""

    task: Task
    members: tuple[Member, ...]


def encode(value: Any) -> bytes:
    """Bytes of a dataclass or mapping of this package. Raises TypeError on anything that is no plain value."""
    try:
        return _ENCODER.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(msgspec.to_builtins(value)).encode("ascii")


class Decoder(Generic[T]):
    """The inverse of `encode` for one type. Raises ValueError (msgspec's) on bytes that hold no such value."""

    def __init__(self, type: type[T]) -> None:
        self._type = type
        self._msgpack = msgspec.msgpack.Decoder(type)

    def __call__(self, data: bytes) -> T:
        if data[:1] in (b"{", b"["):
            return msgspec.convert(json.loads(data), self._type)
        return self._msgpack.decode(data)


decode_sample = Decoder(Sample)
decode_head = Decoder(GroupHead)
decode_metrics: Decoder[dict[str, float]] = Decoder(dict[str, float])
