"""Bringing the tables of an older release up to date, by alembic: a file per schema version in scripts/versions/.

A new version is a file there, `SCHEMA_VERSION` one higher and the tables of schema.py changed alike; a test compares
both ways to the newest tables. New stores are created from schema.py alone, which is why opening one imports none of
this. ``runs.schema_version`` is the truth; alembic's own table repeats it, from the first upgrade of a store on.
"""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

SCRIPTS = Path(__file__).parent / "scripts"
_ONE_AT_A_TIME = threading.Lock()  # alembic keeps the upgrade at work in global variables


def configuration(connection: Connection) -> Config:
    """For alembic's commands, which then run on ``connection``."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection, version: int) -> None:
    """Bring tables of schema ``version`` to the newest, within the transaction that ``connection`` is in.

    The caller excludes others who would do the same. Version 0 is a database without tables.
    """
    config = configuration(connection)
    with _ONE_AT_A_TIME:
        command.stamp(config, f"{version:04}" if version else "base", purge=True)
        command.upgrade(config, "head")
