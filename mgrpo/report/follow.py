"""What the processes of a run write, read while they write it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mgrpo.errors import DataError
from mgrpo.report.metrics_log import Record, metrics_files, parse_record

_TAIL = 4096  # bytes at the end of a log in which its last line is looked for
_LONGEST = 300  # characters of a line that are told


class Follower:
    """Reads every metrics file of a run, each byte once. Files may appear, and grow, at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes, up to the end of a line

    def records(self) -> list[Record]:
        """What was written since the last call, by time, over all files.

        A line that is still being written comes when it is whole. One that holds no record is passed over here:
        `read_metrics` names it. So is a file that cannot be read now, until the next call.
        """
        told = [record for path in metrics_files(self._folder) for record in self._new(path)]
        return sorted(told, key=lambda record: float(record.get("time", 0.0)))

    def _new(self, path: Path) -> Iterator[Record]:
        start, data = self._read.get(path, 0), b""
        with suppress(OSError), path.open("rb") as file:
            start = start if start <= os.fstat(file.fileno()).st_size else 0  # another file of the same name
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = start + len(whole)
        for line in whole.split(b"\n")[:-1]:
            with suppress(DataError):
                yield parse_record(line, str(path))


def last_lines(path: Path, start: int = 0) -> list[str]:
    """The last lines of a log that say something, newest first; printable characters only.

    Looks at a few kB at its end, and at nothing before byte ``start``. Empty where there is no log.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = ("".join(c for c in line if c.isprintable()).strip()[:_LONGEST] for line in text.splitlines())
    return [line for line in lines if line][::-1]


def last_written(folder: Path) -> float | None:
    """When a file of ``folder`` was last written to, in seconds since 1970; None where there is none."""
    times = []
    for path in folder.glob("*"):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)
