"""How numbers are written for people. Unknown is a dash."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"
_BLOCKS = "▁▂▃▄▅▆▇█"


def fixed(value: float | None, digits: int = 2) -> str:
    """``0.31``; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """Three significant digits with a unit prefix: ``987``, ``12.3k``, ``1.2M``, ``0.012``."""
    if value is None:
        return UNKNOWN
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def size(n_bytes: float) -> str:
    """Bytes in powers of 1024: ``3.2 MiB``, ``32 MiB``."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= limit:
            return f"{n_bytes / limit:.1f} {unit}" if n_bytes < 10 * limit else f"{n_bytes / limit:.0f} {unit}"
    return f"{n_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """``0:07``, ``12:30``, ``1:02:03``; ``-`` for None."""
    if seconds is None:
        return UNKNOWN
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: Sequence[float | None], low: float = 0.0, high: float = 1.0) -> str:
    """One block per value, from ``low`` to ``high``; a space where the value is unknown."""
    top = len(_BLOCKS) - 1
    shares = (None if value is None else (value - low) / (high - low) for value in values)
    return "".join(" " if share is None else _BLOCKS[round(min(1.0, max(0.0, share)) * top)] for share in shares)
