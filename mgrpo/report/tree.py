"""One rollout as a tree that a person can read: the planner's turns, and sub-agents under the calls that made them.

::

    g5/r2  What is the capital of Zubora ?  gold: Merova
    `-- planner/0  reward 1.00 (format 1  correct 1)  answer: Merova
        |-- turn 0  -> searcher: capital Zubora
        |   `-- searcher/0  reward 1.00 (format 1  correct_main 1  expert 1)  answer: Merova
        |       |-- turn 0  -> search: capital Zubora
        |       |   `-- <- Zubora p12 ...
        |       `-- turn 1  answer: Merova
        `-- turn 1  answer: Merova

What a model or a page wrote is shown as it is: never read as markup, control characters replaced, long texts shortened.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from mgrpo.report.notation import fixed, short
from mgrpo.types import Reward, Rollout, Task, ToolCall, ToolResult, Trajectory, TrajectoryId, Turn

SHOWN = 160  # characters of one text

Rewards = Mapping[TrajectoryId, Reward]


def rollout_tree(rollout: Rollout, rewards: Rewards, task: Task) -> Tree:
    """A renderable for a Rich console. Rewards that are not there are left out (a question that nobody grades)."""
    top = Text(f"g{rollout.group}/r{rollout.index}  ", style="dim")
    top.append(clean(task.question), style="bold")
    if task.answer is not None:
        top.append(f"  gold: {clean(task.answer)}", style="green")
    tree = Tree(top, guide_style="dim")
    if rollout.failure is not None:
        tree.add(_failed(rollout.failure.kind, rollout.failure.message))
    if rollout.trajectories:
        _add(tree, rollout.root, rollout, rewards)
    return tree


def rollout_text(rollout: Rollout, rewards: Rewards, task: Task, width: int = 120) -> str:
    """The same as plain lines of at most ``width`` characters."""
    file = StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(rollout_tree(rollout, rewards, task))
    return "\n".join(row.rstrip() for row in file.getvalue().splitlines())


def clean(text: str, limit: int = SHOWN) -> str:
    """One line of printable characters, shortened in the middle to ``limit``."""
    flat = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    if len(flat) <= limit:
        return flat
    head = limit * 2 // 3
    return f"{flat[:head]} ... {flat[len(flat) - (limit - head) :]}"


# ---------------------------------------------------------------- one trajectory


def _add(parent: Tree, trajectory: Trajectory, rollout: Rollout, rewards: Rewards) -> None:
    node = parent.add(_head(trajectory, rewards.get(trajectory.id)))
    if trajectory.context:
        node.add(Text(f"context: {clean(trajectory.context)}", style="dim"))
    children = {(c.parent.turn, c.parent.call): c for c in rollout.children(trajectory.id) if c.parent is not None}
    for index, turn in enumerate(trajectory.turns):
        said, single = _said(index, turn), len(turn.reply.calls) == 1
        branch = node.add(said.append("  ").append(_called(turn.reply.calls[0])) if single else said)
        for number, call in enumerate(turn.reply.calls):
            below = branch if single else branch.add(_called(call))
            child = children.pop((index, number), None)
            if child is not None:
                _add(below, child, rollout, rewards)
            result = turn.results[number] if number < len(turn.results) else None
            if result is not None and (child is None or result.error or result.failure):
                below.add(_result(result))
        if not turn.reply.calls:
            for result in turn.results:
                branch.add(_result(result))
    for child in children.values():  # the turn that called them was cut off by a failure
        _add(node, child, rollout, rewards)
    if trajectory.failure is not None:
        node.add(_failed(trajectory.failure.kind, trajectory.failure.message))


def _called(call: ToolCall) -> Text:
    arguments = "  ".join(clean(str(value)) for value in call.arguments.values())
    return Text.assemble("-> ", (clean(call.name), "cyan"), f": {arguments}")


def _head(trajectory: Trajectory, reward: Reward | None) -> Text:
    text = Text(f"{trajectory.id.agent}/{trajectory.id.invocation}", style="bold cyan")
    if reward is not None:
        parts = "  ".join(f"{name} {short(value)}" for name, value in reward.parts.items())
        text.append(f"  reward {fixed(reward.value)}", style="bold magenta")
        text.append(f" ({parts})" if parts else "", style="magenta")
        if reward.value is None and reward.cause:
            text.append(f"  unknown: {clean(reward.cause)}", style="yellow")
    if not trajectory.valid_format:
        text.append("  invalid format", style="red")
    answer = "none" if trajectory.answer is None else clean(trajectory.answer.answer)
    text.append(f"  answer: {answer}", style="bold")
    if trajectory.ending != "answer":
        text.append(f"  ended by {trajectory.ending}", style="yellow")
    return text


def _said(index: int, turn: Turn) -> Text:
    text = Text(f"turn {index}" + (" (forced)" if turn.forced else ""), style="dim")
    if turn.reply.error is not None:
        text.append(f"  {clean(turn.text)}")
        text.append(f"  format error: {clean(turn.reply.error)}", style="red")
    elif turn.reply.thought:
        text.append(f"  {clean(turn.reply.thought)}", style="italic")
    if turn.reply.answer is not None:
        answer = turn.reply.answer
        text.append(f"  answer: {clean(answer.answer)}", style="bold")
        if answer.evidence or answer.sources:
            text.append(f"  [{clean('; '.join(filter(None, (answer.evidence, *answer.sources))))}]", style="dim")
    if turn.stop_reason == "length":
        text.append("  (cut at the turn's token limit)", style="yellow")
    return text


def _result(result: ToolResult) -> Text:
    if result.failure is not None:
        return _failed(result.failure.kind, result.failure.message)
    style = "red" if result.error is not None else "dim"
    return Text(f"<- {clean(result.text)}", style=style)


def _failed(kind: str, message: str) -> Text:
    return Text(f"failed: {kind}: {clean(message)}", style="yellow")
