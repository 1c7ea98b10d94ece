"""Every part of a run as a process of this machine: started, started again when it dies, stopped together.

::

    launch      one live display over all parts: follows their metrics files, logs and what they announce in the store
      |
    supervise ---- starts, watches, stops ----> part     in a session of its own; its output goes to
      |                                           |      RUN/parts/NAME/log.txt
      |  write end                      read end  |
      '------------- a pipe ------------------> guard    kills the part and its children when the pipe ends

The guard is what leaves nothing running however the supervisor ends, SIGKILL included. It is a few lines of sh in the
part's process group, which wait for the end of a pipe that nobody writes to; the kernel closes the supervisor's end.
It holds its end before the part begins, so there is no moment without it, and needs nothing that is Linux only. A
process that makes a session of its own leaves the group, and is its maker's to end.

A part that is alive and does nothing is left alone: leases and deadlines deal with it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

from mgrpo.config import Config
from mgrpo.errors import InfrastructureError, RunFolderError, UserError
from mgrpo.report.follow import last_lines
from mgrpo.report.metrics_log import PARTS, JsonLines
from mgrpo.report.parts import HEADER, LOG, Announced, PartEvent, PartsView
from mgrpo.report.reporter import Reporter
from mgrpo.report.summary import seconds_before

EVENTS = "events.jsonl"  # in RUN/parts
INTERRUPTED, _MISTAKE = 130, 2  # exit codes: of `launch`, and of a part whose user can mend what is wrong
LOOK_S = 0.05  # between two looks at the parts
SHOWN_S = 0.5  # between two pictures
GRACE_S = 20.0  # for a part that was told to stop
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0  # before a part starts again; doubles with every death in the window
KILLED_S = 5.0  # for the system to end what was killed

Kind = Literal["engine", "tools", "collect", "learn"]
_WORKERS = ("collect", "learn")  # these end when the run is complete

# "$@" is the part. Descriptor 3 is the pipe's read end; the part itself does not get it.
_GUARD = 'exec 3<&0 </dev/null; (trap "" HUP INT TERM; read -r _ <&3; kill -s KILL -- -$$) & exec 3<&-; exec "$@"'


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One process to keep running. ``name`` is unique in the run and names its folder."""

    name: str
    argv: tuple[str, ...]
    kind: Kind


def part_plans(config: Config, folder: Path, options: Sequence[str] = ()) -> list[PartPlan]:
    """What a whole run needs, with the recipe that ``folder`` keeps; ``options`` go to every part.

    An engine for every set of weights, also for those that never move; a learner for every set that does.
    """
    plan, recipe = config.launch, str(folder / "config.toml")

    def part(kind: Kind, name: str, *command: str) -> PartPlan:
        run = ("--run", str(folder), "--name", name)
        return PartPlan(name, (sys.executable, "-m", "mgrpo.cli", *command, recipe, *run, *options), kind)

    owners = [name for name in config.agents if config.owner(name) == name]
    engines = [(owner, i) for owner in owners for i in range(plan.engines)]
    return [
        *([part("tools", "tools-0", "tools")] if plan.tool_server and config.tools else []),
        *(part("engine", f"serve-{owner}-{i}", "serve", owner) for owner, i in engines),
        *(part("learn", f"learn-{owner}", "learn", owner) for owner in config.learners),
        *(part("collect", f"collect-{i}", "collect") for i in range(plan.collectors)),
    ]


def launch(
    config: Config, folder: Path, plans: Sequence[PartPlan], announced: Callable[[], Sequence[Announced]]
) -> int:
    """Run all parts until the run is complete, show them meanwhile, and close with the summary and the curves.

    ``announced`` says what the store knows of parts; it is called from a thread, about once a second, and may raise
    InfrastructureError. Returns 0, or 130 where it was interrupted. Raises what `supervise` raises.
    """
    started = time.perf_counter()
    with Reporter(folder, config) as reporter, PartsView(folder, reporter, announced) as view:
        code = asyncio.run(_supervise_and_show(config, folder, plans, view))
        if code == 0:
            reporter.finish(seconds_before(folder) or time.perf_counter() - started)
    return code


