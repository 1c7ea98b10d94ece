"""What every tool is: a name, a JSON schema, and a call that returns text for the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mgrpo.types import Corpus, Task, ToolResult, TrajectoryId


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who calls, for which task, with which corpus at hand. ``seed`` keys any randomness of the tool (run seed)."""

    id: TrajectoryId
    turn: int
    call: int
    task: Task
    corpus: Corpus | None
    seed: int = 0


class Tool(Protocol):
    """``parameters`` is a JSON schema object: {"type": "object", "properties": {...}, "required": [...]}.

    A call never raises for what the model did wrong (that is `ToolResult.error`); a broken backend raises ToolError.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult: ...
