"""Values <-> bytes, exactly: what is decoded equals what was encoded, to the last bit of every float.

The ordinary form is msgpack. It cannot hold two things that a model is free to write in a tool call's JSON: an
integer beyond 64 bits and half of a surrogate pair. Such a value is kept as ASCII JSON. Either form is compressed with
Zstandard where that makes it shorter. The first byte tells all apart: a record is a msgpack map or array, and those
begin with none of ``{``, ``[`` and the ``(`` of Zstandard's magic number. A CRC-32 closes it: databases notice a
damaged page of theirs, not a flipped bit inside a value.
"""

from __future__ import annotations

import json
import threading
import zlib
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zstandard

from mgrpo.errors import RunFolderError
from mgrpo.types import Failure, Sample, Task

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_SHORTEST = 256  # bytes; shorter records gain nothing
_LEVEL = -5  # what is stronger costs a commit to a local database more than the bytes it saves


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
        body = _ENCODER.encode(value)
    except (OverflowError, UnicodeEncodeError):
        body = json.dumps(msgspec.to_builtins(value)).encode("ascii")
    if len(body) >= _SHORTEST and len(packed := _ZSTANDARD.compress(body)) < len(body):
        body = packed
    return body + _checksum(body)


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "big")


class _Zstandard(threading.local):
    """Of this thread: making a context anew for every record takes longer than to compress a short one."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_ZSTANDARD = _Zstandard()


class Decoder(Generic[T]):
    """The inverse of `encode` for one type.

    Raises RunFolderError on bytes that differ from what was encoded, ValueError (msgspec's) on another type's.
    """

    def __init__(self, type: type[T]) -> None:
        self._type = type
        self._msgpack = msgspec.msgpack.Decoder(type)

    def __call__(self, data: bytes) -> T:
        body, checksum = data[:-4], data[-4:]
        if _checksum(body) != checksum:
            raise RunFolderError("the store holds a damaged record (its checksum differs); restore a copy of the store")
        if body[:1] == b"(":
            body = _ZSTANDARD.decompress(body)
        if body[:1] in (b"{", b"["):
            return msgspec.convert(json.loads(body), self._type)
        return self._msgpack.decode(body)


decode_sample = Decoder(Sample)
decode_head = Decoder(GroupHead)
decode_metrics: Decoder[dict[str, float]] = Decoder(dict[str, float])
