"""Outages of the database: what can pass by itself is tried again until a deadline.

::

    outage     no connection, server restarting or full, disk full, file locked    warned of, tried again
    race       deadlock, serialisation failure, two rows of one key at once        tried again
    mistake    wrong password, no such database, no rights, no store, damaged      UserError at once, one line
    the rest   a bug of ours                                                       raised as it is

Trying again is right because every method of a store is idempotent: where only the acknowledgement of a commit was
lost, the second attempt changes nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from inspect import getmembers, ismethod
from typing import TypeVar

from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from mgrpo.errors import RunFolderError, StoreUnavailable, UserError

T = TypeVar("T")
_LOG = logging.getLogger("mgrpo.store")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds
_UNIQUE_TRIES = 5  # a key that is still taken after so many is no race

# By the first characters of PostgreSQL's SQLSTATE: connection lost, transaction rolled back for another's sake, out of
# resources (disk, connections, memory), stopped from outside (statement timeout, shutdown, starting up), lock timeout.
_PASSING_STATES = ("08", "40", "53", "55P03", "57", "58030")
_UNIQUE_VIOLATION = "23505"
_REFUSED_STATES = ("25006", "28", "3D", "42501")
_DAMAGED_STATES = ("XX001", "XX002")

_PASSING_NAMES = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL", "SQLITE_FULL", "SQLITE_IOERR")
_REFUSED_NAMES = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")
_DAMAGED_NAMES = ("SQLITE_NOTADB", "SQLITE_CORRUPT")

# A refused connection has no SQLSTATE; these are what a server says that will refuse again.
_REFUSALS = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
    "permission denied",
    "is not permitted to log in",
    "not currently accepting connections",
    "does not support SSL",
    "certificate",
    "invalid ",  # a value in the URL
)


class Outages:
    """The outages of one store; ``store`` names it in messages, without a password.

    ``seconds`` is how long a call goes on trying, counted from its first failure.
    """

    def __init__(self, store: str, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._began: float | None = None
        self._failing: set[object] = set()  # calls that have failed and go on trying
        self._lock = threading.Lock()

    def protect(self, store: T) -> T:
        """``store`` itself, each of its public methods now outlasting outages."""
        for name, method in getmembers(store, ismethod):
            if not name.startswith("_"):
                setattr(store, name, self._outlasting(name, method))
        return store

    def _outlasting(self, name: str, method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def outlasting(*args: object, **kwargs: object) -> T:
            return self.outlast(name, lambda: method(*args, **kwargs))

        return outlasting

    def outlast(self, what: str, attempt: Callable[[], T]) -> T:
        """What ``attempt`` returns, called again after every failure that can pass by itself.

        Raises StoreUnavailable where the last try, ``seconds`` after the first failure, fails too, UserError at once
        where the user has to mend something, and everything else as it is.
        """
        call = object()
        try:
            result = self._persist(what, attempt, call)
        finally:
            self._failing.discard(call)
        self._end()
        return result

    def _persist(self, what: str, attempt: Callable[[], T], call: object) -> T:
        deadline, pauses, tries = 0.0, _pauses(), 0
        while True:
            tries += 1
            try:
                return attempt()
            except (DBAPIError, PoolTimeout) as error:
                if mistake := _mistake(error, self._store):
                    raise mistake from error
                if not _passes(error) or (_code(error) == _UNIQUE_VIOLATION and tries >= _UNIQUE_TRIES):
                    raise
                now = time.monotonic()
                deadline = deadline or now + self._seconds
                if now >= deadline:
                    raise StoreUnavailable(self._given_up(what, error)) from error
                if not _is_race(error):
                    self._begin(error, call)
                time.sleep(min(next(pauses), deadline - now))

    def _given_up(self, what: str, error: Exception) -> str:
        return (
            f"store {self._store}: {what} failed for {self._seconds:g} s: {_line(error)}; "
            "see to the database, then start again what stopped"
        )

    def _begin(self, error: Exception, call: object) -> None:
        with self._lock:
            self._failing.add(call)
            if self._began is not None:
                return
            self._began = time.monotonic()
        _LOG.warning("store %s: %s; trying again for up to %g s", self._store, _line(error), self._seconds)

    def _end(self) -> None:
        """A call succeeded. While others still fail, as writers do where only readers can go on, nothing is over."""
        if self._began is None:
            return
        with self._lock:
            if self._failing:
                return
            began, self._began = self._began, None
        if began is not None:
            _LOG.warning("store %s: works again after %.1f s", self._store, time.monotonic() - began)


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


# ---------------------------------------------------------------- what an error means


def _code(error: Exception) -> str:
    """PostgreSQL's SQLSTATE or the name of SQLite's result code; "" where there is neither."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlstate", None) or getattr(cause, "sqlite_errorname", None) or ""


