"""summary.json and the table that closes a run: before and after, on the same questions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mgrpo.config import Config
from mgrpo.report.notation import UNKNOWN, duration, fixed

FILE = "summary.json"

# key prefix -> what a newcomer reads; each has a value before and one after training
_COMPARED: Mapping[str, str] = {
    "success": "questions answered right, sampled like in training",
    "greedy": "questions answered right, most likely words",
    "sub_answer": "subtasks answered right by sub-agents",
}


def summary_of(records: Sequence[Mapping[str, Any]], config: Config, seconds: float) -> dict[str, Any]:
    """The numbers of a run, from its metrics. ``seconds`` is the wall-clock time of the process that finished it.

    ``warmup_seconds`` and ``rl_seconds`` are of collecting and learning, which may overlap, over every process that
    worked on the run; evaluation is in neither. What was not evaluated is None.
    """
    evaluations = {r["name"]: r for r in records if r["kind"] == "evaluate"}
    spent = _seconds_by_stage(records)
    taught = [stage.name for stage in config.stages if stage.collect == "teacher"]
    warmup = sum(spent.pop(name, 0.0) for name in taught)

    def value(name: str, key: str) -> Any:
        return evaluations.get(name, {}).get(key)

    return {
        "name": config.name,
        "seed": config.seed,
        "seconds": seconds,
        "warmup_seconds": warmup,
        "rl_seconds": sum(spent.values()),
        "success_before": value("before", "success"),
        "success_after": value("after", "success"),
        "greedy_before": value("before_greedy", "success"),
        "greedy_after": value("after_greedy", "success"),
        "sub_answer_before": value("before", "sub_answer"),
        "sub_answer_after": value("after", "sub_answer"),
        "closed_book": value("closed_book", "success"),
        "calls_per_rollout": value("after", "calls_per_rollout"),
    }


def seconds_before(folder: Path) -> float | None:
    """The time in the summary of a run that was finished before; None where there is none that can be read."""
    try:
        return float(json.loads((folder / FILE).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _seconds_by_stage(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """From one record to the next; what ends in a stage's record was spent between stages or between two processes."""
    spent: dict[str, float] = {}
    for before, record in pairwise(sorted(records, key=lambda record: float(record["time"]))):
        if record["kind"] in ("collect", "learn"):
            spent[record["stage"]] = spent.get(record["stage"], 0.0) + record["time"] - before["time"]
    return spent


def write_summary(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write ``folder``/summary.json: sorted keys, unknown as null; complete or not at all. Returns its path."""
    path = Path(folder) / FILE
    temporary = path.with_name(f".{FILE}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(dict(values), sort_keys=True, indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """What training changed. Keys that ``summary`` lacks are left out; unknown values are dashes."""
    table = Table(title="What training changed", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for key, words in _COMPARED.items():
        before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
        if before is not None or after is not None:
            table.add_row(words, _percent(before), _percent(after), _change(before, after))
    if "closed_book" in summary:
        table.add_row("the same questions without any tool", "", _percent(summary["closed_book"]), "")
    if "calls_per_rollout" in summary:
        table.add_row("delegations per question", "", fixed(summary["calls_per_rollout"]), "")
    console.print(table)
    console.print(Text(_times(summary)), soft_wrap=True)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def _change(before: float | None, after: float | None) -> str:
    return UNKNOWN if before is None or after is None else f"{100 * (after - before):+.1f}"


def _times(summary: Mapping[str, Any]) -> str:
    parts = [f"{duration(summary.get('seconds'))} in all"]
    for key, words in (("warmup_seconds", "warm-up"), ("rl_seconds", "reinforcement learning")):
        if summary.get(key) is not None:
            parts.append(f"{words} {duration(summary[key])}")
    seed = f"; seed {summary['seed']}" if "seed" in summary else ""
    return f"Time: {', '.join(parts)}{seed}"
