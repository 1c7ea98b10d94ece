"""What every chat engine is: messages in, text out. For judges and agents that are not trained.

Its replies carry no token ids and no log-probabilities, so nothing it writes can become a row to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mgrpo.types import Message


@dataclass(frozen=True, slots=True)
class ChatReply:
    """``complete`` is False where the reply was cut off. Token counts are the service's; None where it gave none."""

    text: str
    complete: bool = True
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChatEngine(Protocol):
    """A new chat engine is done when tests/contract/test_chat_engines.py passes on it."""

    model: str  # the name people know it by
    identity: str  # whatever decides a reply beside the messages: equal identities may share cached replies
    retries: int  # tries beyond the first of all calls so far

    async def chat(self, messages: Sequence[Message]) -> ChatReply:
        """One reply. Transient faults are retried a bounded number of times.

        Raises EngineTimeout where the last try got no reply in time, EngineError for anything else that is no reply.
        """
        ...

    async def close(self) -> None:
        """Let go of what is held; a later call of `chat` opens it again."""
        ...
