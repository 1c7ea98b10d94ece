"""One run in separate processes under the real supervisor, while something disturbs it."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

from chaos_checks import Findings, check
from chaos_forks import Nursery
from chaos_recipe import NOTES, recipe

from mgrpo.config import Config
from mgrpo.launch import PartPlan, part_plans, supervise
from mgrpo.report.parts import PartEvent
from mgrpo.run import RunFolder
from mgrpo.store.opening import STORE_VARIABLE

BENCHMARKS = Path(__file__).resolve().parent
EPOCHS = 2  # of a round
GAP_S = 0.4  # between two kills, on average
PAUSES = 0.05  # of what is done to parts
AT_END = 0.2  # of the kills, and of the time between them: when only the last evaluation is left
PATIENCE = 4  # kills without a commit or a publication between them
ROUND_S = 300.0  # longest time for a round
KINDS = ("collect", "learn", "engine", "tools")


@dataclass(frozen=True)
class Kill:
    """``time`` is of the monotonic clock; ``pid`` is the process that was killed."""

    time: float
    part: str
    kind: str
    pid: int


@dataclass
class Round:
    """One run and what was done to it."""

    config: Config
    folder: Path
    store: str | None
    plans: Sequence[PartPlan]
    kills: list[Kill] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)  # when the database server was restarted or killed
    pauses: int = 0
    deaths: list[str] = field(default_factory=list)  # that nobody meant
    complete: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    seconds: float = 0.0
    findings: Findings = field(default_factory=Findings)

    def on_event(self, event: PartEvent) -> None:
        if event.pid is not None:
            self.pids.add(event.pid)
        if event.event == "complete":
            self.complete.add(event.part)
        if event.event == "death" and event.code != -SIGKILL:
            self.deaths.append(event.text)


# ---------------------------------------------------------------- a round


def environment(compiled: Path | None = None) -> dict[str, str]:
    """Of child processes: one thread each, and nothing from a network.

    ``compiled`` is where they keep compiled modules, for a shell that forbids it beside the sources.
    """
    own = dict(os.environ)
    if own.pop("PYTHONDONTWRITEBYTECODE", None) and compiled is not None:
        own.setdefault("PYTHONPYCACHEPREFIX", str(compiled))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    path = f"{BENCHMARKS.parent}{os.pathsep}{BENCHMARKS}"
    return own | threads | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@contextmanager
def nursery(compiled: Path) -> Iterator[Nursery]:
    """Leaves no process behind."""
    with (
        tempfile.TemporaryDirectory(prefix="mgrpo-") as short,  # names of sockets are
        Nursery(f"{short}/nursery", "chaos_parts", "part", environment(compiled)) as found,
    ):
        yield found
    if left := of_session(found.process_id):
        raise RuntimeError(f"processes {left} outlived the nursery")


def of_session(session: int) -> list[int]:
    """Processes that live in a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, own = entry.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append(int(entry.parent.name))
    return found


def begin(home: Path, nursery: Nursery, store: str | None, **options: Any) -> Round:
    """Make the run's folder and store, and say which parts it needs. ``store`` None: a file in the folder."""
    home.mkdir()
    config = recipe(home, EPOCHS, **options)
    folder = home / "run"
    with _told(store), closing(RunFolder(folder).join(config)) as hold:
        config = hold.config
    plans = [
        PartPlan(plan.name, nursery.command(plan.name, *plan.argv[3:]), plan.kind)
        for plan in part_plans(config, folder)
    ]
    return Round(config, folder, store, plans)


@contextmanager
def _told(store: str | None) -> Iterator[None]:
    """The store's URL, which may hold a password, is in the environment and nowhere else."""
    before = os.environ.pop(STORE_VARIABLE, None)
    try:
        if store is not None:
            os.environ[STORE_VARIABLE] = store
        yield
    finally:
        os.environ.pop(STORE_VARIABLE, None)
        if before is not None:
            os.environ[STORE_VARIABLE] = before


