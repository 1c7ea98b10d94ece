"""Does collecting while learning pay? The quickstart's reinforcement stages, synchronous and asynchronous.

::

    one warm-up, then from the same two models, each mode in turn:
    train        one process, max_staleness = 0      what `make quickstart` does
    launch 0     a process for every part, max_staleness = 0
    launch 1     the same with max_staleness = 1: engines and learners work at the same time

Seconds are those from the first rollout to the last update, without start-up and evaluations; CPU seconds are of all
processes in that mode, start-up included. Success is that of the same test questions after the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mgrpo.config import load
from mgrpo.report.metrics_log import read_metrics

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "quickstart.toml"
MODES = {"train": ("train", 0), "launch 0": ("launch", 0), "launch 1": ("launch", 1)}
LIMIT_S = 1800.0
Result = dict[str, Any]


def mgrpo(*arguments: object) -> None:
    command = [sys.executable, "-m", "mgrpo.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"mgrpo {' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def warmed(folder: Path, seed: int, steps: int | None) -> dict[str, Path]:
    """The models of both agents after the stages of demonstrations."""
    stages = [index for index, stage in enumerate(load(RECIPE).stages) if stage.collect == "teacher"]
    options = [f"seed={seed}", "evaluation.every=0"]
    options += [] if steps is None else [f"stages.{i}.steps={steps}" for i in stages]
    options += [] if steps is None else [f"stages.{i}.weight_sync_steps={steps}" for i in stages]
    table = cut(folder / "warm.toml", stages, options)
    mgrpo("train", table, "--run", folder / "warm")
    models = {agent: folder / agent for agent in load(RECIPE).agents}
    for agent, place in models.items():
        mgrpo("export", folder / "warm", agent, place)
    return models


def cut(path: Path, stages: list[int], options: list[str]) -> Path:
    """The quickstart with some of its stages, written to ``path``."""
    from mgrpo.config import dump

    config = load(RECIPE, options)
    path.write_text(dump(config.model_copy(update={"stages": tuple(config.stages[i] for i in stages)})))
    return path


def run(mode: str, folder: Path, models: dict[str, Path], seed: int, steps: int | None) -> Result:
    command, staleness = MODES[mode]
    stages = [index for index, stage in enumerate(load(RECIPE).stages) if stage.collect == "team"]
    options = [f"seed={seed}", f"max_staleness={staleness}", "evaluation.every=0", "evaluation.closed_book=false"]
    options += [f"agents.{agent}.model={place}" for agent, place in models.items()]
    options += [] if steps is None else [f"stages.{i}.steps={steps}" for i in stages]
    recipe = cut(folder / f"{mode.replace(' ', '-')}.toml", stages, options)
    place, before = folder / mode.replace(" ", "-"), resource.getrusage(resource.RUSAGE_CHILDREN)
    mgrpo(command, recipe, "--run", place)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    records = read_metrics(place)
    collected = [record for record in records if record["kind"] == "collect"]
    learned = [record for record in records if record["kind"] == "learn"]
    began = min(record["time"] - record["seconds"] for record in collected)
    found = {record["name"]: record for record in records if record["kind"] == "evaluate"}
    return {
        "seconds": max(record["time"] for record in learned) - began,
        "collecting": sum(record["seconds"] for record in collected),
        "learning": sum(record["seconds"] for record in learned),
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "staleness": max((record.get("staleness") or 0.0 for record in learned), default=0.0),
        "stale_groups": sum(record.get("stale_groups") or 0.0 for record in learned),
        "before": found["before"]["success"],
        "after": found["after"]["success"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of every stage, instead of the recipe's: a quick look")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine and learner have a core each
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with console.status("warming up"):
            models = warmed(folder, arguments.seed, arguments.steps)
        results: dict[str, Result] = {}
        for mode in arguments.modes:
            with console.status(mode):
                results[mode] = run(mode, folder, models, arguments.seed, arguments.steps)
            console.print(f"{mode}: {results[mode]['seconds']:.1f} s, success {results[mode]['after']}")
    floor = results[arguments.modes[0]]["seconds"]
    table = Table(title=f"quickstart, reinforcement stages, seed {arguments.seed}", title_justify="left")
    for name in ("mode", "seconds", "ratio", "collecting", "learning", "CPU", "staleness", "stale", "before", "after"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, result in results.items():
        numbers = [
            result["seconds"],
            result["seconds"] / floor,
            *(result[key] for key in ("collecting", "learning", "cpu")),
        ]
        told = [f"{number:.2f}" if i == 1 else f"{number:.1f}" for i, number in enumerate(numbers)]
        ages = [f"{result['staleness']:.0f}", f"{result['stale_groups']:.0f}"]
        scores = ["-" if result[key] is None else f"{result[key]:.3f}" for key in ("before", "after")]
        table.add_row(mode, *told, *ages, *scores)
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "modes": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
