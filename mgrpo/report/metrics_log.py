"""metrics.jsonl: one JSON object a line, written at once, never rewritten.

A run of one process has one file, ``RUN/metrics.jsonl``. Where it is spread over several, each process writes
``RUN/parts/NAME/metrics.jsonl``, so that one which is killed spoils no other's lines; who reads a run reads them all.

::

    {"kind": "stage",    "step": 0, "stage": "rl", "time": 1.7e9, "name": "rl", "steps": 80, "total_steps": 80,
     "demonstrations": false}
    {"kind": "collect",  "step": 3, "stage": "rl", "time": ..., "seconds": 1.1, "success": 0.31, "reward/planner": ...}
    {"kind": "learn",    "step": 3, "stage": "rl", "time": ..., "agent": "planner", "from_version": 3, ...}
    {"kind": "evaluate", "step": 3, "stage": "rl", "time": ..., "name": "dev", "success": 0.4}
    {"kind": "alarm",    "step": 3, "stage": "rl", "time": ..., "name": "lazy_planner", "message": "..."}

``time`` is in seconds since 1970. A number that is not finite is written as null: JSON has no NaN.

``collect`` and ``evaluate`` hold what `mgrpo.report.metrics.rollout_metrics` lists, and ``retried_groups``, which
infrastructure cut off and which were run again. ``collect`` also holds ``seconds`` and ``tokens_per_second``, of
generation, tools and grading together, and where the recipe asks for them::

    replaced_groups     that filter_groups replaced, since their rollouts were all worth the same
    dull_groups         that were no better after the last replacement, and were kept
    short_groups        of which infrastructure left fewer than rollout.min_rollouts: seen, and worth nothing
    name                the first of the groups, where a step is collected in several parts
    judge_calls, judge_cost, ...        what a judge that grades sub-answers was asked and what it cost

``learn`` holds, of one agent and one step. Its rows, and how they compare ("sft" compares nothing)::

    from_version        the agent's newest published weights during the step, which sampled the rows unless a teacher
                        did; what the step makes of them is published when its window ends
    seconds             of alignment, comparison and update
    store_bytes         of its rows on their way from the store
    staleness           versions from the oldest token of its rows to the newest weights; stale_groups: left out for it
    rows, row_weight    rows after alignment, and the sum of their weights
    groups              comparison groups; zero_variance_groups: of two or more with one reward, which teach nothing;
                        singleton_groups: of one, with nobody to compare with
    reward_mean, reward_std, advantage_mean, advantage_std      weighted, over rows
    gradient_mass       sum over tokens of |coefficient x advantage|, before any clip; gradient_mass/<i>: of the agent's
                        i-th invocations. An agent's share of the step is its mass over the sum of all agents'

Its update. Agents that share weights have one, which stands in the record of the agent that owns the weights::

    tokens              that were trained on: sampled ones, without rows whose terms are all 0 and never reach the model
    entropy             nats per token at the sampling temperature
    clip_fraction       tokens whose gradient the clip removed
    approx_kl           k3 estimate of KL(old || new), nats per token; kl: of KL(new || reference), by kl_estimator
    logprob_abs_diff    |engine - learner| of the sampled tokens' log-probabilities under the same weights, nats per
                        token; rollout_kl: k3 estimate of the same. Not 0 where dtypes or kernels differ
    rollout_is_mean     of the correction's weights; rejected_fraction: tokens that rollout_rs rejected
    ratio_max           the largest; nll: of demonstrations, nats per token
    loss, grad_norm, learning_rate, skipped_steps       of the step

What is unknown is left out: all but agent, from_version and seconds where the agent had no rows; tokens and all below
where every advantage was 0. ``alarm`` records are those of `mgrpo.report.alarms`, one for each episode of trouble.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mgrpo.errors import DataError, RunFolderError

FILE = "metrics.jsonl"
PARTS = "parts"  # folder of the folders of a run's parts
Record = dict[str, Any]


class JsonLines:
    """Appends objects to a file, a line each; a line that a killed process left unfinished is cut off first.

    Raises RunFolderError where the file cannot be opened. What a full disk refuses is kept, and goes out before the
    next line: a run outlives it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pending = path, b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be written ({error}); choose another run folder") from error

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        self._pending += line.encode() + b"\n"
        with suppress(OSError):
            self._flush()

    def close(self) -> None:
        """Raises RunFolderError where there is no room for the last lines even now."""
        try:
            self._flush()
        except OSError as error:
            raise RunFolderError(f"{self._path}: its end could not be written ({error}); make room") from error
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]


class MetricsLog:
    """Appends to ``folder``/metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / FILE)

    def write(self, kind: str, step: int, stage: str, values: Mapping[str, Any]) -> None:
        self._lines.write({"kind": kind, "step": step, "stage": stage, "time": round(time.time(), 3), **values})

    def close(self) -> None:
        self._lines.close()


def metrics_files(folder: Path) -> list[Path]:
    """Those of a run that are there: its own, then those of its parts by name."""
    own = Path(folder) / FILE
    return [*([own] if own.exists() else []), *sorted(Path(folder).glob(f"{PARTS}/*/{FILE}"))]


def read_metrics(folder: Path) -> list[Record]:
    """Every record of a run and of its parts, in order of step and then of writing.

    A step that was done again counts once: of the lines with equal (kind, step, agent or name) the last stays. A last
    line that is still being written is left out. Raises RunFolderError where there is no file, DataError naming the
    line that holds no record.
    """
    try:
        told = [timed for path in metrics_files(folder) or [Path(folder) / FILE] for timed in _timed(path)]
    except OSError as error:
        raise RunFolderError(f"{error.filename}: not readable ({error}); is {folder} a run folder?") from error
    last: dict[tuple[str, int, str], Record] = {}
    for _, record in sorted(told, key=lambda timed: timed[0]):
        key = (record["kind"], record["step"], str(record.get("agent", record.get("name", ""))))
        last.pop(key, None)  # a key keeps its first place in a dict, but this record's is at the end
        last[key] = record
    return sorted(last.values(), key=lambda record: int(record["step"]))


def _timed(path: Path) -> Iterator[tuple[float, Record]]:
    """The records of one file and when they were written, which never decreases, whatever the clock did."""
    latest = float("-inf")
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        record = parse_record(line, f"{path}:{number}")
        latest = max(latest, float(record.get("time", latest)))
        yield latest, record


def parse_record(line: bytes, where: str) -> Record:
    """Raises DataError that names ``where`` for a line that holds no record."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); remove the line or restore the file") from error
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        raise DataError(f"{where}: not a metrics record (an object with kind and step); remove the line")
    if not isinstance(record.get("time", 0.0), int | float):
        raise DataError(f"{where}: time {record['time']!r} is no number; remove the line")
    return record


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 4096)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            position = start
        file.truncate(0)
