"""How long the objective's bookkeeping takes: alignment, advantages, coefficients and gradient mass of one step.

    python benchmarks/objective_speed.py [--rows 100000] [--repeats 7] [--json FILE]

Sub-agent trajectories of questions with K = 8 rollouts, 1 to 13 calls in each, 3 turns in a call. They are made before
the clock starts; medians over the repeats are shown, and the fastest. The two floors run in the same process: one plain
pass over the same trajectories that reads what every option needs, and numpy sorting as many keys. Processor time
beside wall time tells a slow program from a busy machine. Exit code 1 where the default path takes more than a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from mgrpo.algorithm.advantages import Comparison, advantages
from mgrpo.algorithm.alignment import Mode, align
from mgrpo.algorithm.coefficients import LossAggMode, gradient_mass, token_coefficients
from mgrpo.algorithm.comparison import CompareWith
from mgrpo.types import Parent, Reply, Reward, Row, Sample, Trajectory, TrajectoryId, Turn

K = 8
MOST_CALLS = 13
TURNS = 3
TARGET_D = 8
BOUND = 1.0  # seconds, for the default path
PROMPT, RESULT, SAMPLED = (250, 400), (100, 600), (20, 250)  # tokens, from and to
DEFAULT, RESAMPLED = "default path", "default path, resampled"


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats, and the fastest of them, in seconds."""

    wall: float
    processor: float
    fastest: float


def make_samples(count: int, seed: int = 0) -> tuple[list[Sample], dict[tuple[int, int], float | None]]:
    """``count`` calls of one sub-agent, and the reward of every rollout's root.

    Turns of one length share their tuples of tokens: nothing that is timed here looks into them, and 100,000
    trajectories of some 1,500 tokens each would not fit a laptop.
    """
    draw = random.Random(seed)
    ids = {n: tuple(range(n)) for n in range(max(PROMPT[1], RESULT[1], SAMPLED[1]) + 1)}
    logprobs = {n: (-0.5,) * n for n in range(SAMPLED[1] + 1)}
    samples: list[Sample] = []
    roots: dict[tuple[int, int], float | None] = {}
    while len(samples) < count:
        group, rollout = divmod(len(roots), K)
        right = draw.random() < 0.5
        roots[group, rollout] = 0.1 + 0.9 * right
        parent = TrajectoryId(group, rollout, "planner", 0)
        for call in range(min(draw.randint(1, MOST_CALLS), count - len(samples))):
            turns = tuple(
                Turn(ids[draw.randint(*(RESULT if t else PROMPT))], ids[n], logprobs[n], 0, "stop", "", Reply())
                for t in range(TURNS)
                for n in (draw.randint(*SAMPLED),)
            )
            id = TrajectoryId(group, rollout, "searcher", call)
            trajectory = Trajectory(id, "", turns, "answer", parent=Parent(parent, call, 0))
            samples.append(Sample(trajectory, Reward(0.1 + 0.4 * right + 0.5 * round(draw.random(), 1))))
    return samples, roots


def plain_pass(samples: Sequence[Sample]) -> float:
    """What no implementation in Python can do without: each trajectory's key, reward and sampled tokens, read once."""
    total = 0.0
    for sample in samples:
        id, reward = sample.trajectory.id, sample.reward.value
        assert reward is not None
        tokens = sum([len(turn.token_ids) for turn in sample.trajectory.turns])
        total += reward * tokens + id.group + id.rollout
    return total


def default_path(samples: Sequence[Sample], mode: Mode) -> dict[tuple[str, int], float]:
    rows = align(samples, mode, TARGET_D, seed=0, step=0)
    values = advantages(rows).values
    return gradient_mass(rows, values, token_coefficients(rows))


def parts(samples: Sequence[Sample], roots: dict[tuple[int, int], float | None]) -> dict[str, Callable[[], Any]]:
    """Everything that is timed, by name."""
    rows: list[Row] = align(samples, "weight", TARGET_D, seed=0, step=0)
    values, coefficients = advantages(rows).values, token_coefficients(rows)
    keys = np.random.default_rng(0).integers(0, len(samples), len(samples))
    found: dict[str, Callable[[], Any]] = {
        "floor: a plain Python pass": partial(plain_pass, samples),
        "floor: numpy sorts as many keys": partial(np.sort, keys),
    }
    for mode in get_args(Mode):
        found[f"align {mode}"] = partial(align, samples, mode, TARGET_D, seed=0, step=0)
    for name in get_args(CompareWith):
        found[f"advantages {name}"] = partial(advantages, rows, Comparison(name), roots)
    found["advantages agent, whitened"] = partial(advantages, rows, Comparison(whiten_advantages=True))
    for aggregation in get_args(LossAggMode):
        found[f"coefficients {aggregation}"] = partial(token_coefficients, rows, aggregation)
    found["gradient mass"] = partial(gradient_mass, rows, values, coefficients)
    found[DEFAULT] = partial(default_path, samples, "weight")
    found[RESAMPLED] = partial(default_path, samples, "resample")
    return found


def timed(call: Callable[[], Any], repeats: int) -> Timing:
    wall, processor = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        result = call()
        processor.append(time.process_time() - used)
        wall.append(time.perf_counter() - started)
        del result  # outside the clock
    return Timing(statistics.median(wall), statistics.median(processor), min(wall))


def show(timings: dict[str, Timing], rows: int, repeats: int) -> None:
    table = Table(title=f"{rows:,} trajectories; milliseconds, median of {repeats}")
    table.add_column("what")
    for heading in ("wall", "processor", "fastest wall"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        numbers = (timing.wall, timing.processor, timing.fastest)
        table.add_row(name, *(f"{1000 * seconds:.1f}" for seconds in numbers), style="bold" if name == DEFAULT else "")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="trajectories of the step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.repeats < 1:
        parser.error("--rows and --repeats must be at least 1")
    samples, roots = make_samples(arguments.rows)
    timings = {name: timed(call, arguments.repeats) for name, call in parts(samples, roots).items()}
    show(timings, arguments.rows, arguments.repeats)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        seconds = {name: vars(timing) for name, timing in timings.items()}
        result = {"rows": arguments.rows, "repeats": arguments.repeats, "seconds": seconds, "machine": machine}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if timings[DEFAULT].wall > BOUND:
        print(f"the default path took {timings[DEFAULT].wall:.2f} s, more than {BOUND:g}")
        sys.exit(1)


if __name__ == "__main__":
    main()
