"""The command line in this process, and one small finished run that tests copy."""

from __future__ import annotations

import atexit
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from mgrpo.cli import main

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-P", "-c", "from mgrpo.cli import main; main()"]
# Like the installed script: in any folder, and without that folder on the path.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SMOKE = ROOT / "recipes" / "smoke.toml"


@dataclass(frozen=True)
class Result:
    code: int | str | None
    out: str
    err: str


def mgrpo(*arguments: str | Path) -> Result:
    """What `mgrpo ARGUMENTS` would print, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit:
        main(list(map(str, arguments)))
    return Result(exit.value.code, out.getvalue(), err.getvalue())


def refused(*arguments: str | Path) -> str:
    """The one line with which a command of the user's is refused."""
    result = mgrpo(*arguments)
    assert result.code == 2, result
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.err
    return lines[0]


@cache
def smoke_run() -> Path:
    """The smoke recipe, run to its end. Copy it before changing anything."""
    folder = Path(tempfile.mkdtemp(prefix="mgrpo-smoke-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    result = mgrpo("train", SMOKE, "--run", folder / "run")
    assert result.code == 0, result
    return folder / "run"


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below ``folder``, but for the side files that SQLite makes when it reads."""
    files: Iterable[Path] = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.suffix not in (".db-wal", ".db-shm")
    }


def version_folder(run: Path, agent: str, version: int | None = None) -> Path:
    """The folder of an agent's weights in a run, of the newest version or of ``version``."""
    folders = {int(path.name[1:].split("-")[0]): path for path in (run / "weights" / agent).glob("v*")}
    return folders[max(folders) if version is None else version]
