"""Producers' sequences in their ring: the rows that calls write, and those that remain when a slot is folded."""

from __future__ import annotations

from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.contract.messages import EnqueueBatch, OpenProducer, enqueued, pack_messages
from heapline.sql.layout import SEQUENCES_SLOTS
from tests.integration.test_sql_nodes import Database, database, empty_database, shard_of  # noqa: F401 - a fixture

pytest.importorskip("asyncpg")
from heapline.sql import rings
from heapline.sql.migrations import all_migrations, migrate


async def send(broker: Any, seq: int, answered: int = 0, epoch: int = 1) -> Any:
    messages = pack_messages([Outgoing(b"x", seq=seq)])
    command = EnqueueBatch("jobs", messages, producer_id="p", epoch=epoch, answered_below=answered)
    (result,) = enqueued(await broker.do(command))
    if result.error is not None:
        raise result.error
    return result


async def open_producer(database: Database) -> Any:  # noqa: F811
    broker = await database.open()
    await broker.node.timekeepers[0].close()
    await broker.create_topic("jobs")
    await broker.do(OpenProducer("jobs", "p"))
    return broker


async def test_numbered_enqueues_update_and_delete_no_row(database: Database) -> None:  # noqa: F811
    """Behind an old transaction, each version of a row that is updated per call would stay, and be read."""
    broker = await open_producer(database)
    version = "SELECT xmin::text FROM producers"
    before = await database.admin.fetchval(version)
    for seq in range(1, 20):
        await send(broker, seq, answered=seq)
    assert await database.admin.fetchval(version) == before
    assert await database.admin.fetchval("SELECT count(*) FROM sequences") == 19


async def test_folding_keeps_what_producers_may_repeat(database: Database) -> None:  # noqa: F811
    broker = await open_producer(database)
    ring = rings.Rings(shard_of(broker), sequences_bytes=0)
    first = [await send(broker, seq) for seq in range(1, 10)]
    await send(broker, 10, answered=6)
    for _ in range(2 * SEQUENCES_SLOTS):
        await ring.advance()
        left = [row["seq"] for row in await database.admin.fetch("SELECT seq FROM sequences ORDER BY seq")]
        assert left == [6, 7, 8, 9, 10]
        repeated = await send(broker, 7)
        assert (repeated.id, repeated.duplicate) == (first[6].id, True)
        with pytest.raises(heapline.StaleSequence):
            await send(broker, 5)
    await broker.do(OpenProducer("jobs", "p"))
    with pytest.raises(heapline.StaleEpoch):
        await send(broker, 11)
    assert not (await send(broker, 7, epoch=2)).duplicate
    for _ in range(SEQUENCES_SLOTS):
        await ring.advance()
    assert [row["epoch"] for row in await database.admin.fetch("SELECT epoch FROM sequences")] == [2]
    assert (await send(broker, 7, epoch=2)).duplicate


async def test_sequences_are_remembered_across_an_upgrade(empty_database: Database) -> None:  # noqa: F811
    await migrate(empty_database.admin, empty_database.schema, 0, 1, all_migrations()[:13])
    broker_topic = "INSERT INTO topics (namespace, name, config, id_suffix) VALUES ('default', 'jobs', '{}', 1)"
    await empty_database.admin.execute(broker_topic)
    await empty_database.admin.execute(
        "INSERT INTO producers SELECT id, 'p', 3, 5, 0, clock_ms() FROM topics; "
        "INSERT INTO sequences SELECT id, 'p', 7, 700, 1, clock_ms() FROM topics"
    )
    broker = await empty_database.open()
    with pytest.raises(heapline.StaleSequence):
        await send(broker, 4, epoch=3)
    with pytest.raises(heapline.IdempotencyConflict):
        await send(broker, 7, epoch=3)  # with another payload
    assert not (await send(broker, 8, epoch=3)).duplicate
