"""The outbox: a message is enqueued if and only if the database transaction that wrote it commits, and then once.

Your transaction writes the message into a table of your database; a relay, in a separate process, enqueues what was
committed. With SQLAlchemy (`pip install 'heapline[outbox]'`):

    from heapline import outbox

    outbox.create_tables(engine)                                  # or add outbox.metadata() to your migrations
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.enqueue(session, "bills", payload, priority=5)     # await it if the session is async
        outbox.enqueue_call(session, send.item(order))            # the same for a task

    heapline outbox relay --database postgresql+psycopg://… --to localhost:7400

With Django put "heapline.outbox.django" into INSTALLED_APPS and call its `enqueue`; `manage.py heapline_relay`.

`relay.py` explains why this is exactly once. SQLAlchemy and Django are imported when they are used, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from heapline.outbox.relay import OutboxRelay
from heapline.outbox.store import RowOptions, fields_of, new_row

if TYPE_CHECKING:
    from sqlalchemy import MetaData

    from heapline.client.tasks.task import Item

__all__ = ["OutboxRelay", "create_tables", "enqueue", "enqueue_call", "metadata"]


def enqueue(session: Any, topic: str, payload: bytes, **options: Unpack[RowOptions]) -> Any:
    """Write a message in the transaction of a SQLAlchemy session or connection; await it if that is async.

    A `delay` counts from now, a `ttl` from when the relay enqueues it. A message that no topic would accept is refused
    here; if only this topic refuses it, the relay keeps the row with the reason.
    """
    from heapline.outbox import sql

    row = new_row(topic, payload, **options)
    return sql.insert(session, row)


def enqueue_call(session: Any, call: Item) -> Any:
    """Write a call of a task: `outbox.enqueue_call(session, send.item(order, priority=5))`."""
    return enqueue(session, **fields_of(call))


def metadata() -> MetaData:
    """Return the tables for migrations: `target_metadata = [Base.metadata, outbox.metadata()]` in Alembic's env.py."""
    from heapline.outbox import sql

    return sql.METADATA


def create_tables(engine_or_connection: Any) -> None:
    """Create the outbox's tables if they do not exist."""
    metadata().create_all(engine_or_connection)