async def _supervise_and_show(config: Config, folder: Path, plans: Sequence[PartPlan], view: PartsView) -> int:
    async def show() -> None:
        while True:
            view.look()
            await asyncio.sleep(SHOWN_S)

    # Unbuffered, so that a log which a kill cuts short has its last line.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "MGRPO_LAUNCHED": "1"}
    showing = asyncio.create_task(show())
    try:
        return await supervise(
            plans,
            folder,
            max_restarts=config.launch.max_restarts,
            restart_window_s=config.launch.restart_window_s,
            on_event=view.on_event,
            environment=environment,
        )
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing  # training goes on without a display that broke; its error is raised here
        view.look()


# ---------------------------------------------------------------- the supervisor


async def supervise(
    plans: Sequence[PartPlan],
    folder: Path,
    *,
    max_restarts: int,
    restart_window_s: float,
    on_event: Callable[[PartEvent], None] = lambda event: None,
    environment: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
    first_delay_s: float = FIRST_DELAY_S,
    longest_delay_s: float = LONGEST_DELAY_S,
) -> int:
    """Keep every part of ``plans`` running until all that collect or learn have ended by themselves with code 0.

    Returns 0 then, or 130 after SIGINT, SIGTERM or SIGHUP. In any case, also when it raises or is cancelled, every
    part is told to stop by SIGTERM and killed with its process group after ``grace_s``, at once at the next signal.
    What happens is told to ``on_event`` and written to ``folder``/parts/events.jsonl. Runs in the main thread.

    A part that dies is started again after a delay, ``max_restarts`` times within ``restart_window_s``; the next
    death raises InfrastructureError. Exit code 2 is the user's to mend: raises UserError with the part's own line.
    RunFolderError where another supervisor works on ``folder``.
    """
    with ExitStack() as stack:
        stack.enter_context(_alone(folder))
        events = stack.enter_context(closing(JsonLines(folder / PARTS / EVENTS)))
        guards = stack.enter_context(_pipe())
        signals = stack.enter_context(_signals())

        def tell(event: PartEvent) -> None:
            told = {key: value for key, value in asdict(event).items() if value is not None}
            events.write({"time": round(time.time(), 3), **told})
            on_event(event)

        policy = _Policy(max_restarts, restart_window_s, first_delay_s, longest_delay_s)
        parts = [_Part(plan, folder / PARTS / plan.name, policy, tell) for plan in plans]
        try:
            return await _watch(parts, guards, environment, signals)
        finally:
            try:
                await _stop(parts, grace_s, signals)
            finally:
                for part in parts:
                    part.kill()


async def _watch(parts: list[_Part], guards: int, environment: Mapping[str, str] | None, signals: list[int]) -> int:
    workers = [part for part in parts if part.plan.kind in _WORKERS]
    while True:
        for part in parts:
            part.look(guards, environment)
        if signals:
            return INTERRUPTED
        if workers and all(part.complete for part in workers):
            return 0
        await asyncio.sleep(LOOK_S)


async def _stop(parts: list[_Part], grace_s: float, signals: list[int]) -> None:
    """Ask, wait, kill. A signal that comes while this waits ends the waiting."""
    before, deadline = len(signals), time.monotonic() + grace_s
    for part in parts:
        part.ask_to_stop()
    while any(part.alive for part in parts) and len(signals) == before and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)


@dataclass(frozen=True, slots=True)
class _Policy:
    """When a part that died starts again."""

    max_restarts: int
    window_s: float
    first_delay_s: float
    longest_delay_s: float

    def delay(self, deaths: int) -> float:
        return float(min(self.longest_delay_s, self.first_delay_s * 2 ** min(deaths - 1, 30)))


