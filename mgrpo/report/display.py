"""The live panel on a terminal; short plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mgrpo.report.board import Board, Metrics
from mgrpo.report.notation import UNKNOWN, duration, fixed, short, sparkline
from mgrpo.report.summary import print_summary

REFRESHES_PER_SECOND = 2  # a calm picture, and nothing the training would notice
FIRST_INTERVAL_S, LAST_INTERVAL_S = 2.0, 60.0  # between plain lines; a long run is not a long log
INTERVAL_SHARE = 0.02  # of the time since the start


class Display:
    """Shows the newest `Board`. A context manager; leaving it puts the terminal back."""

    def __init__(
        self, console: Console, board: Board, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._board = board
        self._quiet = quiet
        self._clock = clock
        self._printed = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._quiet:
            self._live = Live(
                console=self._console,
                get_renderable=lambda: panel(self._board, self._clock(), self._console.options.ascii_only),
                refresh_per_second=REFRESHES_PER_SECOND,
            )
            self._live.start()
            # A process that is killed cannot put a hidden cursor back.
            self._console.show_cursor(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, board: Board, always: bool = False) -> None:
        """The panel follows ``board``. Elsewhere a line is printed when one is due, or always if ``always``."""
        self._board = board
        if self._live is not None or self._quiet:
            return
        now = self._clock()
        interval = min(LAST_INTERVAL_S, max(FIRST_INTERVAL_S, INTERVAL_SHARE * (now - board.started)))
        if always or now - self._printed >= interval:
            self._printed = now
            self.print(line(board, now))

    def redraw(self, board: Board) -> None:
        """The panel follows ``board``; where there is none, nothing is said."""
        self._board = board

    def note(self, text: str) -> None:
        """A line about what the panel shows anyway."""
        if self._live is None:
            self.print(text)

    def print(self, text: str, style: str = "") -> None:
        """A line of its own, above the panel if there is one. Not read as markup."""
        if not self._quiet:
            self._console.print(Text(text, style=style), soft_wrap=True)

    def show_header(self, header: RenderableType) -> None:
        """What the run is going to do, once, at its beginning."""
        if not self._quiet:
            self._console.print(header)

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """The closing table."""
        if not self._quiet:
            print_summary(self._console, summary)


# ---------------------------------------------------------------- one line


def line(board: Board, now: float) -> str:
    """``rl 12/80  success 0.31  reward planner 0.38 searcher 0.52  calls 1.90  12.3k tokens/s  left 1:12``"""
    if board.work is not None:
        return f"{board.work.what} {board.work.done}/{board.work.total}  left {duration(_work_left(board, now))}"
    parts = [f"{board.stage} {board.done}/{board.steps}"]
    if not board.team and not board.done:
        return f"{parts[0]}  begins"
    if board.demonstrations:
        parts += ["loss " + " ".join(f"{name} {fixed(m.get('loss'), 3)}" for name, m in board.agents.items())]
    else:
        rewards = [f"{name} {fixed(board.team.get(f'reward/{name}'))}" for name in _agents(board)]
        parts += [f"success {fixed(board.team.get('success'))}", "reward " + " ".join(rewards)]
        parts += [f"calls {fixed(board.team.get('calls_per_rollout'))}"]
        parts += [f"{short(board.team.get('tokens_per_second'))} tokens/s"]
    return "  ".join([*parts, f"left {duration(board.seconds_left(now))}"])


# ---------------------------------------------------------------- the panel


def panel(board: Board, now: float, ascii_only: bool = False) -> RenderableType:
    """One screen, 80 columns or more: how far, how good, who learns what, and what is wrong."""
    rows: list[RenderableType] = [_bars(board, now), Text(), _team(board, ascii_only), Text(), _agent_table(board)]
    rows += _details(board)
    if board.evaluations:
        scores = "   ".join(f"{name} {fixed(score)}" for name, score in board.evaluations.items())
        rows += [Text(), Text(f"evaluated success   {scores}")]
    if board.parts:
        rows += [Text(), _parts(board), *_deaths(board)]
    for alarm in board.alarms:
        rows.append(Text(f"! {alarm.message}", style="bold yellow"))
    title = Text(f" {board.run} ", style="bold")
    return Panel(Group(*rows), title=title, title_align="left", subtitle=f" {duration(now - board.started)} elapsed ")


def _bars(board: Board, now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=18, no_wrap=True)
    table.add_column(width=28)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    left = f"{duration(board.seconds_left(now))} left"
    table.add_row(*_bar(board.stage or "starting", board.done, board.steps), left)
    overall = min(board.total_steps, board.first_step + board.done)
    table.add_row(*_bar("all stages", overall, board.total_steps), "")
    if board.work is not None:
        work = board.work
        table.add_row(*_bar(work.what, work.done, work.total), f"{duration(_work_left(board, now))} left")
    return table


def _bar(name: str, done: int, total: int) -> tuple[RenderableType, RenderableType, RenderableType]:
    return Text(name), ProgressBar(total=max(1, total), completed=done, width=28), Text(f"{done}/{total}")


def _work_left(board: Board, now: float) -> float | None:
    work = board.work
    return (now - work.started) / work.done * (work.total - work.done) if work is not None and work.done > 0 else None


def _team(board: Board, ascii_only: bool) -> RenderableType:
    team = board.team
    text = Text("demonstrations  " if board.demonstrations else "")
    text.append(f"success {fixed(team.get('success'))}", style="bold")
    if not ascii_only and not board.demonstrations:
        text.append(f"  {sparkline(board.successes)}", style="cyan")
    text.append(f"   calls {fixed(team.get('calls_per_rollout'))}")
    text.append(f"   {short(team.get('tokens_per_second'))} tokens/s")
    return text


def _agent_table(board: Board) -> Table:
    """One line per agent. What nobody computes here, such as the KL to a reference model, has no column."""
    known = {key for learned in board.agents.values() for key, value in learned.items() if value is not None}
    columns = [(name, cell) for name, key, cell in _COLUMNS if key is None or key in known]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("agent")
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for agent in _agents(board):
        table.add_row(Text(agent), *(cell(board, agent, board.agents.get(agent, {})) for _, cell in columns))
    return table


def _tied(board: Board, agent: str, learned: Metrics) -> str:
    """Comparison groups that teach nothing, of all."""
    useless = [learned.get("zero_variance_groups"), learned.get("singleton_groups")]
    return UNKNOWN if None in useless else f"{sum(map(int, filter(None, useless)))}/{int(learned.get('groups', 0))}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _tiny(gap: float | None) -> str:
    return UNKNOWN if gap is None else f"{gap:.0e}"


# name, the metric without which there is no column (None: always there), the cell
_COLUMNS: tuple[tuple[str, str | None, Callable[[Board, str, Metrics], str]], ...] = (
    ("from v", None, lambda board, agent, learned: short(learned.get("from_version"))),
    ("reward", None, lambda board, agent, learned: fixed(board.team.get(f"reward/{agent}"))),
    ("loss", "nll", lambda board, agent, learned: fixed(learned.get("loss"), 3)),
    ("A std", "advantage_std", lambda board, agent, learned: fixed(learned.get("advantage_std"))),
    ("tied", "groups", _tied),
    ("entropy", None, lambda board, agent, learned: fixed(learned.get("entropy"), 3)),
    ("clip", "clip_fraction", lambda board, agent, learned: _percent(learned.get("clip_fraction"))),
    ("KL", "kl", lambda board, agent, learned: short(learned.get("kl"))),
    ("mismatch", "logprob_abs_diff", lambda board, agent, learned: _tiny(learned.get("logprob_abs_diff"))),
    ("share", "gradient_mass", lambda board, agent, learned: _percent(board.shares.get(agent))),
)


def _details(board: Board) -> list[Text]:
    """What the rewards are made of, and who is called how often."""
    lines = []
    for agent in _agents(board):
        calls, zero = board.team.get(f"calls/{agent}"), board.team.get(f"zero_call_fraction/{agent}")
        told = [parts(board.team, agent), "" if calls is None else f"calls {fixed(calls)}, none in {_percent(zero)}"]
        if any(told):
            lines.append(Text(f"{agent}: {'  '.join(filter(None, told))}", style="dim"))
    return lines


def _parts(board: Board) -> Table:
    """One line per process: who it is, how it is, how long it has said nothing, and its last line."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    for name in ("part", "pid", "state", "v", "quiet"):
        table.add_column(name, justify="left" if name in ("part", "state") else "right", no_wrap=True)
    table.add_column("last line", ratio=1, no_wrap=True, overflow="ellipsis")
    for part in board.parts:
        state = Text(part.state, style=_STATE_STYLES.get(part.state, "" if part.state == "running" else "yellow"))
        pid, version = (UNKNOWN if number is None else str(number) for number in (part.pid, part.version))
        table.add_row(Text(part.name), pid, state, version, duration(part.quiet_s), Text(part.says, style="dim"))
    return table


_STATE_STYLES = {"complete": "green", "stopped": "dim", "elsewhere": "dim", "starting": "dim"}


def _deaths(board: Board) -> list[Text]:
    told = [(part, f"{part.restarts} restart{'s' * (part.restarts != 1)}") for part in board.parts if part.died]
    return [Text(f"{part.name}: {times}, last died by {part.died}", style="yellow") for part, times in told]


def parts(team: Metrics, agent: str) -> str:
    """The means of an agent's reward parts: ``format 0.98 expert 0.71``."""
    prefix = f"part/{agent}/"
    return " ".join(f"{k.removeprefix(prefix)} {fixed(v)}" for k, v in team.items() if k.startswith(prefix))


def _agents(board: Board) -> list[str]:
    """Agents that acted or learned, those that learn first."""
    acted = [key.removeprefix("reward/") for key in board.team if key.startswith("reward/")]
    return list(dict.fromkeys([*board.agents, *acted]))
