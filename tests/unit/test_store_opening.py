"""Opening: what is no store is said in one line, and what is one is opened durable."""

from __future__ import annotations

import logging
import re
import sqlite3
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from postgres import PASSWORD, PostgresServer, free_port
from sqlalchemy import URL

from mgrpo.errors import MgrpoError, RunFolderError, StoreUnavailable, UserError
from mgrpo.store.base import RunInfo, WeightVersion
from mgrpo.store.opening import open_store, refuse_password

RUN = RunInfo(seed=3, config={"steps": 10})
WEIGHTS = WeightVersion("planner", 0, "weights/planner/0", "sha256:0", 0, "rl")


def begin(path: Path) -> None:
    open_store(path, RUN).close()


def refusal(where: str | Path, run: RunInfo | None = None) -> str:
    with pytest.raises(UserError) as caught:
        open_store(where, run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path_a_string_and_a_url_name_the_same_store(tmp_path: Path) -> None:
    path = tmp_path / "a run #1.db"
    store = open_store(path, RUN)
    store.publish(WEIGHTS, ())
    store.close()
    url = URL.create("sqlite", database=str(path)).render_as_string()
    for where in (path, str(path), url):
        again = open_store(where)
        assert again.latest("planner") == WEIGHTS
        again.close()


def test_an_existing_store_keeps_the_run_it_began_with(tmp_path: Path) -> None:
    begin(tmp_path / "s.db")
    store = open_store(tmp_path / "s.db", RunInfo(seed=3, config={"steps": 20}))
    assert store.run.config == {"steps": 10}
    store.close()


def test_a_store_of_another_seed_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "s.db")
    message = refusal(tmp_path / "s.db", RunInfo(seed=4))
    assert "belongs to a run with seed 3, not 4" in message


def test_a_missing_store_is_not_created_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such file; no run has begun there"):
        open_store(tmp_path / "s.db")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"the folder {tmp_path / 'gone'} does not exist" in refusal(tmp_path / "gone" / "s.db", RUN)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, " * 100)
    before = path.read_bytes()
    assert "file is not a database" in refusal(path)
    assert "file is not a database" in refusal(path, RUN)
    assert path.read_bytes() == before


@pytest.mark.parametrize("table", ["CREATE TABLE notes (text TEXT)", "CREATE TABLE runs (id INTEGER)"])
def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path, table: str) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute(table)
    connection.close()
    assert "no store of this program" in refusal(path)
    assert "no store of this program" in refusal(path, RUN)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    connection.close()


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    begin(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET schema_version = 99")
    connection.close()
    assert "has schema version 99, this program reads up to version" in refusal(path)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_store_in_memory_is_refused(url: str) -> None:
    assert "an embedded store is a file" in refusal(url, RUN)


def test_other_databases_are_refused() -> None:
    assert "must be sqlite or postgresql" in refusal("mysql://host/run", RUN)
    assert "not a database URL" in refusal("://", RUN)


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    assert "unable to open database file" in refusal(tmp_path, RUN)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_many_may_begin_one_run_at_once(database: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue({"sqlite": "tmp_path", "postgresql": "postgres_url"}[database])
    where = place / "s.db" if isinstance(place, Path) else place
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: open_store(where, RUN), range(8)))
    assert {store.run.created for store in stores} == {stores[0].run.created}
    for store in stores:
        store.close()


def test_a_lock_held_too_long_names_the_store_and_the_seconds(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    begin(path)
    store = open_store(path, outage_s=0.1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(
        StoreUnavailable, match=r"^store .*s\.db: publish failed for 0.1 s: another process holds its write lock"
    ):
        store.publish(WEIGHTS, ())
    assert store.latest("planner") is None, "readers do not wait for a writer"
    other.execute("ROLLBACK")
    store.publish(WEIGHTS, ())
    assert store.latest("planner") == WEIGHTS
    other.close()
    store.close()


def test_commits_are_durable_and_keys_are_enforced(tmp_path: Path) -> None:
    begin(tmp_path / "s.db")
    store = open_store(tmp_path / "s.db")
    with store._engine.connect() as connection:  # type: ignore[attr-defined]
        read = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert read == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    store.close()


def test_the_store_imports_without_torch() -> None:
    code = "import sys, mgrpo.store.opening; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- PostgreSQL


def test_where_no_run_has_begun_a_reader_says_so_and_creates_nothing(postgres_url: str) -> None:
    assert "empty; no run has begun there" in refusal(postgres_url)
    assert "empty; no run has begun there" in refusal(postgres_url)


def test_another_programs_tables_are_refused_and_left_alone(postgres: PostgresServer, postgres_url: str) -> None:
    database = postgres_url.rpartition("/")[2]
    postgres.execute("CREATE TABLE notes (text TEXT)", database)
    assert "no store of this program" in refusal(postgres_url, RUN)
    tables = postgres.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", database)
    assert tables == [("notes",)]


def test_no_wait_for_the_server_is_without_a_deadline(postgres: PostgresServer, postgres_url: str) -> None:
    """And a commit is on the server's disk when it returns, even where its databases are told otherwise."""
    database = postgres_url.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
    store = open_store(postgres_url, RUN)
    with store._engine.connect() as connection:  # type: ignore[attr-defined]
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")
        read = {name: connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names}
        peer = connection.connection.driver_connection.info.get_parameters()
    store.close()
    assert read["synchronous_commit"] == "on"
    seconds = [int(read[name].removesuffix("s").replace("2min", "120")) for name in names[:3]]
    assert seconds == sorted(seconds, reverse=True) and all(seconds), "an idle owner's locks go before others give up"
    assert {"connect_timeout", "keepalives_idle", "tcp_user_timeout"} <= peer.keys()


def test_the_url_may_say_otherwise(postgres_url: str) -> None:
    store = open_store(postgres_url + "?connect_timeout=9&application_name=mine", RUN)
    with store._engine.connect() as connection:  # type: ignore[attr-defined]
        peer = connection.connection.driver_connection.info.get_parameters()
    store.close()
    assert (peer["connect_timeout"], peer["application_name"]) == ("9", "mine")


def test_who_has_no_right_is_told_so(postgres: PostgresServer, postgres_url: str) -> None:
    database = postgres_url.rpartition("/")[2]
    postgres.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    guest = postgres.url(database, username="guest", password="guest")
    assert "permission denied for schema public; ask the database's owner" in refusal(guest, RUN)
    open_store(postgres_url, RUN).close()
    assert "permission denied for table runs; ask the database's owner" in refusal(guest)


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "postgresql+psycopg2", "postgresql+nonsense"])
def test_other_drivers_are_refused(driver: str) -> None:
    assert "pip install 'mgrpo[postgres]'" in refusal(f"{driver}://host/run", RUN)


