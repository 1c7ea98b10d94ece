"""The one object that training talks to; it tells the metrics log, the alarms, the display and the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console

from mgrpo.config import Config, StageConfig
from mgrpo.config.registry import settings
from mgrpo.report.alarms import Alarm
from mgrpo.report.board import Board
from mgrpo.report.curves import draw_curves
from mgrpo.report.display import Display
from mgrpo.report.metrics import Rewards, rollout_metrics
from mgrpo.report.metrics_log import MetricsLog, read_metrics
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
        self._end_stage()
        self._watch.begin(name, range(first_step, first_step + steps), read_metrics(self._folder))
        stage = self._stage_config(name)
        demonstrations = stage is not None and stage.collect == "teacher"
        self._board = self._board.staged(name, steps, first_step, total_steps, demonstrations, self._clock())
        values = {"name": name, "steps": steps, "total_steps": total_steps, "demonstrations": demonstrations}
        self._write("stage", first_step, values)
        self._display.show(self._board)

    def collected(
        self,
        step: int,
        groups: Sequence[Group],
        rewards: Rewards,
        seconds: float,
        extra: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """The groups of ``step`` with their rewards; ``seconds`` is what collecting them took, ``extra`` what else is
        known of it, by the names that metrics_log.py lists."""
        metrics: dict[str, Any] = {"seconds": seconds, **rollout_metrics(groups, rewards, self._config.subagents)}
        metrics |= extra
        metrics["retried_groups"], self._retried = self._retried, 0
        metrics["tokens_per_second"] = metrics["sampled_tokens"] / seconds if seconds > 0 else None
        self._board = self._board.collected(step, metrics)
        self._write("collect", step, metrics)
        self._tell(step, self._watch.collected(step, metrics))
        self._display.show(self._board)

    def learned(self, step: int, agent: str, from_version: int, metrics: Mapping[str, float], seconds: float) -> None:
        """``agent`` took the groups of ``step`` while ``from_version`` was its newest; ``metrics`` are its update's."""
        values = {"agent": agent, "from_version": from_version, "seconds": seconds, **metrics}
        alarms = self._watch.learned(step, agent, metrics)
        self._board = self._board.learned(step, agent, values, self._watch.shares(step))
        self._write("learn", step, values)
        self._tell(step, alarms)
        self._display.show(self._board)

    def evaluated(self, name: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Evaluation ``name`` ("before", "after", "dev") of the weights after ``step`` steps."""
        self._board = self._board.evaluated(name, metrics)
        self._write("evaluate", step, {"name": name, "retried_groups": self._retried, **metrics})
        self._retried = 0
        self._tell(step, self._watch.evaluated(name, step, metrics))
        self._display.show(self._board)
        said = "  ".join(f"{key} {fixed(metrics[key])}" for key in _SAID if key in metrics)
        self._display.print(f"evaluated {name}: {said}")

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

    # ------------------------------------------------------------ where it goes

    def _tell(self, step: int, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self._board = self._board.alarmed(alarm)
            self._write("alarm", step, {"name": alarm.name, "message": alarm.message})
            self._display.print(f"warning: step {step}: {alarm.message}", style="bold yellow")

    def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._log.write(kind, step, self._board.stage, values)
        if kind in ("collect", "learn", "evaluate"):
            prefix = "/".join(str(values[key]) for key in ("agent", "name") if key in values)
            numbers = {
                f"{kind}/{prefix}/{key}" if prefix else f"{kind}/{key}": float(value)
                for key, value in values.items()
                if isinstance(value, int | float)
            }
            for tracker in self._trackers:
                tracker.log(step, numbers)

    def _end_stage(self) -> None:
        if self._board.stage and self._board.stage != self._ended:
            self._ended = self._board.stage
            self._display.show(self._board, always=True)

    def _stage_config(self, name: str) -> StageConfig | None:
        return next((stage for stage in self._config.stages if stage.name == name), None)
