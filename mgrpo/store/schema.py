"""The tables, the same in every dialect. Columns are an index over the records; the record alone is the truth.

::

    runs           one row: what this store belongs to
    groups         id                                              task and rollouts
    trajectories   (group_id, rollout, agent, invocation)          trajectory and reward of one node of the tree
    publications   (agent, number)                                 weights, the groups consumed for them, metrics
    leases         name                                            who may write what, see ledger.py
    parts          name                                            processes at work and where they are reached

Everything a model or a remote service wrote sits in a ``record`` (bytes), since text columns of some databases refuse
NUL and unpaired surrogates. ``record`` comes last in its row, so that reading the others need not load a long one.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

SCHEMA_VERSION = 2

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("id", Integer, CheckConstraint("id = 0"), primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("config", Text, nullable=False),  # JSON
    Column("fences", BigInteger, nullable=False, server_default="0"),  # leases granted so far
)

groups = Table(
    "groups",
    metadata,
    # INTEGER in SQLite is 64 bits wide, and only that name makes the key the row's own number.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("rollouts", Integer, nullable=False),
    Column("failed_rollouts", Integer, nullable=False),
    Column("trajectories", Integer, nullable=False),
    Column("sampled_tokens", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("record", LargeBinary, nullable=False),  # records.GroupHead
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("rollout", Integer, primary_key=True, autoincrement=False),
    Column("agent", Text, primary_key=True),
    Column("invocation", Integer, primary_key=True, autoincrement=False),
    Column("position", Integer, nullable=False),  # in the rollout; 0 = root
    Column("parent_agent", Text),
    Column("parent_invocation", Integer),
    Column("ending", Text, nullable=False),
    Column("failure", Text),  # kind
    Column("reward", Double),  # NULL = unknown
    Column("sampled_tokens", Integer, nullable=False),
    Column("min_version", BigInteger),
    Column("max_version", BigInteger),
    Column("record", LargeBinary, nullable=False),  # types.Sample
)

publications = Table(
    "publications",
    metadata,
    Column("agent", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # 0, 1, 2, ... per agent
    Column("version", BigInteger, nullable=False),
    Column("handle", Text, nullable=False),
    Column("checksum", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("stage", Text, nullable=False),
    Column("first_group", BigInteger, nullable=False),
    Column("end_group", BigInteger, nullable=False),  # exclusive
    Column("created", Double, nullable=False),
    Column("record", LargeBinary, nullable=False),  # metrics
)

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("expires", Double, nullable=False),  # seconds since the epoch, by the database's clock
    Column("done", Boolean, nullable=False),  # never granted again
)

parts = Table(
    "parts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("instance", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("expires", Double, nullable=False),  # as of leases
)
