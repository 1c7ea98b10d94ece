"""The quickstart recipe with several seeds: success before and after reinforcement learning, and what it took.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--runs FOLDER] [--json FILE]

Every seed is a process of its own, started as a user would start it; its run folder is kept. Exit code 1 where a run
failed or the means miss the recipe's targets: before <= 0.30, after >= 0.80, closed book <= 0.05, and calls per rollout
that never fell to zero.
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
import tomllib
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


def run(seed: int, target: Path, extra: list[str]) -> dict[str, Any] | None:
    """The summary of one run, with the lowest calls per rollout of any step added; None where it failed."""
    command = [sys.executable, "-m", "mgrpo.cli", "train", str(RECIPE)]
    command += ["--seed", str(seed), "--run", str(target), *extra]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        return None
    summary: dict[str, Any] = json.loads((target / "summary.json").read_text())
    stages = tomllib.loads((target / "config.toml").read_text())["stages"]
    own = {stage["name"] for stage in stages if stage["collect"] == "team"}
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    calls = [line["calls_per_rollout"] for line in lines if line["kind"] == "collect" and line["stage"] in own]
    return summary | {"calls_lowest": min(calls)}


def mean_of(rows: list[dict[str, Any]], key: str) -> float | None:
    """The mean over seeds; None where a seed has no such number."""
    values = [row[key] for row in rows]
    return None if not values or None in values else statistics.fmean(values)


def show(rows: list[dict[str, Any]], means: dict[str, float | None]) -> None:
    table = Table(title="Quickstart, one row per seed; success is a share of the same test questions")
    table.add_column("seed")
    for key in COLUMNS:
        table.add_column(key.replace("_", "\n"), justify="right")
    for row in [*rows, means | {"seed": "mean"}]:
        table.add_row(str(row["seed"]), *(_number(row[key]) for key in COLUMNS))
    Console(width=140).print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.0f}"


def missed(rows: list[dict[str, Any]], means: dict[str, float | None]) -> list[str]:
    """The targets that these runs miss, in words."""
    bounds = (("success_before", "<=", 0.30), ("success_after", ">=", 0.80), ("closed_book", "<=", 0.05))
    faults = []
    for key, sign, bound in bounds:
        value = means[key]
        if value is None or (value > bound if sign == "<=" else value < bound):
            faults.append(f"{key} is {_number(value)}, not {sign} {bound}")
    return faults + [f"calls fell to zero with seed {row['seed']}" for row in rows if row["calls_lowest"] <= 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="folder for the run folders; default: a new temporary one")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to mgrpo train")
    arguments = parser.parse_args()
    extra = [word for override in arguments.set for word in ("--set", override)]
    folder = arguments.runs or Path(tempfile.mkdtemp(prefix="quickstart-"))
    found = {seed: run(seed, folder / f"seed{seed}", extra) for seed in arguments.seeds}
    rows = [row for row in found.values() if row is not None]
    means = {key: mean_of(rows, key) for key in COLUMNS}
    show(rows, means)
    faults = [f"seed {seed} failed" for seed, row in found.items() if row is None] + missed(rows, means)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        result = {"runs": rows, "mean": means, "missed": faults, "machine": machine}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"run folders: {folder}", *faults, sep="\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
