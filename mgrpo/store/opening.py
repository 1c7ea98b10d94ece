"""Opening a store: a path is a SQLite file, a URL names a SQLite file or a PostgreSQL database.

One store holds one run. Its first opener creates the tables, at once in their newest form; every later one checks that
they are what it expects, and brings those of an older release up to date (migrations/). ``runs.schema_version`` is the
truth about what they are, so that opening a store that is up to date costs one query and no import of the migrations.

A password is taken out of a URL before anything else sees it: neither engines, nor messages, nor logs hold one.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, insert, inspect, make_url, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from mgrpo.errors import RunFolderError, UserError
from mgrpo.store.base import RunInfo, Store
from mgrpo.store.outage import Outages, watch
from mgrpo.store.schema import SCHEMA_VERSION, metadata, runs
from mgrpo.store.sql import SqlStore

STORE_VARIABLE = "MGRPO_STORE"  # the environment's URL of a store; it alone may hold a password
OUTAGE_SECONDS = 60.0
_LOG = logging.getLogger("mgrpo.store")
_DRIVERS = {"sqlite": "sqlite", "postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}
_DRIVERS |= {driver: driver for driver in ("sqlite+pysqlite", "postgresql+psycopg")}
_SECRETS = ("password", "sslpassword")
_CHECKPOINT_PAGES = 4096
_LOCK_SECONDS = 5.0  # a writer of another process may hold a SQLite file this long before it counts as an outage
_SCHEMA_LOCK = 0x6D6772706F  # PostgreSQL's advisory lock of those who create or alter the tables

# What PostgreSQL's connections are asked for where the URL does not say otherwise. A peer that vanished without a word
# is noticed within about half a minute.
_CONNECTION = {
    "application_name": "mgrpo",
    "connect_timeout": 5,  # seconds per address
    "keepalives_idle": 10,  # seconds
    "keepalives_interval": 5,  # seconds
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,  # milliseconds
}
# An owner that is suspended in the middle of a transaction must not keep others waiting: its locks are taken from it
# before a wait for a lock ends, and that ends before a statement's own time does.
_SESSION = {
    "idle_in_transaction_session_timeout": "15s",
    "lock_timeout": "30s",
    "statement_timeout": "120s",
}
_TRANSACTION_SECONDS = 150.0  # after which a server that does not answer at all counts as lost


def open_store(where: str | Path, run: RunInfo | None = None, *, outage_s: float = OUTAGE_SECONDS) -> Store:
    """Opens the store of a run; with ``run`` given, begins it where there is none yet.

    ``where`` is a file path or a URL (``sqlite:///...``, ``postgresql://USER@HOST:PORT/DATABASE``). An existing store
    keeps the `RunInfo` it began with. This call and every method of the store wait out what can pass by itself (a lost
    connection, a restart, a full disk, a locked file) for ``outage_s`` seconds, then raise StoreUnavailable. Raises
    RunFolderError (a UserError) where there is no store and ``run`` is None, where it is none of this program or of a
    newer release, and where it belongs to a run with another seed; UserError where the database refuses.
    """
    address = _address(where)
    outages = Outages(address.name, outage_s)
    if address.url.get_backend_name() == "sqlite":
        _check_file(address.url, may_create=run is not None)
        engine = _sqlite_engine(address, min(_LOCK_SECONDS, outage_s))
    else:
        engine = _postgres_engine(address)
    try:
        found = outages.outlast("opening", lambda: _prepare(engine, run, address.name))
    except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its message
        engine.dispose()
        raise RunFolderError(f"store {address.name}: damaged; restore a copy or begin a new run") from error
    except BaseException:
        engine.dispose()
        raise
    return outages.protect(SqlStore(engine, found))


def refuse_password(url: str, where: str) -> None:
    """Raises UserError where ``url`` holds a password; ``where`` says where it was read, such as a recipe's key.

    What a recipe or a command line holds ends up in run folders, in logs and in the list of processes.
    """
    if _address(url).secrets:
        raise UserError(
            f"{where}: a password does not belong there; give it by PGPASSWORD or ~/.pgpass, "
            f"or the whole URL by {STORE_VARIABLE}"
        )


# ---------------------------------------------------------------- addresses


@dataclass(frozen=True, slots=True)
class _Address:
    url: URL  # without what is secret
    name: str  # in messages
    secrets: dict[str, str] = field(default_factory=dict, repr=False)


def _address(where: str | Path) -> _Address:
    text = str(where)
    if isinstance(where, Path) or "://" not in text:
        return _Address(URL.create("sqlite", database=text), text)
    url = _parsed(text)
    if url.get_backend_name() == "sqlite":
        return _Address(url, url.database or text)
    held = {"password": url.password} | {key: url.query.get(key) for key in _SECRETS if key in url.query}
    secrets = {key: value for key, value in held.items() if isinstance(value, str) and value}
    bare = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    bare = bare.difference_update_query(_SECRETS)
    places = {key: value for key, value in bare.query.items() if key in ("host", "port", "service")}
    return _Address(bare, bare.set(drivername="postgresql", query=places).render_as_string(), secrets)


def _parsed(text: str) -> URL:
    """The URL with our driver. No message quotes ``text``: where it cannot be parsed, its password cannot be found."""
    scheme, _, rest = text.partition("://")
    try:
        url = make_url(text) if scheme.startswith("sqlite") or rest.count("@") < 2 else None
    except (ArgumentError, ValueError):
        url = None
    if url is None:
        raise UserError(
            f"store {scheme}://...: not a database URL; write postgresql://USER@HOST:PORT/DATABASE, "
            "with other characters than letters and digits percent-encoded (@ as %40)"
        )
    if scheme not in _DRIVERS:
        raise UserError(
            f"store {scheme}://...: the database must be sqlite or postgresql, by the driver psycopg: "
            "write sqlite:///FILE, or postgresql://... and pip install 'mgrpo[postgres]'"
        )
    return url.set(drivername=_DRIVERS[scheme])


def _check_file(url: URL, may_create: bool) -> None:
    if not url.database or url.database == ":memory:":
        raise UserError(f"store {url}: an embedded store is a file; give its path")
    path = Path(url.database)
    if not path.parent.is_dir():
        raise RunFolderError(f"store {path}: the folder {path.parent} does not exist")
    if not may_create and not path.is_file():
        raise RunFolderError(f"store {path}: no such file; no run has begun there")
    if not may_create and not path.stat().st_size:
        raise RunFolderError(f"store {path}: empty; restore a copy or begin a new run")


# ---------------------------------------------------------------- tables and the run's row


def _prepare(engine: Engine, run: RunInfo | None, name: str) -> RunInfo:
    with engine.connect() as connection:
        version = _schema_version(connection, name)
        found = _stored(connection) if version == SCHEMA_VERSION else None
    if found is None and version == 0 and run is None:
        raise RunFolderError(f"store {name}: empty; no run has begun there")
    if found is None:
        found = _bring_up_to_date(engine, run, name)
    if run is not None and found.seed != run.seed:
        raise RunFolderError(f"store {name}: belongs to a run with seed {found.seed}, not {run.seed}; use a new folder")
    return found


def _bring_up_to_date(engine: Engine, run: RunInfo | None, name: str) -> RunInfo:
    """In one transaction that excludes all others who would do the same."""
    with engine.execution_options(writes=True).begin() as connection:
        if connection.dialect.name == "postgresql":  # SQLite's writers exclude each other anyway
            connection.execute(select(func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
        version = _schema_version(connection, name)
        if version == 0 and run is not None:
            metadata.create_all(connection)
            row = {"id": 0, "schema_version": SCHEMA_VERSION, "seed": run.seed, "config": json.dumps(dict(run.config))}
            connection.execute(insert(runs), {**row, "created": run.created or time.time()})
        elif version < SCHEMA_VERSION:
            from mgrpo.store.migrations import upgrade  # a store that is up to date need not wait for this import

            upgrade(connection, version)
            _LOG.info("store %s: brought from schema version %d to %d", name, version, SCHEMA_VERSION)
        return _stored(connection)


def _schema_version(connection: Connection, name: str) -> int:
    """0 where there is no table at all. Raises RunFolderError where the tables are not of this program or newer."""
    database = inspect(connection)
    tables = database.get_table_names()
    if not tables:
        return 0
    columns = database.get_columns("runs") if "runs" in tables else []
    if "schema_version" not in [column["name"] for column in columns]:
        raise RunFolderError(f"store {name}: no store of this program (no table 'runs' with a schema version)")
    version = connection.execute(select(runs.c.schema_version)).scalar_one()
    if version > SCHEMA_VERSION:
        raise RunFolderError(
            f"store {name}: has schema version {version}, this program reads up to version {SCHEMA_VERSION}; "
            "use the release that wrote it, or a newer one"
        )
    return int(version)


def _stored(connection: Connection) -> RunInfo:
    row = connection.execute(select(runs.c.seed, runs.c.config, runs.c.created)).one()
    return RunInfo(row.seed, json.loads(row.config), row.created)


# ---------------------------------------------------------------- connections


def _sqlite_engine(address: _Address, lock_seconds: float) -> Engine:
    """Durable (a commit is on the disk when it returns), readers never wait, writers queue for ``lock_seconds``."""
    engine = create_engine(address.url, connect_args={"timeout": lock_seconds})

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

    return engine


def _postgres_engine(address: _Address) -> Engine:
    """Durable as the server is told to be, but never less than its own disk; no wait is without a deadline."""
    defaults = {key: value for key, value in _CONNECTION.items() if key not in address.url.query}
    try:
        engine = create_engine(address.url, connect_args=defaults | address.secrets)
    except ImportError as error:
        raise UserError(
            f"store {address.name}: the driver psycopg is missing ({error}); pip install 'mgrpo[postgres]'"
        ) from error
    settings = "; ".join(f"SET {key} = '{value}'" for key, value in _SESSION.items())
    durable = (
        "SELECT set_config(name, 'on', false) FROM pg_settings WHERE name = 'synchronous_commit' AND setting = 'off'"
    )

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.autocommit = True
        connection.execute(f"{settings}; {durable}")
        connection.autocommit = False

    watch(engine, _TRANSACTION_SECONDS)
    return engine
