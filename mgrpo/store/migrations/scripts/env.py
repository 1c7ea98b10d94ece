"""What alembic runs for every command: on the connection that it was given, within that one's transaction."""

from __future__ import annotations

from alembic import context

from mgrpo.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
