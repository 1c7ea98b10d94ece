"""Runs, groups, trajectories, publications: one process, or a collector and learners, without leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _create_runs_and_groups()
    _create_trajectories()
    _create_publications()


def _create_runs_and_groups() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 0"), primary_key=True, autoincrement=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("rollouts", sa.Integer, nullable=False),
        sa.Column("failed_rollouts", sa.Integer, nullable=False),
        sa.Column("trajectories", sa.Integer, nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )


def _create_trajectories() -> None:
    group_id = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "trajectories",
        sa.Column("group_id", group_id, sa.ForeignKey("groups.id"), primary_key=True),
        sa.Column("rollout", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("agent", sa.Text, primary_key=True),
        sa.Column("invocation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("parent_agent", sa.Text),
        sa.Column("parent_invocation", sa.Integer),
        sa.Column("ending", sa.Text, nullable=False),
        sa.Column("failure", sa.Text),
        sa.Column("reward", sa.Double),
        sa.Column("sampled_tokens", sa.Integer, nullable=False),
        sa.Column("min_version", sa.BigInteger),
        sa.Column("max_version", sa.BigInteger),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )


def _create_publications() -> None:
    op.create_table(
        "publications",
        sa.Column("agent", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("handle", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("first_group", sa.BigInteger, nullable=False),
        sa.Column("end_group", sa.BigInteger, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
