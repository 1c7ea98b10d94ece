"""A sub-agent offered to another agent as a tool; sub-agents may have sub-agents, to any depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgrpo.agents.loop import Agent, Invocation, run
from mgrpo.tools.base import CallContext
from mgrpo.types import Parent, ToolResult

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "task": {"type": "string", "description": "What to find out."},
        "context": {"type": "string", "description": "What is known already and helps."},
    },
    "required": ["task"],
}


class Delegate:
    """Calling it runs ``agent`` on the task and returns its findings, written in the caller's format.

    Works only inside an episode (agents/loop.py), which keeps the budgets and the tree: each call becomes a child
    trajectory hung on the turn that made it. ``name`` defaults to the agent's.
    """

    def __init__(self, agent: Agent, name: str = "", description: str = "") -> None:
        self.agent = agent
        self.name = name or agent.name
        self.description = description or f"Delegates a task to the agent {agent.name}."
        self.parameters = PARAMETERS

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        if not isinstance(context, Invocation) or context.child is None:
            raise TypeError(f"sub-agent {self.name} was called outside of an episode; use agents.loop.run")
        parent = Parent(context.id, context.turn, context.call)
        task, known = arguments["task"], arguments.get("context", "")
        child = await run(self.agent, context.child, task, known, parent, context.episode)
        if child.answer is None:
            return ToolResult("no answer", failure=child.failure)
        return ToolResult(context.caller.chat.format.findings(child.answer))
