"""metrics.jsonl: one JSON object a line, flushed at once, never rewritten.

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
    judge_calls, judge_cost, ...        what a judge that grades sub-answers was asked and what it cost

``learn`` holds, of one agent and one step. Its rows, and how they compare ("sft" compares nothing)::

    from_version        the agent's newest published weights during the step, which sampled the rows unless a teacher
                        did; what the step makes of them is published when its window ends
    seconds             of alignment, comparison and update
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgrpo.errors import DataError, RunFolderError

FILE = "metrics.jsonl"
Record = dict[str, Any]


class MetricsLog:
    """Appends to ``folder``/metrics.jsonl; a line that a killed run left unfinished is cut off first."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be written ({error}); choose another run folder") from error

    def write(self, kind: str, step: int, stage: str, values: Mapping[str, Any]) -> None:
        record = {"kind": kind, "step": step, "stage": stage, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[Record]:
    """Every record of a run, in order of step and then of writing.

    A step that was done again after a resume counts once: of the lines with equal (kind, step, agent or name) the last
    stays. A last line that is still being written is left out. Raises RunFolderError where there is no file, DataError
    naming the line that holds no record.
    """
    path = Path(folder) / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunFolderError(f"{path}: not readable ({error}); is {folder} a run folder?") from error
    last: dict[tuple[str, int, str], Record] = {}
    for number, line in enumerate(lines[:-1], 1):
        record = _record(line, f"{path}:{number}")
        key = (record["kind"], record["step"], str(record.get("agent", record.get("name", ""))))
        last.pop(key, None)  # a key keeps its first place in a dict, but this record's is at the end
        last[key] = record
    return sorted(last.values(), key=lambda record: int(record["step"]))


def _record(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); remove the line or restore the file") from error
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        raise DataError(f"{where}: not a metrics record (an object with kind and step); remove the line")
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
