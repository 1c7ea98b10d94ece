"""Who may write what, and who is there: leases with fences, and the processes that announced themselves.

::

    granted   free, expired, held by the same owner (its process died and came back), never one that is done
    fence     a number that grows with every grant of the store; a write that carries an older one than the lease's own
              is refused, so an owner that slept through its lease and wakes up writes nothing
    clock     the database's, so that the clocks of machines need not agree

Functions over one connection; `SqlStore` puts them into transactions.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Table, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from mgrpo.errors import LeaseLost
from mgrpo.store.base import Lease, Part
from mgrpo.store.schema import leases, parts, runs


def _insert(connection: Connection, table: Table) -> Any:
    """An insert that may say what to do where the key is there already."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def clock(connection: Connection) -> float:
    """Seconds since the epoch by the database's own clock; an embedded database has that of its machine."""
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())


# ---------------------------------------------------------------- leases


def obtainable(connection: Connection, name: str, owner: str) -> bool:
    """Whether asking for the lease is worth a write."""
    row = connection.execute(select(leases).where(leases.c.name == name)).one_or_none()
    if row is None:
        return True
    return not row.done and (row.owner == owner or row.expires <= clock(connection))


def grant(connection: Connection, name: str, owner: str, seconds: float) -> Lease | None:
    """The lease, or None where another holds it or it is done. The connection writes."""
    found = connection.execute(select(leases).where(leases.c.name == name).with_for_update()).one_or_none()
    now = clock(connection)
    if found is not None and (found.done or (found.owner != owner and found.expires > now)):
        return None
    fence = connection.execute(update(runs).values(fences=runs.c.fences + 1).returning(runs.c.fences)).scalar_one()
    row = {"name": name, "owner": owner, "fence": fence, "expires": now + seconds, "done": False}
    if found is None:  # where two ask at once, the second waits here and then gets nothing
        new = (
            _insert(connection, leases).on_conflict_do_nothing(index_elements=[leases.c.name]).returning(leases.c.name)
        )
        if connection.execute(new, row).one_or_none() is None:
            return None
    else:
        connection.execute(update(leases).where(leases.c.name == name).values(row))
    return Lease(name, owner, fence)


def check(connection: Connection, lease: Lease) -> None:
    """Raise LeaseLost unless ``lease`` is the newest grant of its name; until the transaction ends it stays so."""
    query = select(leases).where(leases.c.name == lease.name).with_for_update()
    found = connection.execute(query).one_or_none()
    if found is not None and found.fence == lease.fence and not found.done:
        return
    now = "was given back" if found is None or found.done else f"is held by {found.owner} since"
    raise LeaseLost(f"{lease.owner} lost its lease {lease.name!r}, which {now}; nothing is written under it any more")


def renew(connection: Connection, lease: Lease, seconds: float) -> None:
    check(connection, lease)
    expires = clock(connection) + seconds
    connection.execute(update(leases).where(leases.c.name == lease.name).values(expires=expires))


def release(connection: Connection, lease: Lease, done: bool) -> None:
    """Give ``lease`` back, or close it for good. Nothing where it was lost, since it is another's, or is closed."""
    mine = (leases.c.name == lease.name) & (leases.c.fence == lease.fence) & ~leases.c.done
    connection.execute(update(leases).where(mine).values(done=True) if done else delete(leases).where(mine))


def is_done(connection: Connection, name: str) -> bool:
    return bool(connection.execute(select(leases.c.done).where(leases.c.name == name)).scalar())


# ---------------------------------------------------------------- parts


def announce(connection: Connection, part: Part, seconds: float) -> None:
    row = {name: getattr(part, name) for name in ("kind", "agent", "url", "instance", "version")}
    row["state"] = part.state.encode("ascii", "replace").decode().replace("\0", "?")  # what every database takes
    row["expires"] = clock(connection) + seconds
    new = _insert(connection, parts).values(name=part.name, **row)
    connection.execute(new.on_conflict_do_update(index_elements=[parts.c.name], set_=row))


def retire(connection: Connection, name: str) -> None:
    connection.execute(delete(parts).where(parts.c.name == name))


def alive(connection: Connection, kind: str | None, agent: str | None) -> list[Part]:
    """Parts whose time has not run out, by name."""
    query = select(parts).where(parts.c.expires > clock(connection)).order_by(parts.c.name)
    if kind is not None:
        query = query.where(parts.c.kind == kind)
    if agent is not None:
        query = query.where(parts.c.agent == agent)
    return [
        Part(row.name, row.kind, row.agent, row.url, row.instance, row.version, row.state)
        for row in connection.execute(query)
    ]
