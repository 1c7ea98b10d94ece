"""The quickstart recipe with several seeds: success before and after reinforcement learning, and what it took.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--json FILE]

Every seed is a process of its own, started as a user would start it. Exit code 1 where a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
COLUMNS = (
    "success_before",
    "success_after",
    "greedy_before",
    "greedy_after",
    "sub_answer_before",
    "sub_answer_after",
    "closed_book",
    "calls_per_rollout",
    "calls_lowest",
    "warmup_seconds",
    "rl_seconds",
    "seconds",
)


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """The summary of one run, with the lowest calls per rollout of any reinforcement step added."""
    target = folder / f"seed{seed}"
    command = [
        sys.executable,
        "-m",
        "mgrpo.cli",
        "train",
        str(RECIPE),
        "--seed",
        str(seed),
        "--run",
        str(target),
        *extra,
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((target / "summary.json").read_text())
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["kind"] == "collect" and line["stage"] in ("simple", "hard")]
    calls = [line["calls_per_rollout"] for line in own]
    return summary | {"calls_lowest": min(calls)}


def show(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Print the table; return the mean of every column."""
    means = {key: statistics.fmean(row[key] for row in rows) for key in COLUMNS}
    table = Table(title="Quickstart, one row per seed; success is a share of the same test questions")
    table.add_column("seed")
    for key in COLUMNS:
        table.add_column(key.replace("_", "\n"), justify="right")
    for row in [*rows, means | {"seed": "mean"}]:
        table.add_row(str(row["seed"]), *(f"{row[key]:.3f}" if row[key] < 10 else f"{row[key]:.0f}" for key in COLUMNS))
    Console(width=140).print(table)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to mgrpo train")
    arguments = parser.parse_args()
    extra = [word for override in arguments.set for word in ("--set", override)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(seed, Path(folder), extra) for seed in arguments.seeds]
    means = show(rows)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"runs": rows, "mean": means, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
