"""Opening a store: a path is a SQLite file, a URL is any database of `sqlalchemy.create_engine`.

One store holds one run. Its first opener creates the tables; every later one checks that they are what it expects.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, make_url, select
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from mgrpo.errors import RunFolderError, StoreTimeout, UserError
from mgrpo.store.base import RunInfo, Store
from mgrpo.store.schema import SCHEMA_VERSION, metadata, runs
from mgrpo.store.sql import SqlStore

LOCK_SECONDS = 30.0  # a writer of another process may hold a SQLite file this long
_CHECKPOINT_PAGES = 4096


def open_store(where: str | Path, run: RunInfo | None = None, *, lock_seconds: float = LOCK_SECONDS) -> Store:
    """Opens the store of a run; with ``run`` given, begins it where there is none yet.

    ``where`` is a file path or a URL (``sqlite:///...``, ``postgresql+psycopg://...``). An existing store keeps the
    `RunInfo` it began with. Raises RunFolderError (a UserError) where there is no store and ``run`` is None, where
    the file is no store or has another schema version, and where it belongs to a run with another seed.
    """
    url = _url(where)
    if url.get_backend_name() == "sqlite":
        name = _file(url, may_create=run is not None)
        engine = _sqlite_engine(url, name, lock_seconds)
    else:
        name = url.render_as_string(hide_password=True)
        engine = create_engine(url)
    try:
        found = _begin(engine, run, name) if run is not None else _read_run(engine, name)
    except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its message
        engine.dispose()
        raise RunFolderError(f"store {name}: damaged; restore a copy or begin a new run") from error
    except BaseException:
        engine.dispose()
        raise
    return SqlStore(engine, found)


def _url(where: str | Path) -> URL:
    text = str(where)
    if isinstance(where, Path) or "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise UserError(f"store {text!r}: not a database URL ({error})") from error
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise UserError(f"store {text!r}: the database must be sqlite or postgresql")
    return url


def _file(url: URL, may_create: bool) -> str:
    if not url.database or url.database == ":memory:":
        raise UserError(f"store {url}: an embedded store is a file; give its path")
    path = Path(url.database)
    if not path.parent.is_dir():
        raise RunFolderError(f"store {path}: the folder {path.parent} does not exist")
    if not may_create and not path.is_file():
        raise RunFolderError(f"store {path}: no such file; no run has begun there")
    if not may_create and not path.stat().st_size:
        raise RunFolderError(f"store {path}: empty; restore a copy or begin a new run")
    return url.database


# ---------------------------------------------------------------- the run's row


def _begin(engine: Engine, run: RunInfo, name: str) -> RunInfo:
    with engine.execution_options(writes=True).begin() as connection:
        if not inspect(connection).get_table_names():
            metadata.create_all(connection)
            row = {"id": 0, "schema_version": SCHEMA_VERSION, "seed": run.seed, "config": json.dumps(dict(run.config))}
            connection.execute(insert(runs), {**row, "created": run.created or time.time()})
        found = _run_of(connection, name)
    if found.seed != run.seed:
        raise RunFolderError(f"store {name}: belongs to a run with seed {found.seed}, not {run.seed}; use a new folder")
    return found


def _read_run(engine: Engine, name: str) -> RunInfo:
    with engine.connect() as connection:
        return _run_of(connection, name)


def _run_of(connection: Connection, name: str) -> RunInfo:
    tables = inspect(connection)
    columns = tables.get_columns("runs") if tables.has_table("runs") else []
    if "schema_version" not in [column["name"] for column in columns]:
        raise RunFolderError(f"store {name}: no store of this program (no table 'runs' with a schema version)")
    version = connection.execute(select(runs.c.schema_version)).scalar()
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"store {name}: has schema version {version}, this program reads version {SCHEMA_VERSION}; "
            "use the release that wrote it or begin a new run"
        )
    row = connection.execute(select(runs)).one()
    return RunInfo(row.seed, json.loads(row.config), row.created)


# ---------------------------------------------------------------- SQLite's connections


def _sqlite_engine(url: URL, name: str, lock_seconds: float) -> Engine:
    """Durable (a commit is on the disk when it returns), readers never wait, writers queue for ``lock_seconds``."""
    engine = create_engine(url, connect_args={"timeout": lock_seconds})

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # transactions begin below, not where the driver guesses
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A reader that turns writer cannot wait for another writer; who writes says so at once.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    @event.listens_for(engine, "handle_error")
    def explain(context: ExceptionContext) -> Exception | None:
        error = context.original_exception
        code = getattr(error, "sqlite_errorname", "")
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return StoreTimeout(f"waited {lock_seconds:g} s for the store {name}: another process holds its write lock")
        if code.startswith(("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR")):
            return UserError(f"store {name}: {error}; check free space and permissions")
        if code.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")) or "decode to UTF-8" in str(error):
            return RunFolderError(f"store {name}: {error}; restore a copy or begin a new run")
        return None

    return engine
