"""The one object that training talks to; it tells the metrics log, the alarms, the display and the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console

from mgrpo.config import Config, StageConfig
from mgrpo.config.registry import settings
from mgrpo.report.alarms import Alarm
from mgrpo.report.board import Board, PartLine
from mgrpo.report.curves import draw_curves
from mgrpo.report.display import Display
from mgrpo.report.metrics import Rewards, rollout_metrics
from mgrpo.report.metrics_log import MetricsLog, Record, read_metrics
from mgrpo.report.notation import fixed
from mgrpo.report.plan import header
from mgrpo.report.summary import summary_of, write_summary
from mgrpo.report.tree import rollout_text
from mgrpo.report.watch import Watch
from mgrpo.types import Failure, Group

PATIENCE_S = 2.0  # what is over sooner is not shown while it runs
_SAID = ("success", "sub_answer", "calls_per_rollout")  # of an evaluation, in one line; the log has all


class Reporter:
    """A context manager around a run. Steps count from 0 over the whole run, through all stages.

    ``quiet`` shows nothing; metrics.jsonl and the trackers get everything all the same.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        console: Console | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._config, self._clock = folder, config, clock
        self._board = Board(config.name, clock())
        self._display = Display(console or Console(), self._board, quiet, clock)
        self._watch = Watch(config)
        self._retried = 0  # groups since the last step or evaluation was told
        self._ended = ""  # the last stage whose end was shown
        self._open = ExitStack()

    def __enter__(self) -> Reporter:
        with ExitStack() as stack:
            self._log = MetricsLog(self._folder)
            stack.callback(self._log.close)
            self._trackers = []
            for index, table in enumerate(self._config.trackers):
                plan = settings("tracker", table, f"trackers.{index}")
                tracker = plan.build(folder=self._folder, config=self._config)
                stack.callback(tracker.close)
                self._trackers.append(tracker)
            stack.enter_context(self._display)
            self._display.show_header(header(self._config))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_stage()
        self._open.__exit__(kind, error, trace)

    # ------------------------------------------------------------ what training tells

    def stage(self, name: str, steps: int, first_step: int, total_steps: int) -> None:
        """Stage ``name`` begins (or goes on): ``steps`` of ``total_steps``, its first one is ``first_step``."""
        stage = self._stage_config(name)
        demonstrations = stage is not None and stage.collect == "teacher"
        values = {"name": name, "steps": steps, "total_steps": total_steps, "demonstrations": demonstrations}
        self._write("stage", first_step, name, values)

    def collected(
        self,
        step: int,
        groups: Sequence[Group],
        rewards: Rewards,
        seconds: float,
        extra: Mapping[str, float] = MappingProxyType({}),
        name: str | None = None,
    ) -> None:
        """The groups of ``step`` with their rewards; ``seconds`` is what collecting them took, ``extra`` what else is
        known of it, by the names that metrics_log.py lists. ``name`` tells apart several records of one step."""
        metrics: dict[str, Any] = {"seconds": seconds, **rollout_metrics(groups, rewards, self._config.subagents)}
        metrics |= extra
        if name is not None:
            metrics["name"] = name
        metrics["retried_groups"], self._retried = self._retried, 0
        metrics["tokens_per_second"] = metrics["sampled_tokens"] / seconds if seconds > 0 else None
        self._write("collect", step, self._board.stage, metrics)

    def learned(self, step: int, agent: str, from_version: int, metrics: Mapping[str, float], seconds: float) -> None:
        """``agent`` took the groups of ``step`` while ``from_version`` was its newest; ``metrics`` are its update's."""
        values = {"agent": agent, "from_version": from_version, "seconds": seconds, **metrics}
        self._write("learn", step, self._board.stage, values)

    def evaluated(self, name: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Evaluation ``name`` ("before", "after", "dev") of the weights after ``step`` steps."""
        retried, self._retried = self._retried, 0
        self._write("evaluate", step, self._board.stage, {"name": name, "retried_groups": retried, **metrics})

    def progress(self, what: str, done: int, total: int) -> None:
        """Rollouts that are over, ``done`` of ``total``, of what may take long."""
        now = self._clock()
        self._board = self._board.worked(what, done, total, now)
        if self._board.work is not None and now - self._board.work.started >= PATIENCE_S:
            self._display.show(self._board)

    def retried(self, groups: int, cause: Failure) -> None:
        """So many groups were cut off by infrastructure and run again; ``cause`` is the first failure."""
        self._retried += groups
        self._display.print(f"warning: groups that were cut off and run again: {groups}; {cause}", style="bold yellow")

    def warn(self, text: str) -> None:
        """A line about something that went wrong and is being dealt with."""
        self._display.print(f"warning: {text}", style="bold yellow")

    def example(self, when: str, group: Group, rewards: Rewards) -> None:
        """One rollout of ``group`` as a tree, ``when`` being "before" or "after" training."""
        text = rollout_text(group.rollouts[0], rewards, group.task)
        self._display.print(f"\nexample {when} training\n{text}")

    def finish(self, seconds: float) -> dict[str, Any]:
        """Write summary.json and curves.png, show the summary, and return it. ``seconds`` is this process's time."""
        self._end_stage()
        summary = summary_of(read_metrics(self._folder), self._config, seconds)
        write_summary(self._folder, summary)
        self._display.print(f"curves: {draw_curves(self._folder)}")
        self._display.show_summary(summary)
        return summary

    # ------------------------------------------------------------ what other processes of the run tell

    def catch_up(self, records: Sequence[Record]) -> None:
        """What was written before this process, by time: shows how far the run is. Nothing of it is news."""
        for record in records:
            if record["step"] >= self._board.first_step:
                self._move(record)
        board = self._board = self._board.resumed(self._clock())
        self._watch.begin(board.stage, range(board.first_step, board.first_step + board.steps), records)
        self._display.redraw(board)

    def hear(self, record: Record) -> None:
        """A record of metrics.jsonl, written by this process or by another one of the run.

        Stages are told by every process that comes to them; the first one counts. Alarms of others are passed over:
        who hears every record raises them all.
        """
        kind, step = record["kind"], record["step"]
        if kind == "alarm" or (kind == "stage" and not self._opens(record)):
            return
        if kind == "stage":
            self._end_stage()
            steps = range(step, step + record["steps"])
            self._watch.begin(record["name"], steps, read_metrics(self._folder))
        self._track(record)
        if step < self._board.first_step:  # a process that is late with the stage before
            return
        alarms = self._watch.heard(record)
        self._move(record)
        self._tell(step, alarms)
        self._display.show(self._board)
        if kind == "evaluate":
            said = "  ".join(f"{key} {fixed(record[key])}" for key in _SAID if key in record)
            self._display.print(f"evaluated {record['name']}: {said}")

    def show_parts(self, parts: Sequence[PartLine]) -> None:
        """The processes of the run, as they are now."""
        self._board = replace(self._board, parts=tuple(parts))
        self._display.redraw(self._board)

    def note(self, text: str) -> None:
        """A line where there is no panel that shows the same."""
        self._display.note(text)

    # ------------------------------------------------------------ where it goes

    def _opens(self, record: Record) -> bool:
        """Whether a stage record begins a stage that comes after the one that is shown."""
        return self._board.stage != record["name"] and bool(record["step"] >= self._board.first_step)

    def _move(self, record: Record) -> None:
        """The board after ``record``."""
        kind, step, board = record["kind"], record["step"], self._board
        if kind == "stage" and self._opens(record):
            steps = record["steps"], step, record["total_steps"]
            board = board.staged(record["name"], *steps, record["demonstrations"], self._clock())
        elif kind == "collect":
            board = board.collected(step, record)
        elif kind == "learn":
            board = board.learned(step, record["agent"], record, self._watch.shares(step))
        elif kind == "evaluate":
            board = board.evaluated(record["name"], record)
        self._board = board

    def _tell(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self._board = self._board.alarmed(alarm)
            self._log.write("alarm", step, self._board.stage, {"name": alarm.name, "message": alarm.message})
            self._display.print(f"warning: step {step}: {alarm.message}", style="bold yellow")

    def _write(self, kind: str, step: int, stage: str, values: Mapping[str, Any]) -> None:
        self._log.write(kind, step, stage, values)
        self.hear({"kind": kind, "step": step, **values})

    def _track(self, record: Record) -> None:
        if record["kind"] == "stage":
            return
        names = [record["kind"], *(str(record[key]) for key in ("agent", "name") if key in record)]
        prefix = "/".join(names[:1] if record["kind"] == "collect" else names)
        numbers = {
            f"{prefix}/{key}": float(value)
            for key, value in record.items()
            if isinstance(value, int | float) and key not in ("step", "time")
        }
        for tracker in self._trackers:
            tracker.log(record["step"], numbers)

    def _end_stage(self) -> None:
        if self._board.stage and self._board.stage != self._ended:
            self._ended = self._board.stage
            self._display.show(self._board, always=True)

    def _stage_config(self, name: str) -> StageConfig | None:
        return next((stage for stage in self._config.stages if stage.name == name), None)
