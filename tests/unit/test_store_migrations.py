"""Stores of older releases: both ways to the newest tables are one, and what was in an old store is still there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, inspect, text
from sqlalchemy.exc import DBAPIError

from mgrpo.errors import RunFolderError
from mgrpo.store import opening, records, rows
from mgrpo.store.base import Publication, RunInfo, WeightVersion
from mgrpo.store.migrations import configuration, upgrade
from mgrpo.store.opening import open_store
from mgrpo.store.schema import SCHEMA_VERSION, groups, metadata, publications, trajectories
from mgrpo.types import Group, Reply, Reward, Rollout, Task, Trajectory, TrajectoryId, Turn

RUN = RunInfo(seed=3, config={"steps": 10}, created=1234.5)
Where = str | Path

TURN = Turn(tuple(range(200)), tuple(range(300)), (-0.5,) * 300, 0, "stop", "thought " * 100, Reply())


def group(id: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
    roots = [Trajectory(TrajectoryId(id, k, "planner", 0), "q", (TURN,), "answer") for k in range(2)]
    made = Group(
        id, Task(f"t{id}", "capital of Zubora?", "Merova"), tuple(Rollout(id, t.id.rollout, (t,)) for t in roots)
    )
    return made, {t.id: Reward(0.1) for t in roots}


WEIGHTS = WeightVersion("planner", 1, "weights/planner/v1", "sha256:1", 1, "rl")
PUBLISHED = Publication(WEIGHTS, range(1), {"loss": 0.5}, 6.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest) -> Where:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    folder = request.getfixturevalue("tmp_path") / "100% a run"
    folder.mkdir()
    return Path(folder / "s.db")


@contextmanager
def connected(where: Where) -> Iterator[Connection]:
    """One transaction, on a connection such as the store's own."""
    address = opening._address(where)
    postgres = address.url.get_backend_name() == "postgresql"
    engine = opening._postgres_engine(address) if postgres else opening._sqlite_engine(address, 5.0)
    with engine.execution_options(writes=True).begin() as connection:
        yield connection
    engine.dispose()


def write_version_1(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store as the first release left it: without leases, without alembic's table, nothing compressed."""
    with connected(where) as connection, monkeypatch.context() as patch:
        patch.setattr(records, "_SHORTEST", sys.maxsize)
        command.upgrade(configuration(connection), "0001")
        connection.execute(text("DROP TABLE alembic_version"))
        run = {"seed": RUN.seed, "created": RUN.created, "config": '{"steps": 10}'}
        connection.execute(text("INSERT INTO runs VALUES (0, 1, :seed, :created, :config)"), run)
        connection.execute(insert(groups), rows.group_row(group(0)[0], 5.0))
        connection.execute(insert(trajectories), rows.trajectory_rows(*group(0)))
        connection.execute(insert(publications), rows.publication_row(PUBLISHED, 0))


def tables_of(connection: Connection) -> dict[str, Any]:
    """Everything that the database knows of the tables, but alembic's own and the order of columns."""
    database = inspect(connection)

    def columns(table: str) -> list[str]:
        return sorted(
            f"{c['name']} {c['type']} null={c['nullable']} default={c['default']}" for c in database.get_columns(table)
        )

    return {
        table: (
            columns(table),
            database.get_pk_constraint(table),
            database.get_foreign_keys(table),
            database.get_check_constraints(table),
            database.get_unique_constraints(table),
            database.get_indexes(table),
        )
        for table in sorted(database.get_table_names())
        if table != "alembic_version"
    }


def test_all_migrations_lead_to_the_tables_that_a_new_store_gets(
    where: Where, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    postgres = isinstance(where, str)
    created: Where = request.getfixturevalue("postgres").new_database() if postgres else tmp_path / "created.db"
    open_store(created, RUN).close()
    with connected(where) as connection:
        upgrade(connection, 0)
        options = {"compare_type": True, "compare_server_default": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
        migrated = tables_of(connection)
    with connected(created) as connection:
        assert tables_of(connection) == migrated


def test_the_newest_migration_is_the_schema_version(tmp_path: Path) -> None:
    with connected(tmp_path / "s.db") as connection:
        scripts = ScriptDirectory.from_config(configuration(connection))
    assert scripts.get_heads() == [f"{SCHEMA_VERSION:04}"]
    assert [script.revision for script in scripts.walk_revisions()] == [f"{n:04}" for n in range(SCHEMA_VERSION, 0, -1)]


OPENERS: dict[str, Callable[[Where], Any]] = {"reader": open_store, "writer": lambda where: open_store(where, RUN)}


@pytest.mark.parametrize("by", OPENERS)
def test_a_store_of_the_first_release_is_brought_up_to_date(
    by: str, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version_1(where, monkeypatch)
    store = OPENERS[by](where)
    assert (store.run, store.run.created) == (RUN, RUN.created)
    assert store.group(0) == group(0)
    assert store.trained("planner") == 1 and store.publications() == [PUBLISHED]
    later, rewards = group(1)
    store.commit([later], rewards, store.lease("collect/1", "collect-0", 30.0))
    assert store.committed() == 2 and store.group(1) == (later, rewards)
    store.close()
    with connected(where) as connection:
        assert connection.execute(text("SELECT schema_version, fences FROM runs")).one() == (SCHEMA_VERSION, 1)


def test_many_may_bring_one_store_up_to_date_at_once(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    write_version_1(where, monkeypatch)
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: open_store(where), range(6)))
    for store in stores:
        assert store.group(0) == group(0)
        store.close()


def test_an_upgrade_that_fails_leaves_the_store_as_it_was(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    write_version_1(where, monkeypatch)
    with connected(where) as connection:
        connection.execute(text("CREATE TABLE parts (somebody TEXT)"))
        before = tables_of(connection)
    with pytest.raises(DBAPIError, match=re.compile("parts.* already exists")):
        open_store(where)
    with connected(where) as connection:
        assert tables_of(connection) == before
        assert connection.execute(text("SELECT schema_version FROM runs")).scalar() == 1


def test_a_newer_store_is_refused_in_one_line(where: Where) -> None:
    open_store(where, RUN).close()
    with connected(where) as connection:
        connection.execute(text(f"UPDATE runs SET schema_version = {SCHEMA_VERSION + 1}"))
    for opener in OPENERS.values():
        with pytest.raises(
            RunFolderError, match=rf"schema version {SCHEMA_VERSION + 1}, .* up to .* {SCHEMA_VERSION};"
        ):
            opener(where)


def test_opening_what_is_up_to_date_imports_no_migrations(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mgrpo.store.opening import RunInfo, open_store\n"
        "for _ in range(2): open_store(Path(sys.argv[1]), RunInfo(0)).close()\n"
        "sys.exit('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "s.db"], check=False).returncode == 0
