"""The store over SQLAlchemy Core: SQLite on one machine, PostgreSQL across machines, the same statements.

Opened by `mgrpo.store.opening.open_store`, which prepares the engine's connections.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, Engine, Select, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import ReturningInsert

from mgrpo.errors import UserError
from mgrpo.store import ledger, rows
from mgrpo.store.base import Counts, GroupSummary, Lease, Part, PartKind, Publication, RunInfo, WeightVersion
from mgrpo.store.records import decode_sample
from mgrpo.store.schema import groups, publications, trajectories
from mgrpo.types import Group, Reward, Sample, Share, TrajectoryId

_SUMMARY_COLUMNS = [column for column in trajectories.c if column.name != "record"]


class SqlStore:
    """All three protocols of `store.base`; methods may be called from any thread of one process."""

    def __init__(self, engine: Engine, run: RunInfo) -> None:
        self._engine = engine
        self._writer = engine.execution_options(writes=True)
        self._run = run
        self._insert_new = _insert_new(engine.dialect.name)
        # Run by the driver as it is: what SQLAlchemy does to each of these values takes longer than their database.
        self._insert = insert(trajectories).compile(dialect=engine.dialect)
        self._committed = 0  # a lower bound of committed(); groups are never deleted

    @property
    def run(self) -> RunInfo:
        return self._run

    def close(self) -> None:
        self._engine.dispose()

    def _reading(self) -> AbstractContextManager[Connection]:
        return self._engine.connect()

    def _writing(self) -> AbstractContextManager[Connection]:
        return self._writer.begin()

    def _ordered(self, found: list[rows.Columns]) -> Any:
        """Rows of trajectories as the driver wants them: by position, or by name."""
        order = self._insert.positiontup
        return found if order is None else [tuple([row[name] for name in order]) for row in found]

    # ------------------------------------------------------------ collect

    def committed(self) -> int:
        reached = self._committed  # of this call alone: other threads count too
        query = select(groups.c.id).where(groups.c.id >= reached).order_by(groups.c.id)
        with self._reading() as connection:
            for id in connection.execute(query).scalars():
                if id != reached:
                    break
                reached += 1
        self._committed = reached
        return reached

    def missing(self, ids: range) -> list[int]:
        query = select(groups.c.id).where(groups.c.id.between(ids.start, ids.stop - 1))
        with self._reading() as connection:
            there = set(connection.execute(query).scalars())
        return [id for id in ids if id not in there]

    def commit(
        self, groups: Sequence[Group], rewards: Mapping[TrajectoryId, Reward], lease: Lease | None = None
    ) -> None:
        rows.check(groups, rewards)
        if not groups:
            return
        now = time.time()
        heads = [rows.group_row(group, now) for group in groups]
        nodes = {group.id: rows.trajectory_rows(group, rewards) for group in groups}
        with self._writing() as connection:
            if lease is not None:
                ledger.check(connection, lease)
            fresh = connection.execute(self._insert_new, heads).scalars().all()
            if fresh_rows := [row for id in fresh for row in nodes[id]]:
                connection.exec_driver_sql(str(self._insert), self._ordered(fresh_rows))

    def trained(self, agent: str) -> int:
        with self._reading() as connection:
            last = _last_publication(connection, agent)
        return 0 if last is None else last[1].consumed.stop

    def latest(self, agent: str) -> WeightVersion | None:
        with self._reading() as connection:
            last = _last_publication(connection, agent)
        return None if last is None else last[1].weights

    # ------------------------------------------------------------ learn

    def take(self, agent: str, first: int, count: int) -> list[Share] | None:
        where = trajectories.c.group_id.between(first, first + count - 1)
        order = (trajectories.c.group_id, trajectories.c.rollout, trajectories.c.invocation)
        own = select(trajectories.c.group_id, trajectories.c.record).where(where, trajectories.c.agent == agent)
        ranked = select(trajectories.c.group_id, trajectories.c.rollout, trajectories.c.reward)
        samples: list[list[Sample]] = [[] for _ in range(count)]
        sizes = [0] * count
        roots: list[dict[int, float | None]] = [{} for _ in range(count)]
        with self._reading() as connection:
            if _present(connection, range(first, first + count)) < count:
                return None
            for group, record in connection.execute(own.order_by(*order)):
                samples[group - first].append(decode_sample(record))
                sizes[group - first] += len(record)
            for group, rollout, reward in connection.execute(ranked.where(where, trajectories.c.position == 0)):
                roots[group - first][rollout] = reward
        return [Share(first + i, tuple(samples[i]), roots[i], sizes[i]) for i in range(count)]

    def publish(
        self,
        version: WeightVersion,
        consumed: range | Sequence[int],
        metrics: Mapping[str, float] | None = None,
        lease: Lease | None = None,
    ) -> None:
        span = _span(consumed)
        with self._writing() as connection:
            if lease is not None:
                ledger.check(connection, lease)
            last = _last_publication(connection, version.agent)
            number, before = (-1, None) if last is None else last
            new = Publication(version, span or _empty_after(before), dict(metrics or {}), time.time())
            if before is not None and (before.weights, before.consumed) == (new.weights, new.consumed):
                return
            _check_succession(before, new)
            if _present(connection, new.consumed) < len(new.consumed):
                raise ValueError(f"{version.agent!r} cannot consume {_named(new.consumed)}: not all are committed")
            connection.execute(insert(publications), rows.publication_row(new, number + 1))

    # ------------------------------------------------------------ ledger

    def lease(self, name: str, owner: str, seconds: float) -> Lease | None:
        with self._reading() as connection:  # those who wait for it need not stand in the way of those who write
            if not ledger.obtainable(connection, name, owner):
                return None
        with self._writing() as connection:
            return ledger.grant(connection, name, owner, seconds)

    def renew(self, lease: Lease, seconds: float) -> None:
        with self._writing() as connection:
            ledger.renew(connection, lease, seconds)

    def release(self, lease: Lease, done: bool = False) -> None:
        with self._writing() as connection:
            ledger.release(connection, lease, done)

    def done(self, name: str) -> bool:
        with self._reading() as connection:
            return ledger.is_done(connection, name)

    def announce(self, part: Part, seconds: float) -> None:
        with self._writing() as connection:
            ledger.announce(connection, part, seconds)

    def retire(self, name: str) -> None:
        with self._writing() as connection:
            ledger.retire(connection, name)

    def parts(self, kind: PartKind | None = None, agent: str | None = None) -> list[Part]:
        with self._reading() as connection:
            return ledger.alive(connection, kind, agent)

    # ------------------------------------------------------------ read

    def counts(self) -> Counts:
        columns = (groups.c.rollouts, groups.c.failed_rollouts, groups.c.trajectories, groups.c.sampled_tokens)
        query = select(func.count(), *(func.coalesce(func.sum(column), 0) for column in columns)).select_from(groups)
        with self._reading() as connection:
            return Counts(*(int(total) for total in connection.execute(query).one()))

    def groups(self, first: int, count: int) -> list[GroupSummary]:
        span = (first, first + count - 1)
        heads = select(groups).where(groups.c.id.between(*span)).order_by(groups.c.id)
        nodes = (
            select(*_SUMMARY_COLUMNS)
            .where(trajectories.c.group_id.between(*span))
            .order_by(trajectories.c.group_id, trajectories.c.rollout, trajectories.c.position)
        )
        with self._reading() as connection:
            return rows.summaries(connection.execute(heads).all(), connection.execute(nodes).all())

    def group(self, id: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
        head = select(groups.c.record).where(groups.c.id == id)
        nodes = (
            select(trajectories.c.record)
            .where(trajectories.c.group_id == id)
            .order_by(trajectories.c.rollout, trajectories.c.position)
        )
        with self._reading() as connection:
            record = connection.execute(head).scalar()
            if record is None:
                raise KeyError(f"group {id} is not in the store")
            return rows.group_of(id, record, connection.execute(nodes).scalars())

    def publications(self, agent: str | None = None) -> list[Publication]:
        query = select(publications).order_by(publications.c.agent, publications.c.number)
        if agent is not None:
            query = query.where(publications.c.agent == agent)
        with self._reading() as connection:
            return [rows.publication_of(row) for row in connection.execute(query)]


def _insert_new(dialect: str) -> ReturningInsert[int]:
    """Inserts groups whose id is not there yet and returns the ids it inserted."""
    statement = postgresql.insert(groups) if dialect == "postgresql" else sqlite.insert(groups)
    return statement.on_conflict_do_nothing(index_elements=[groups.c.id]).returning(groups.c.id)


def _last_publication(connection: Connection, agent: str) -> tuple[int, Publication] | None:
    query: Select[*tuple[object, ...]] = (
        select(publications).where(publications.c.agent == agent).order_by(publications.c.number.desc()).limit(1)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else (row.number, rows.publication_of(row))


def _present(connection: Connection, ids: range) -> int:
    query = select(func.count()).select_from(groups).where(groups.c.id.between(ids.start, ids.stop - 1))
    return connection.execute(query).scalar_one()


def _span(consumed: range | Sequence[int]) -> range:
    """``consumed`` as a range. Raises ValueError where it skips, repeats or reorders a group."""
    if not consumed:
        return range(0)
    span = range(consumed[0], consumed[-1] + 1)
    if list(consumed) != list(span):
        raise ValueError(f"consumed groups must follow each other without a gap, got {list(consumed)}")
    return span


def _empty_after(before: Publication | None) -> range:
    end = 0 if before is None else before.consumed.stop
    return range(end, end)


def _named(ids: range) -> str:
    return f"groups {ids.start}..{ids.stop - 1}"


def _check_succession(before: Publication | None, new: Publication) -> None:
    """``new`` follows ``before``: the cursor has no gap, versions never go back, equal versions are equal weights."""
    agent = new.weights.agent
    trained = 0 if before is None else before.consumed.stop
    if new.consumed.start > trained:
        raise ValueError(f"{agent!r} cannot consume {_named(new.consumed)}: its next group is {trained}")
    if new.consumed.start < trained:
        raise UserError(
            f"{agent!r} already consumed {_named(new.consumed)} (its next group is {trained}): "
            f"another learner of {agent!r} is at work on this store; stop one of them"
        )
    if before is None or new.weights.version > before.weights.version:
        return
    if new.weights.version < before.weights.version:
        raise UserError(
            f"{agent!r} publishes version {new.weights.version} after version {before.weights.version}: "
            f"another learner of {agent!r} is at work on this store; stop one of them"
        )
    if (new.weights.handle, new.weights.checksum) != (before.weights.handle, before.weights.checksum):
        raise ValueError(
            f"version {new.weights.version} of {agent!r} names other weights ({new.weights.handle}, "
            f"{new.weights.checksum}) than before ({before.weights.handle}, {before.weights.checksum})"
        )
