"""Nodes of the Postgres broker for tests: on one schema per process, opened and crashed in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import heapline.sql
from tests.postgres import fresh_schema, shared_url

_schemas: list[str] = []
_topics = itertools.count(1)


def rig_schema() -> str:
    """Return the schema that all tests of this process share: creating one takes a second."""
    if not _schemas:
        _schemas.append(fresh_schema())
    return _schemas[0]


def fresh_topic() -> str:
    return f"rig-{next(_topics)}"


def node(**config: Any) -> Any:
    """Return a node to be opened with `async with`."""
    return heapline.sql.open([shared_url()], schema=rig_schema(), **config)


async def open_node(disk: Any = None, **config: Any) -> Any:
    broker = node(**config)
    if disk is not None:
        broker.node.disk = disk
    return await broker.__aenter__()


async def crash(broker: Any) -> None:
    """End a node as a kill does: nothing is flushed or released, and transactions in progress are cut off.

    The files stay as they are; the lock of the write-ahead log ends with the process.
    """
    node = broker.node
    node.is_open = False
    for flusher in [*node.redis_flushers, *(flusher for _, flusher in node.flushers())]:
        await flusher._loop.close()  # first: a rollback on a connection that was terminated hides the cancellation
    for shard in node.shards:
        await shard.circuit.close()
        shard._pool.terminate()
        await shard.wakeups.close()
    for timekeeper in node.timekeepers:
        await timekeeper.close()
    for queue in list(node._pops.values()):
        queue.close(heapline.Closed())
    await node.tasks.cancel()
    if node._wal is not None:
        for wal in [buffer.flusher._wal for buffer in node.buffers]:
            if wal._writing is not None:
                await asyncio.wait([wal._writing])
            wal._journal.close()
        node._wal.close()
    if node.redis is not None:
        await node.redis.close()


@contextlib.asynccontextmanager
async def no_flush(broker: Any, admin: Any) -> AsyncIterator[None]:
    """Hold the lock that a flush of the node needs."""
    ((_, flusher),) = broker.node.flushers()
    await admin.execute(f"SELECT pg_advisory_lock({flusher._lock})")
    try:
        yield
    finally:
        await admin.execute(f"SELECT pg_advisory_unlock({flusher._lock})")


async def stored(admin: Any, topic: str) -> int:
    found: int = await admin.fetchval("SELECT count(*) FROM items WHERE topic = $1", topic)
    return found


async def take_all(broker: Any, topic: str) -> list[bytes]:
    """Pop and ack until the topic is empty."""
    found: list[bytes] = []
    while True:
        messages = await broker.pop(topic, 1000, max_bytes=1 << 30, wait=0.2)
        await broker.ack(messages)
        found += [m.payload for m in messages]
        stats = await broker.stats(topic)
        if not messages and not (stats.ready or stats.delayed or stats.leased):
            return found
