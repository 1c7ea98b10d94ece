"""What every engine is: token ids in, token ids with log-probabilities and a weight version out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mgrpo.errors import SamplingEvidenceError
from mgrpo.types import Message, StopReason, TrajectoryId


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw. ``temperature`` 0 is greedy. ``seed`` is the run's; noise is keyed by (seed, id, position).

    Truncation comes after the temperature, in this order: the ``top_k`` most likely tokens (0: all), of these the
    fewest whose probability reaches ``top_p``, of these the ones at least ``min_p`` times as likely as the most likely.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens may be left out of what is drawn from; greedy sampling never asks."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to write. ``messages`` is the same conversation for engines that are no language model."""

    id: TrajectoryId
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]  # sampling one of these ends the turn; it is part of the sampled ids
    messages: tuple[Message, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """``logprobs[i]`` is log pi(token_ids[i]) at the sampling temperature over the kept set.

    The kept set is the full vocabulary unless truncated (`Sampling`); its probabilities are renormalised to 1. Greedy
    turns are scored at temperature 1 over the full vocabulary.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    stop_reason: StopReason

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise SamplingEvidenceError(
                f"engine returned {len(self.token_ids)} tokens but {len(self.logprobs)} log-probabilities"
            )


class Engine(Protocol):
    """Four methods and two numbers. A new engine is done when tests/contract/test_engines.py passes on it."""

    @property
    def max_batch(self) -> int:
        """Most requests that one call of `generate` is given."""
        ...

    @property
    def max_calls(self) -> int:
        """Calls of `generate` at the same time from which it gains."""
        ...

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. Raises EngineError or EngineTimeout for the whole batch.

        A call that is cancelled, as one that missed its deadline is, must not hold up the next one.
        """
        ...

    async def load(self, version: int, handle: str) -> None:
        """Serve the weights in folder ``handle`` as ``version`` from now on; cached prefixes are dropped."""
        ...

    def release(self, id: TrajectoryId) -> None:
        """The trajectory is over: anything cached for it may go."""
        ...

    async def close(self) -> None:
        """The run, or the program, is over: let go of what is held."""
        ...
