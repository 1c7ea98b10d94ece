"""The default engine: a Hugging Face model in this process, requests decoded together in batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from mgrpo.engines.base import Completion, Request
from mgrpo.errors import ConfigError
from mgrpo.types import TrajectoryId

if TYPE_CHECKING:
    from mgrpo.engines.decode import Decoder


class Local:
    """Decodes all requests of a call at once."""

    def __init__(self, decoder: Decoder, max_batch: int = 256, version: int = 0) -> None:
        self.max_batch = max_batch
        self.max_calls = 1
        self._decoder = decoder
        self._version = version
        self._one_at_a_time = threading.Lock()  # a call that ran out of time goes on in its thread, to its next token
        self._over: list[TrajectoryId] = []  # since the last batch

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        abandoned = threading.Event()
        try:  # A thread of its own, so that engines of different agents decode at the same time.
            return await asyncio.to_thread(self._decode, requests, abandoned)
        except asyncio.CancelledError:
            abandoned.set()
            raise

    async def load(self, version: int, handle: str) -> None:
        await asyncio.to_thread(self._load, version, handle)

    def release(self, id: TrajectoryId) -> None:
        self._decoder.forget(id)
        self._over.append(id)  # a call that ran out of time can still cache a turn of it

    async def close(self) -> None:
        self._decoder.forget()

    def _decode(self, requests: Sequence[Request], abandoned: threading.Event) -> list[Completion]:
        with self._one_at_a_time:
            while self._over:
                self._decoder.forget(self._over.pop())
            return self._decoder.decode(requests, self._version, abandoned) if requests else []

    def _load(self, version: int, handle: str) -> None:
        from mgrpo.engines.model import load_weights

        with self._one_at_a_time:
            load_weights(self._decoder.model, handle)
            self._decoder.forget()
            self._version = version


class Settings(BaseModel, extra="forbid", frozen=True):
    type: Literal["local"] = "local"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    max_batch: int = Field(256, gt=0)

    def check(self, folder: Path | None) -> None:
        """Raise what `build` would; without a ``folder`` of the device alone."""
        import torch

        try:
            torch.zeros(1, device=self.device).item()
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"device: torch cannot compute on {self.device!r} here ({reason}); use 'cpu'") from error
        if folder is not None:
            self.build(folder)

    def build(self, folder: str | Path, **_: Any) -> Local:
        """An engine that serves the model in ``folder`` as version 0. ConfigError for one that it cannot decode."""
        import torch

        from mgrpo.engines.decode import Decoder, check_decoding
        from mgrpo.engines.model import load_model

        model = load_model(folder, getattr(torch, self.dtype), self.device).requires_grad_(False)
        decoder = Decoder(model)
        check_decoding(decoder)
        return Local(decoder, self.max_batch)
