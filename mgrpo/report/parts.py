"""The processes of a run on one display: what happened to them, what they say, what the store knows of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from mgrpo.errors import InfrastructureError
from mgrpo.report.board import PartLine
from mgrpo.report.follow import Follower, last_lines, last_written
from mgrpo.report.metrics_log import PARTS
from mgrpo.report.reporter import Reporter

LOG, HEADER = "log.txt", "---- "  # of a part, in its folder; what the line begins with that opens a life in it
ASKED_S = 1.0  # between two questions to the store

# name, kind, agent, version that it serves (-1: none), what is not well ("": all is)
Announced = tuple[str, str, str, int, str]


@dataclass(frozen=True, slots=True)
class PartEvent:
    """Something that happened to a part. ``code`` is its exit code, or minus the signal that killed it.

    ``start`` and ``restart`` begin a life. ``death`` ends it against the plan, for ``reason``; the next one begins in
    ``again_in_s`` seconds, or never. ``complete``: it ended since the run is complete. ``stop``: it was told to stop;
    ``stopped``: it has.
    """

    part: str
    event: Literal["start", "restart", "death", "complete", "stop", "stopped"]
    pid: int | None
    code: int | None = None
    reason: str | None = None
    again_in_s: float | None = None

    @property
    def text(self) -> str:
        """One line: ``collect-0 (pid 71) died: SIGKILL; starts again in 0.5 s``."""
        who = self.part if self.pid is None else f"{self.part} (pid {self.pid})"
        then = "" if self.again_in_s is None else f"; starts again in {self.again_in_s:g} s"
        return {
            "start": f"{who} starts",
            "restart": f"{who} starts again",
            "death": f"{who} died: {self.reason}{then}",
            "complete": f"{who} is complete",
            "stop": f"{who} is told to stop",
            "stopped": f"{who} stopped: {self.reason}",
        }[self.event]


class PartsView:
    """Keeps a reporter's picture of all parts up to date. A context manager: a thread asks the store meanwhile."""

    def __init__(self, folder: Path, reporter: Reporter, announced: Callable[[], Sequence[Announced]]) -> None:
        self._folder, self._reporter, self._ask = folder, reporter, announced
        self._lines: dict[str, PartLine] = {}
        self._due: dict[str, float] = {}  # monotonic times of next starts
        self._announced: Sequence[Announced] = ()
        self._trouble = ""
        self._over = threading.Event()
        self._follower = Follower(folder)
        reporter.catch_up(self._follower.records())

    def __enter__(self) -> PartsView:
        # A question that hangs while the store is away holds nobody up at the end.
        threading.Thread(target=self._keep_asking, name="announced parts", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def on_event(self, event: PartEvent) -> None:
        line = self._lines.get(event.part, PartLine(event.part, ""))
        if event.event in ("start", "restart"):
            again = line.restarts + (event.event == "restart")
            line = replace(line, state="running", pid=event.pid, restarts=again)
        elif event.event == "death":
            state = "dead" if event.again_in_s is None else "waits"
            line = replace(line, state=state, pid=None, died=event.reason or "")
            self._due[event.part] = time.monotonic() + (event.again_in_s or 0.0)
        else:
            states = {"complete": "complete", "stop": "stopping", "stopped": "stopped"}
            line = replace(line, state=states[event.event], pid=event.pid if event.event == "stop" else None)
        self._lines[event.part] = line
        if event.event == "death":
            self._reporter.warn(event.text)
        else:
            self._reporter.note(event.text)
        self._show()

    def look(self) -> None:
        """What was written since the last look, and every part as it is now."""
        for record in self._follower.records():
            self._reporter.hear(record)
        self._show()

    def _show(self) -> None:
        announced = {name: (version, state) for name, _, _, version, state in self._announced}
        own = [self._now(line, *announced.pop(line.name, (-1, ""))) for line in self._lines.values()]
        others = [PartLine(name, "elsewhere", None, _served(v), says=state) for name, (v, state) in announced.items()]
        trouble = [PartLine("store", "away", says=self._trouble)] if self._trouble else []
        self._reporter.show_parts([*own, *others, *trouble])

    def _now(self, line: PartLine, version: int, trouble: str) -> PartLine:
        home = self._folder / PARTS / line.name
        said = [text for text in last_lines(home / LOG) if not text.startswith(HEADER)]
        written = last_written(home)
        state = line.state
        if state == "waits":
            state = f"starts in {max(0.0, self._due[line.name] - time.monotonic()):.0f} s"
        quiet = None if written is None or line.pid is None else max(0.0, time.time() - written)
        says = trouble or (said[0] if said else "")
        return replace(line, state=state, version=_served(version), quiet_s=quiet, says=says)

    def _keep_asking(self) -> None:
        while not self._over.is_set():
            try:
                self._announced, self._trouble = self._ask(), ""
            except InfrastructureError as error:
                self._trouble = str(error)
            self._over.wait(ASKED_S)


def _served(version: int) -> int | None:
    return version if version >= 0 else None
