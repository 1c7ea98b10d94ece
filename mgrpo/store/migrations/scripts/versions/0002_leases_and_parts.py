"""Leases with fences, and the processes that announce themselves. Records may be compressed; older ones stay as is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("runs", sa.Column("fences", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
        sa.Column("done", sa.Boolean, nullable=False),
    )
    op.create_table(
        "parts",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("agent", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
    )
    op.execute("UPDATE runs SET schema_version = 2")