def _line(error: Exception) -> str:
    """The database's own words on one line, without the statement and its parameters."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    diagnosis = getattr(cause, "diag", None)  # PostgreSQL's, which quotes the statement below its message
    line = " ".join(str(getattr(diagnosis, "message_primary", None) or cause).split())
    busy = _code(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
    return f"another process holds its write lock ({line})" if busy else line


def _is_race(error: Exception) -> bool:
    return _code(error).startswith(("40", _UNIQUE_VIOLATION))


def _passes(error: Exception) -> bool:
    if isinstance(error, PoolTimeout) or (isinstance(error, DBAPIError) and error.connection_invalidated):
        return True
    code = _code(error)
    if not code:
        return isinstance(error, OperationalError) and _is_connecting(error)
    return code.startswith((*_PASSING_STATES, *_PASSING_NAMES)) or code == _UNIQUE_VIOLATION


def _is_connecting(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and error.statement is None and not error.connection_invalidated


def _mistake(error: Exception, store: str) -> UserError | None:
    code, line = _code(error), _line(error)
    if code.startswith((*_DAMAGED_NAMES, *_DAMAGED_STATES)) or "decode to UTF-8" in line:
        return RunFolderError(f"store {store}: {line}; restore a copy or begin a new run")
    if code.startswith(_REFUSED_NAMES):
        return UserError(f"store {store}: {line}; check free space and permissions")
    if code.startswith(_REFUSED_STATES):
        return UserError(f"store {store}: {line}; ask the database's owner for the right")
    refused = not isinstance(error, OperationalError) or any(words in line for words in _REFUSALS)
    if not code and _is_connecting(error) and refused:
        return UserError(f"store {store}: {line}; check address, user, database and password (PGPASSWORD, ~/.pgpass)")
    return None


# ---------------------------------------------------------------- a server that does not answer


def watch(engine: Engine, seconds: float) -> None:
    """Cut every connection whose transaction has lasted for ``seconds``, which its user then sees as lost.

    The server's own limits do not help where the server itself is suspended: its machine still acknowledges packets.
    """
    at_work: dict[ConnectionPoolEntry, tuple[float, DBAPIConnection]] = {}
    closed = threading.Event()

    def begin(connection: DBAPIConnection, entry: ConnectionPoolEntry, _: PoolProxiedConnection) -> None:
        at_work[entry] = (time.monotonic() + seconds, connection)

    def end(_: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        at_work.pop(entry, None)

    def cut_overdue() -> None:
        while not closed.wait(min(1.0, seconds)):
            for deadline, connection in list(at_work.values()):
                if deadline <= time.monotonic():
                    with suppress(Exception):  # it may be closed at this very moment, which is as good
                        _cut(connection.fileno())

    event.listen(engine, "checkout", begin)
    event.listen(engine, "checkin", end)
    event.listen(engine, "engine_disposed", lambda _: closed.set())
    threading.Thread(target=cut_overdue, name="store watch", daemon=True).start()


def _cut(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