def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    message = refusal("postgresql://host/run", RUN)
    assert message.startswith("store postgresql://host/run: ") and "pip install 'mgrpo[postgres]'" in message


# ---------------------------------------------------------------- passwords

SECRET = "hunter2"
WITH_PASSWORD = [
    f"postgresql://me:{SECRET}@host/run",
    f"postgresql+psycopg://:{SECRET}@host/run",
    f"postgresql://me@host/run?password={SECRET}",
    f"postgresql://me@host/run?sslmode=require&sslpassword={SECRET}",
    f"postgresql://me:{SECRET}@and@host/run",  # an unescaped @
    f"postgresql://me:{SECRET}/run",  # a forgotten host, so that it stands where a port should
    f"mysql://me:{SECRET}@host/run",
]


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_password_in_a_recipe_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_password(url, "recipe.toml: store")
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown and "\n" not in str(caught.value)


def test_what_is_no_password_is_not_refused() -> None:
    for url in ("postgresql://me@host/run", "postgresql:///run", "runs/a:b@c/store.db", "sqlite:////runs/a@b@c/s.db"):
        refuse_password(url, "store")
    with pytest.raises(UserError, match=r"^recipe.toml: store: a password .* PGPASSWORD or ~/.pgpass, .* MGRPO_STORE$"):
        refuse_password(WITH_PASSWORD[0], "recipe.toml: store")


WRONG: dict[str, dict[str, Any]] = {
    "password": {"password": f"{SECRET}-{PASSWORD}"},
    "user": {"username": "nobody-of-this-name"},
    "port": {"port": free_port()},
    "host": {"host": "no-such-host.invalid"},
    "database": {},
    "option": {"query": {"no_such_option": "1"}},
    "value": {"query": {"sslmode": "no-such-mode"}},
    "certificate": {"query": {"sslmode": "verify-full"}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_whatever_is_wrong_with_an_address_no_password_is_shown(
    wrong: str, postgres: PostgresServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(MgrpoError) as caught:
        open_store(postgres.url("no_such_run", **WRONG[wrong]), RUN, outage_s=0.1)
    outage = wrong in ("port", "host")  # these may pass by themselves
    assert isinstance(caught.value, StoreUnavailable if outage else UserError)
    message = str(caught.value)
    assert re.match(r"store postgresql://[^ ]+/no_such_run: ", message) and "\n" not in message
    chain = "".join(traceback.format_exception(caught.value))
    for shown in (message, repr(caught.value), chain, caplog.text, *capfd.readouterr()):
        assert PASSWORD[:16] not in shown and SECRET not in shown


def test_an_open_store_shows_its_password_to_nobody(
    postgres_url: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    assert PASSWORD[:16] in postgres_url
    store = open_store(postgres_url, RUN)
    engine = store._engine  # type: ignore[attr-defined]
    with engine.connect() as connection, pytest.raises(Exception, match="no_such_table") as caught:
        connection.exec_driver_sql("SELECT * FROM no_such_table")
    arguments = b" ".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    chain = "".join(traceback.format_exception(caught.value))
    for shown in (repr(store), repr(engine), repr(engine.url), str(engine.pool), chain, caplog.text, str(arguments)):
        assert PASSWORD[:16] not in shown
    store.close()


def test_the_password_may_come_from_the_environment_or_the_password_file(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = postgres.url(postgres_url.rpartition("/")[2], password=None)
    assert PASSWORD[:16] not in bare
    with monkeypatch.context() as patch:
        patch.setenv("PGPASSWORD", PASSWORD)
        open_store(bare, RUN).close()
    file = tmp_path / "pgpass"
    file.write_text("*:*:*:mgrpo:" + PASSWORD.replace("\\", r"\\").replace(":", r"\:") + "\n", encoding="utf-8")
    file.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setenv("PGPASSFILE", str(file))
        open_store(bare).close()
    assert "no password supplied" in refusal(bare)