async def disturbed(round: Round, disturb: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Supervise the run until it is complete, and check it. ``disturb()`` goes on meanwhile, and is cancelled then."""
    started = time.monotonic()
    disturbing = asyncio.create_task(disturb())
    own = environment() | ({} if round.store is None else {STORE_VARIABLE: round.store})
    running = supervise(
        round.plans,
        round.folder,
        max_restarts=100_000,
        restart_window_s=60.0,
        on_event=round.on_event,
        environment=own,
        first_delay_s=0.01,
        longest_delay_s=0.05,
    )
    try:
        code = await asyncio.wait_for(running, ROUND_S)
        if code:
            raise KeyboardInterrupt
    except TimeoutError as error:
        raise RuntimeError(f"a round was not over after {ROUND_S:g} s; see the logs in {round.folder}") from error
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
    round.seconds = time.monotonic() - started
    if disturbing.done() and not disturbing.cancelled() and disturbing.exception():
        raise RuntimeError("the disturbance broke") from disturbing.exception()
    if left := [pid for pid in round.pids if of_session(pid)]:
        raise RuntimeError(f"processes of the sessions {left} outlived the supervisor")
    with _told(round.store), closing(RunFolder(round.folder).join(round.config)) as hold:
        round.findings = check(hold.config, round.folder, hold.store, hold.weights)


async def kill_at_random(
    round: Round, nursery: Nursery, draw: random.Random, kills: int, on_kill: Callable[[], None] = lambda: None
) -> None:
    """One part after the other, of a random kind, at random moments; but never so many that the run cannot get on.

    Now and then a part is only suspended, for up to twice as long as a lease lasts. Some kills are kept for the end,
    when learners have finished and collectors evaluate the last weights.
    """
    by_kind = {kind: [plan.name for plan in round.plans if plan.kind == kind] for kind in KINDS}
    written, last = 0, 0
    async with asyncio.TaskGroup() as pauses:
        while len(round.kills) < kills:
            at_end = await _moment(round, draw)
            if (now := _written(round)) > written:
                written, last = now, len(round.kills)
            kept = len(round.kills) >= kills - int(AT_END * kills)
            if not at_end and (kept or len(round.kills) - last >= PATIENCE):
                continue
            part = draw.choice(by_kind[draw.choice(KINDS)])
            if draw.random() < PAUSES:
                pauses.create_task(_pause(round, nursery, part, draw.uniform(0.0, 2 * round.config.lease_s)))
            else:
                _kill(round, nursery, part, on_kill)


async def _moment(round: Round, draw: random.Random) -> bool:
    """Wait for the next one. Returns whether all learners have finished."""
    learners = {plan.name for plan in round.plans if plan.kind == "learn"}
    due = time.monotonic() + draw.uniform(0.0, 2 * GAP_S)
    while time.monotonic() < due:
        if round.complete >= learners:
            await asyncio.sleep(draw.uniform(0.0, 2 * GAP_S * AT_END))
            return True
        await asyncio.sleep(0.02)
    return False


def _kill(round: Round, nursery: Nursery, part: str, on_kill: Callable[[], None]) -> None:
    kind = next(plan.kind for plan in round.plans if plan.name == part)
    moment = time.monotonic()
    pid = nursery.signal(part, SIGKILL)
    if pid is not None:  # else it is being started, or complete
        round.kills.append(Kill(moment, part, kind, pid))
        on_kill()


async def _pause(round: Round, nursery: Nursery, part: str, seconds: float) -> None:
    if nursery.signal(part, SIGSTOP) is not None:
        round.pauses += 1
    try:
        await asyncio.sleep(seconds)
    finally:
        nursery.signal(part, SIGCONT)


def _written(round: Round) -> int:
    """Grows with every commit and publication."""
    notes = round.folder / NOTES
    return sum(path.stat().st_size for kind in ("collect", "learn") for path in notes.glob(f"{kind}-*"))
