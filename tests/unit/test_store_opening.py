"""Opening: what is no store is said in one line, and what is one is opened durable."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import URL

from mgrpo.errors import RunFolderError, StoreTimeout, UserError
from mgrpo.store.base import RunInfo, WeightVersion
from mgrpo.store.opening import open_store

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
    assert "has schema version 99, this program reads version 1" in refusal(path)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_store_in_memory_is_refused(url: str) -> None:
    assert "an embedded store is a file" in refusal(url, RUN)


def test_other_databases_are_refused() -> None:
    assert "must be sqlite or postgresql" in refusal("mysql://host/run", RUN)
    assert "not a database URL" in refusal("://", RUN)


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    assert "unable to open database file" in refusal(tmp_path, RUN)


def test_many_may_begin_one_run_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: open_store(path, RUN), range(8)))
    assert {store.run.created for store in stores} == {stores[0].run.created}
    for store in stores:
        store.close()


def test_a_lock_held_too_long_is_a_timeout_that_names_the_store(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    begin(path)
    store = open_store(path, lock_seconds=0.01)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(
        StoreTimeout, match=r"^waited 0.01 s for the store .*s\.db: another process holds its write lock$"
    ):
        store.publish(WEIGHTS, ())
    assert store.latest("planner") is None, "readers do not wait for a writer"
    other.execute("ROLLBACK")
    store.publish(WEIGHTS, ())
    assert store.latest("planner") == WEIGHTS
    other.close()
    store.close()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    begin(path)
    store = open_store(path)
    with store._writer.connect() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        with pytest.raises(UserError, match=r"s\.db: database or disk is full; check free space"):
            connection.exec_driver_sql("CREATE TABLE filler AS SELECT zeroblob(1000000)")
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