@dataclass(slots=True)
class _Part:
    """One part through all its lives. Times are of the monotonic clock."""

    plan: PartPlan
    home: Path
    policy: _Policy
    tell: Callable[[PartEvent], None]
    process: subprocess.Popen[bytes] | None = None
    due: float | None = 0.0  # when it is started next; None while it runs and once it is complete
    log_start: int = 0  # byte of the log at which this life's output begins
    restarts: int = 0
    deaths: deque[float] = field(default_factory=deque)  # within the window
    complete: bool = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self, guards: int, environment: Mapping[str, str] | None) -> None:
        """Start it when that is due; deal with its end. Raises as `supervise` does."""
        if self.process is not None and (code := self.process.poll()) is not None:
            pid = self._forget(self.process)
            if code == 0 and self.plan.kind in _WORKERS:
                self.complete = True
                self.tell(PartEvent(self.plan.name, "complete", pid))
            else:
                self._died(pid, code, _reason(code, last_lines(self.home / LOG, self.log_start)))
        elif self.due is not None and time.monotonic() >= self.due:
            self.due = None
            try:
                self._start(guards, environment)
            except OSError as error:
                self._died(None, None, f"it could not be started: {error}")

    def _start(self, guards: int, environment: Mapping[str, str] | None) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / LOG).open("ab", buffering=0) as log:
            self.log_start = _write_header(log, self.plan, self.restarts)
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "sh", *self.plan.argv],
                stdin=guards,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.tell(PartEvent(self.plan.name, "restart" if self.restarts else "start", self.process.pid))

    def _died(self, pid: int | None, code: int | None, reason: str) -> None:
        now = time.monotonic()
        self.deaths.append(now)
        while self.deaths[0] < now - self.policy.window_s:
            self.deaths.popleft()
        mistake = code == _MISTAKE
        final = mistake or len(self.deaths) > self.policy.max_restarts
        delay = None if final else self.policy.delay(len(self.deaths))
        self.tell(PartEvent(self.plan.name, "death", pid, code, reason, delay))
        if mistake:
            lines = last_lines(self.home / LOG, self.log_start)
            line = next((own for own in lines if own.startswith("error: ")), lines[0] if lines else reason)
            raise UserError(f"{self.plan.name}: {line.removeprefix('error: ')}")
        if delay is None:
            times = f"{len(self.deaths)} times within {self.policy.window_s:g} s" if len(self.deaths) > 1 else "once"
            log = self.home / LOG
            raise InfrastructureError(f"{self.plan.name} died {times}, the last time by {reason}; its log: {log}")
        self.restarts += 1
        self.due = now + delay

    def ask_to_stop(self) -> None:
        self.due = None
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.tell(PartEvent(self.plan.name, "stop", self.process.pid))

    def kill(self) -> None:
        """The part and its children, whatever they do; nothing where it is gone."""
        if self.process is None:
            return
        process, code = self.process, self.process.poll()
        pid = self._forget(process)
        if code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(KILLED_S)
        reason = "it does not end although it was killed" if code is None else _ending(code)
        self.tell(PartEvent(self.plan.name, "stopped", pid, code, reason))

    def _forget(self, process: subprocess.Popen[bytes]) -> int:
        """Kills what is left of its group: its guard, its children, and itself where it lives."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.process = None
        return process.pid


def _write_header(log: IO[bytes], plan: PartPlan, restarts: int) -> int:
    """Returns where the log goes on."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    life = f"restart {restarts}" if restarts else "start"
    log.write(f"{HEADER}{when} {life} of {plan.name}: {' '.join(plan.argv)}\n".encode(errors="backslashreplace"))
    return log.tell()


def _reason(code: int, lines: Sequence[str]) -> str:
    """How it ended and the last thing that it said."""
    return f"{_ending(code)}: {lines[0]}" if lines else _ending(code)


def _ending(code: int) -> str:
    name = next((own.name for own in signal.Signals if own == -code), f"signal {-code}")
    return name if code < 0 else f"exit code {code}"


# ---------------------------------------------------------------- what a supervisor holds


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One supervisor for a run folder: two would start every part twice."""
    path = folder / PARTS
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RunFolderError(f"{folder}: another `mgrpo launch` runs its parts; wait for it, or stop it") from error
    finally:
        os.close(lock)


@contextmanager
def _pipe() -> Iterator[int]:
    """The end that guards read. Only this process holds the other one, and no program that it starts inherits it."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that ask for an end, as they come. One that is ignored, as by nohup, stays ignored."""
    loop, heard = asyncio.get_running_loop(), list[int]()
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, heard.append, number)
    try:
        yield heard
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
