"""Store new messages in `ready` and `delayed`.

An id that another message has is an alarm, because two nodes minted it: then nothing is stored. The slots of `ready`
that may have rows and all leases are searched, and the slots of `delayed` that new rows go to.
"""

from __future__ import annotations

from collections.abc import Iterable

import asyncpg

from heapline.contract.config import TopicConfig
from heapline.contract.errors import UnavailableError
from heapline.logs import Log
from heapline.sql.events import record_new
from heapline.sql.layout import Layout
from heapline.sql.rows import Stored

log = Log("heapline.sql")


class IdConflict(UnavailableError):
    """Other messages have ids of new ones. Clients see UnavailableError."""

    reason = ""  # what the database said


async def insert(
    connection: asyncpg.Connection,
    layout: Layout,
    topic: int,
    ready: Stored,
    delayed: Stored,
    config: TopicConfig | None = None,
    batch: str | None = None,
) -> None:
    """Store new messages of a topic: those that are ready, and those that become ready later.

    With the topic's config, record them as new, or as those of a prepared batch.
    """
    for name, columns in (("insert_ready", ready), ("insert_delayed", delayed)):
        if columns.ids:
            try:
                taken = await connection.fetch(layout.insert(name), topic, *columns)
            except asyncpg.UniqueViolationError as error:
                raise id_conflict(str(error)) from error
            if taken:
                raise id_conflict(f"ids {[row['id'] for row in taken]} are in use")
            if config is not None:
                await record_new(connection, topic, config, layout.now, columns, name == "insert_delayed", batch)


async def taken_ids(connection: asyncpg.Connection, layout: Layout, ids: Iterable[int]) -> set[int]:
    """Return those ids that ready or leased messages have."""
    return {row["id"] for row in await connection.fetch(layout.taken(), list(ids))}


def id_conflict(reason: str) -> IdConflict:
    log.error("message id conflict; nothing was stored", error=reason)
    conflict = IdConflict(
        "a message id was minted twice, so nothing was stored; retry, and check that no two nodes share a node id"
    )
    conflict.reason = reason
    return conflict
