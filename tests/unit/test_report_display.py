"""The live panel and the plain lines."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from mgrpo.report.alarms import Alarm
from mgrpo.report.board import Board
from mgrpo.report.display import Display, line, panel
from mgrpo.report.notation import duration, short, size, sparkline

TEAM = {
    "success": 0.31,
    "calls_per_rollout": 1.9,
    "tokens_per_second": 12345.0,
    "reward/planner": 0.38,
    "reward/searcher": 0.52,
    "part/searcher/expert": 0.71,
    "part/searcher/correct_main": 0.3,
    "calls/searcher": 1.9,
    "zero_call_fraction/searcher": 0.05,
}
LEARNED = {
    "from_version": 12,
    "entropy": 0.5,
    "loss": 0.1,
    "rows": 40.0,
    "groups": 16.0,
    "zero_variance_groups": 4.0,
    "singleton_groups": 1.0,
    "advantage_std": 0.87,
    "clip_fraction": 0.021,
    "logprob_abs_diff": 3.1e-7,
    "gradient_mass": 0.8,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def board_at(step: int, team: dict[str, float] = TEAM) -> Board:
    """Stage "rl" of 80 steps from step 100 on, started at second 50; events of ``step`` only."""
    board = Board("demo [bold]", 0.0).staged("rl", 80, 100, 180, False, 50.0)
    return board.collected(step, team).learned(step, "planner", LEARNED)


def shown(board: Board, width: int = 80, now: float = 60.0, **options: bool) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(panel(board, now, **options))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_time_left_is_the_stage_s_average_pace() -> None:
    board = board_at(100)
    for step in range(101, 120):
        board = board.learned(step, "planner", {"from_version": step})
    assert board.done == 20 and board.seconds_left(70.0) == pytest.approx(60.0)
    assert Board("x", 0.0).staged("rl", 80, 0, 80, False, 0.0).seconds_left(5.0) is None


def test_a_resumed_stage_does_not_count_earlier_steps_as_fast_ones() -> None:
    board = board_at(160)  # the first event of this process
    assert board.done == 61 and board.done_before == 60
    assert board.seconds_left(60.0) == pytest.approx(19 * 10.0)


def test_a_new_stage_starts_clean_but_keeps_versions_alarms_and_evaluations() -> None:
    board = board_at(120).evaluated("before", {"success": 0.07}).alarmed(Alarm("a", "trouble"))
    board = board.staged("next", 10, 180, 190, True, 99.0)
    assert not board.team and board.done == 0 and board.agents == {"planner": {"from_version": 12}}
    assert board.evaluations == {"before": 0.07} and board.alarms
    assert board.learned(180, "planner", {"from_version": 13}).done_before == 0


def test_the_panel_fits_a_small_terminal_and_shows_what_matters() -> None:
    board = board_at(119).evaluated("before", {"success": 0.07}).worked("evaluating", 5, 20, 55.0)
    board = board.alarmed(Alarm("lazy_planner", "the planner delegates nothing [in] 80% of rollouts"))
    text = shown(board)
    assert all(len(row) <= 80 for row in text.splitlines()) and len(text.splitlines()) <= 24
    for words in ("demo [bold]", "20/80", "120/180", "5/20", "success 0.31", "calls 1.90", "12.3k tokens/s"):
        assert words in text
    for words in ("correct_main 0.30", "expert 0.71", "0.500", "before 0.07", "nothing [in] 80%"):
        assert words in text


def row(text: str, first: str) -> list[str]:
    """The cells of the table's line that begins with ``first``."""
    return next(cells[1:-1] for line in text.splitlines() if (cells := line.split())[1:2] == [first])


def test_every_agent_has_one_line_of_the_numbers_that_matter() -> None:
    board = board_at(119).learned(
        119, "searcher", {**LEARNED, "clip_fraction": None}, {"planner": 0.4, "searcher": 0.6}
    )
    text = shown(board)
    columns = ["agent", "from", "v", "reward", "A", "std", "tied", "entropy", "clip", "mismatch", "share"]
    assert row(text, "agent") == columns
    assert row(text, "planner") == ["planner", "12", "0.38", "0.87", "5/16", "0.500", "2%", "3e-07", "40%"]
    assert row(text, "searcher") == ["searcher", "12", "0.52", "0.87", "5/16", "0.500", "-", "3e-07", "60%"]
    assert "searcher: expert 0.71 correct_main 0.30  calls 1.90, none in 5%" in text
    with_kl = shown(board_at(119).learned(119, "planner", {**LEARNED, "kl": 0.0123, "approx_kl": 1e-4}))
    assert "KL" in row(with_kl, "agent") and "0.0123" in row(with_kl, "planner")
    assert all(len(line) <= 80 for line in with_kl.splitlines())


