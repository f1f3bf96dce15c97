"""Delayed messages in the slots of a real database: their slots, that they fire, and that slots are truncated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from tests.postgres import shared_url

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import delayed, rings  # noqa: E402 - needs asyncpg
from heapline.sql.layout import DELAYED_SLOTS  # noqa: E402 - needs asyncpg
from heapline.sql.migrations import all_migrations, migrate  # noqa: E402 - needs asyncpg
from tests.integration.test_sql_nodes import Database, database, empty_database, shard_of, used_slots  # noqa: E402, F401

MINUTE, DAY = 60_000, 86_400_000


@pytest.fixture
async def moved(database: Database) -> Database:  # noqa: F811
    """A database whose clock the test moves."""
    await (await database.open()).close()
    await database.admin.execute(
        "CREATE TABLE skipped (ms bigint); INSERT INTO skipped VALUES (0); "
        "CREATE OR REPLACE FUNCTION clock_ms() RETURNS bigint LANGUAGE sql VOLATILE AS "
        "'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint + ms FROM skipped'"
    )
    return database


async def still(database: Database) -> Any:  # noqa: F811
    """A node whose timekeeper runs only when the test lets it."""
    broker = await database.open()
    await broker.node.timekeepers[0].close()
    return broker


async def skip(database: Database, ms: int) -> None:  # noqa: F811
    await database.admin.execute("UPDATE skipped SET ms = ms + $1", ms)


async def store_late(database: Database, topic: int) -> None:  # noqa: F811
    """Store a message that has been due for a long time."""
    await database.admin.execute(
        "INSERT INTO delayed (slot, topic, id, key, due, priority, attempts, payload, wake, at) "
        "VALUES (delayed_slot(1, clock_ms()), $1, 7, 0, 1, 0, 0, 'late', 1, 1)",
        topic,
    )


async def test_nearer_times_have_finer_slots(database: Database) -> None:  # noqa: F811
    await database.open()
    now = 1_800_000_000_000
    for level in range(delayed.LEVELS):
        period = delayed.BASE_MS * delayed.RATIO**level
        at = now + 2 * period
        slot = await database.admin.fetchval("SELECT delayed_slot($1, $2)", at, now)
        assert slot // delayed.RATIO <= level
        assert slot not in delayed.past_slots(now)
    far = await database.admin.fetchval("SELECT delayed_slot($1, $2)", 1 << 61, now)
    assert far // delayed.RATIO == delayed.LEVELS - 1
    assert far not in delayed.past_slots(now)


@pytest.mark.parametrize("delay", [1, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 30_000_000])
async def test_message_fires_from_any_slot_when_it_is_due_and_not_before(moved: Database, delay: int) -> None:
    broker = await still(moved)
    await broker.create_topic("jobs")
    await broker.enqueue("jobs", b"x", delay=float(delay))
    await skip(moved, delay * 1000 - 30_000 if delay > 60 else 0)
    await broker.node.tick()
    assert await broker.pop("jobs") == []
    await skip(moved, 30_000 if delay > 60 else delay * 1000)
    await broker.node.tick()
    assert [m.payload for m in await broker.pop("jobs")] == [b"x"]


async def test_slots_are_truncated_after_their_period_despite_an_open_transaction(moved: Database) -> None:
    broker = await still(moved)
    await broker.create_topic("jobs")
    reader = await asyncpg.connect(shared_url())
    held = reader.transaction(isolation="repeatable_read")  # keeps vacuum from removing anything
    await held.start()
    await reader.fetchval("SELECT txid_current()")
    delays = [5.0, 300.0, 3000.0]
    await broker.enqueue_batch("jobs", [Outgoing(b"x", delay=d) for d in delays for _ in range(50)])
    assert len(await used_slots(moved, "delayed", DELAYED_SLOTS)) == len(delays)
    ring = rings.Rings(shard_of(broker))
    for _ in range(180):
        await skip(moved, MINUTE)
        await broker.node.tick()
        await ring.turn()
    await held.rollback()
    await reader.close()
    assert await used_slots(moved, "delayed", DELAYED_SLOTS) == []
    assert len(await broker.pop("jobs", 1000)) == 50 * len(delays)


async def test_message_beyond_all_slots_is_moved_and_fires_when_due(moved: Database) -> None:
    broker = await still(moved)
    await broker.create_topic("jobs")
    await broker.enqueue("jobs", b"x", delay=400 * 86400.0)
    ring = rings.Rings(shard_of(broker))
    for _ in range(39):
        await skip(moved, 10 * DAY)
        await broker.node.tick()
        await ring.turn()
        assert (await broker.stats("jobs")).delayed == 1
    await skip(moved, 10 * DAY)
    await broker.node.tick()
    await ring.turn()
    assert [m.payload for m in await broker.pop("jobs")] == [b"x"]


async def test_retry_that_outlives_its_message_expires_at_its_time(moved: Database) -> None:
    broker = await still(moved)
    await broker.create_topic("jobs")
    sent = await broker.enqueue("jobs", b"x", ttl=600.0)
    (message,) = await broker.pop("jobs")
    await message.nack(backoff=3600.0)
    await skip(moved, 599_000)
    await broker.node.tick()
    assert (await broker.get("jobs", sent.id)).state == "delayed"
    await skip(moved, 1000)
    await broker.node.tick()
    assert (await broker.get("jobs", sent.id)).state == "expired"


async def test_message_that_is_committed_after_its_time_still_fires(database: Database) -> None:  # noqa: F811
    """Its transaction took so long that a check had passed its time before it committed."""
    broker = await still(database)
    await broker.create_topic("jobs")
    await broker.node.tick()  # skips everything up to now from here on
    await store_late(database, (await broker.get_topic("jobs")).incarnation)
    broker.node.timekeepers[0].expect(1)  # like the node that stored it
    await broker.node.tick()
    assert [m.payload for m in await broker.pop("jobs")] == [b"late"]


async def test_message_of_a_node_that_crashed_fires_within_the_poll_interval(database: Database) -> None:  # noqa: F811
    broker = await database.open(poll_interval=0.05)
    await broker.create_topic("jobs")
    await store_late(database, (await broker.get_topic("jobs")).incarnation)
    assert [m.payload for m in await broker.pop("jobs", wait=30)] == [b"late"]


async def test_two_nodes_fire_each_message_once(database: Database) -> None:  # noqa: F811
    nodes = [await database.open(), await database.open()]
    await nodes[0].create_topic("jobs")
    for node in nodes:
        await node.enqueue_batch("jobs", [Outgoing(b"%d" % i, delay=0.01 * (i % 20)) for i in range(500)])
    got: list[bytes] = []
    async with asyncio.timeout(60):
        while len(got) < 1000:
            messages = await nodes[len(got) % 2].pop("jobs", 100, wait=1.0)
            got += [m.payload for m in messages]
            await nodes[0].ack(messages)
    assert sorted(got) == sorted(b"%d" % i for i in range(500) for _ in nodes)
    assert (await nodes[0].stats("jobs")).delayed == 0


async def test_upgrade_keeps_delayed_messages(empty_database: Database) -> None:  # noqa: F811
    await migrate(empty_database.admin, empty_database.schema, 0, 1, all_migrations()[:1])
    topic = await empty_database.admin.fetchval(
        "INSERT INTO topics (namespace, name, config, id_suffix) VALUES ('default', 'jobs', $1, 1) RETURNING id",
        heapline.sql.shard.write_config(heapline.TopicConfig()),
    )
    await empty_database.admin.execute(
        "INSERT INTO delayed SELECT $1, n, 0, 9, 5, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'x', "
        "clock_ms() + n::bigint * n * 1000 FROM generate_series(1, 3000) AS n",
        topic,
    )
    broker = await empty_database.open()
    assert (await broker.stats("jobs")).delayed == 3000
    assert (await broker.get("jobs", 2999)).state == "delayed"
