"""Files below a URL, by whatever fsspec driver serves it; failures that pass are waited out, the others are one line.

::

    driver's own exceptions            OSError
    no rights, no such bucket, ...     UserError at once
    full disk, lost connection, ...    tried again until a deadline, then StoreUnavailable
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mgrpo.errors import CheckpointError, StoreUnavailable, UserError

T = TypeVar("T")
_LOG = logging.getLogger("mgrpo.store")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between tries
_MISTAKES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_MISTAKES |= {errno.ENAMETOOLONG, errno.EINVAL}


class Files:
    """What lies below ``url``, named by paths relative to it.

    Raises UserError for a URL that nothing installed can serve, or with a password in it.
    """

    def __init__(self, url: str | Path, outage_s: float) -> None:
        try:
            if urlsplit(str(url)).password is not None:  # recipes end up in run folders and logs
                raise UserError("weights: a password does not belong in a URL; give it as the URL's driver documents")
            if isinstance(url, Path):  # of which no character means anything to fsspec
                self._driver, base = LocalFileSystem(), str(url.absolute())
            else:
                self._driver, base = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"weights: {url}: {error}; name a path or install what serves such URLs") from error
        self.local = isinstance(self._driver, LocalFileSystem)
        self.base = base.rstrip("/")
        self._outage_s = outage_s

    def path(self, name: str) -> str:
        """Where ``name`` is on its own file system. Raises CheckpointError for one that leads elsewhere."""
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise CheckpointError(f"weights: {name!r} is no place below {self.base}; the store is damaged")
        return f"{self.base}/{name}"

    # ------------------------------------------------------------ what may fail: OSError

    def read(self, name: str) -> bytes | None:
        """The content, None where there is no such file."""
        try:
            return bytes(self._call("cat_file", self.path(name)))
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        self._driver.invalidate_cache()
        try:
            self._call("info", self.path(name))
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        """Of the files and folders in ``folder``; none where it is not there."""
        self._driver.invalidate_cache()
        try:
            return [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in self._call("ls", self.path(folder), False)]
        except FileNotFoundError:
            return []

    def upload(self, folder: Path, names: list[str], last: str, name: str) -> None:
        """Copy ``names`` of a local folder to ``name``, and ``last`` after them, which is there whole or not at all."""
        self._call("makedirs", self.path(name), exist_ok=True)
        for each in names:
            self._call("put_file", str(folder / each), self.path(f"{name}/{each}"))
        self._call("put_file", str(folder / last), self.path(f"{name}/.{last}"))
        self._call("mv", self.path(f"{name}/.{last}"), self.path(f"{name}/{last}"))

    def download(self, name: str, file: Path) -> None:
        self._call("get_file", self.path(name), str(file))

    def remove(self, name: str, folder: bool = False) -> None:
        """Also where it is gone already."""
        try:
            self._call("rm", self.path(name), recursive=folder)
        except FileNotFoundError:
            return

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._driver, method)(*arguments, **options)
        except OSError:
            raise
        except NotImplementedError as error:
            raise PermissionError(errno.EACCES, f"{type(self._driver).__name__} has no {method}") from error
        except Exception as error:  # drivers raise what their libraries raise
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

    # ------------------------------------------------------------ outages

    def outlast(self, what: str, attempt: Callable[[], T], mistake: type[UserError] = UserError) -> T:
        """What ``attempt`` returns, called again for ``outage_s`` seconds while it fails for a reason that can pass.

        Raises StoreUnavailable after that, ``mistake`` at once where the reason is the user's to mend.
        """
        deadline, pause = 0.0, _FIRST_PAUSE
        while True:
            try:
                result = attempt()
            except OSError as error:
                now, line = time.monotonic(), f"weights {self.base}: {what}: {reason(error)}"
                if isinstance(error, PermissionError | FileNotFoundError) or error.errno in _MISTAKES:
                    raise mistake(f"{line}; check that place and the rights there") from error
                if now >= (deadline or now + self._outage_s):
                    spent = f", for {self._outage_s:g} s" if self._outage_s else ""
                    raise StoreUnavailable(f"{line}{spent}; see to it, then start again what stopped") from error
                if not deadline:
                    _LOG.warning("%s; trying again for up to %g s", line, self._outage_s)
                    deadline = now + self._outage_s
                time.sleep(min(pause, deadline - now))
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if deadline:
                    _LOG.warning("weights %s: %s works again", self.base, what)
                return result


def reason(error: OSError) -> str:
    """On one line, with the file's name where there is one."""
    words = " ".join(str(error.strerror or error).split()) or type(error).__name__
    return f"{words}: {error.filename}" if error.filename else words