def test_shares_of_the_last_step_stand_until_all_agents_have_told() -> None:
    board = board_at(119).learned(119, "searcher", LEARNED, {"planner": 0.4, "searcher": 0.6})
    assert "40%" in shown(board.learned(120, "planner", LEARNED, {}))


def test_demonstrations_show_the_loss() -> None:
    taught = {"from_version": 1, "entropy": 2.5, "loss": 3.25, "nll": 3.2, "rows": 16.0}
    board = Board("x", 0.0).staged("warmup", 550, 0, 630, True, 0.0).learned(0, "planner", taught)
    assert row(shown(board), "agent") == ["agent", "from", "v", "reward", "loss", "entropy"]
    assert row(shown(board), "planner") == ["planner", "1", "-", "3.250", "2.500"]


def test_the_panel_can_do_without_unicode() -> None:
    board = board_at(119)
    assert "▃" in shown(board) and "▃" not in shown(board, ascii_only=True)


def test_an_empty_board_draws() -> None:
    assert "starting" in shown(Board("demo", 0.0))
    assert "success -" in shown(Board("demo", 0.0))


def test_plain_line_of_rollouts_and_of_demonstrations() -> None:
    expected = "rl 20/80  success 0.31  reward planner 0.38 searcher 0.52  calls 1.90  12.3k tokens/s  left 10:00"
    assert line(board_at(119), 60.0) == expected
    assert line(Board("x", 0.0).staged("rl", 80, 0, 80, False, 0.0), 1.0) == "rl 0/80  begins"
    board = Board("x", 0.0).staged("warmup", 550, 0, 630, True, 0.0).learned(0, "planner", {"loss": 3.25})
    assert line(board, 1.0) == "warmup 1/550  loss planner 3.250  left 9:09"
    assert line(board.worked("evaluating", 50, 200, 0.0), 10.0) == "evaluating 50/200  left 0:30"


def plain(clock: Clock) -> tuple[Display, Console]:
    console = Console(file=StringIO(), width=40)
    return Display(console, Board("demo", 0.0), clock=clock), console


def printed(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_plain_lines_come_at_most_every_two_seconds_and_get_rarer() -> None:
    clock = Clock()
    display, console = plain(clock)
    with display:
        for second in range(3600):
            clock.now = second
            display.show(board_at(119))
    lines = printed(console)
    assert 100 < len(lines) < 250
    assert all(row.startswith("rl 20/80") for row in lines)  # not wrapped at the console's width


def test_a_line_that_must_come_comes() -> None:
    display, console = plain(Clock())
    with display:
        display.show(board_at(119))
        display.show(board_at(120))
        display.show(board_at(121), always=True)
        display.print("[red]literally[/red]")
    assert [row.split("  ")[0] for row in printed(console)] == ["rl 20/80", "rl 22/80", "[red]literally[/red]"]


def test_quiet_prints_nothing() -> None:
    console = Console(file=StringIO(), force_terminal=True)
    with Display(console, Board("demo", 0.0), quiet=True) as display:
        display.show(board_at(119), always=True)
        display.print("text")
    assert printed(console) == []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_terminal_gets_a_panel_and_is_put_back_on_any_exit(error: type[BaseException] | None) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, height=30)
    try:
        with Display(console, Board("demo", 0.0)) as display:
            display.show(board_at(119))
            display.print("a message")
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a message" in text and "20/80" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown at the end
    assert text.index("\x1b[?25h") < text.index("20/80")  # and all the time, for a process that is killed


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (short(987), "987"),
        (short(999_600), "1M"),
        (short(12_345), "12.3k"),
        (short(0.0123), "0.0123"),
        (short(None), "-"),
        (size(2**20 * 3.25), "3.2 MiB"),
        (size(2**30 * 32), "32 GiB"),
        (size(12), "12 B"),
        (duration(59.6), "1:00"),
        (duration(3725), "1:02:05"),
        (duration(None), "-"),
        (sparkline([0.0, None, 0.5, 1.0, 7.0]), "▁ ▅██"),
    ],
)
def test_notation(written: str, expected: str) -> None:
    assert written == expected
