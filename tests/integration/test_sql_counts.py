"""Counts that are stored, not computed: exact after every call, while slots are folded, and for many nodes."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

import heapline
from heapline import Outgoing

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import rings, stats  # noqa: E402 - needs asyncpg
from heapline.sql.layout import COUNTS_SLOTS  # noqa: E402 - needs asyncpg
from heapline.sql.migrations import all_migrations, migrate  # noqa: E402 - needs asyncpg
from heapline.sql.statements import statement  # noqa: E402 - needs asyncpg
from tests.integration.test_sql_nodes import Database, database, empty_database, shard_of, used_slots  # noqa: E402, F401


async def miscounted(database: Database) -> list[Any]:  # noqa: F811
    return [tuple(row) for row in await database.admin.fetch("SELECT * FROM miscounted")]


class Work:
    """Random calls on one topic."""

    def __init__(self, broker: Any, seed: int) -> None:
        self._broker, self._random = broker, random.Random(seed)
        self._ids: list[int] = []

    async def call(self) -> str:
        calls = [getattr(self, name) for name in dir(Work) if name.startswith("do_")]
        chosen = self._random.choice(calls)
        try:
            await chosen()
        except (heapline.MessageNotFound, heapline.MessageLeased, heapline.ResourceExhausted):
            return "refused"
        return str(chosen.__name__)

    async def do_enqueue(self) -> None:
        delays = [None, None, 0.02, 3600.0]
        batch = [
            Outgoing(b"x", priority=self._random.randrange(9), delay=self._random.choice(delays)) for _ in range(7)
        ]
        self._ids += [result.id for result in await self._broker.enqueue_batch("jobs", batch)]

    async def do_expiring(self) -> None:
        await self._broker.enqueue("jobs", b"x", ttl=0.001)

    async def do_keyed(self) -> None:
        await self._broker.enqueue("jobs", b"x", idempotency_key=str(self._random.randrange(5)))

    async def do_ack(self) -> None:
        await self._broker.ack(await self._broker.pop("jobs", 3))

    async def do_nack(self) -> None:
        await self._broker.nack(await self._broker.pop("jobs", 3), backoff=self._random.choice([0, 0.01, 3600]))

    async def do_release(self) -> None:
        await self._broker.release(await self._broker.pop("jobs", 2))

    async def do_bury(self) -> None:
        await self._broker.bury(await self._broker.pop("jobs", 2), reason="bad")

    async def do_abandon(self) -> None:
        await self._broker.pop("jobs", 2, visibility=0.001)

    async def do_cancel(self) -> None:
        if self._ids:
            await self._broker.cancel("jobs", self._random.choice(self._ids))

    async def do_reschedule(self) -> None:
        if self._ids:
            changes = self._random.choice([{"delay": 0}, {"delay": 3600.0}, {"priority": 3}])
            await self._broker.reschedule("jobs", self._random.choice(self._ids), **changes)

    async def do_replay(self) -> None:
        await self._broker.dlq_replay("jobs", where=heapline.DlqFilter(), rate=self._random.choice([None, 1.0]))

    async def do_delete(self) -> None:
        if self._random.random() < 0.3:
            await self._broker.dlq_delete("jobs", where=heapline.DlqFilter())

    async def do_purge(self) -> None:
        if self._random.random() < 0.1:
            await self._broker.purge("jobs")

    async def do_tick(self) -> None:
        await self._broker.node.tick()


@pytest.mark.parametrize("seed", range(3))
async def test_counts_are_right_after_every_call(database: Database, seed: int) -> None:  # noqa: F811
    broker = await database.open()
    await broker.node.timekeepers[0].close()
    await broker.create_topic("jobs", max_retries_default=1)
    work, names = Work(broker, seed), set()
    ring = rings.Rings(shard_of(broker), slot_bytes=8192, counts_bytes=0)
    for number in range(150):
        called = await work.call()
        assert await miscounted(database) == [], called
        if number % 10 == 0:
            await ring.turn()
            assert await miscounted(database) == [], "after a turn of the rings"
        names.add(called)
    assert len(names) > 10, "too few kinds of calls to prove anything"


async def test_counts_are_right_after_concurrent_work_of_two_nodes(database: Database) -> None:  # noqa: F811
    nodes = [await database.open(), await database.open()]
    await nodes[0].create_topic("jobs", max_inflight=50, max_backlog=500)
    ring = rings.Rings(shard_of(nodes[0]), slot_bytes=8192, counts_bytes=0)
    is_over = False

    async def turn() -> None:
        while not is_over:
            await ring.turn()
            assert await miscounted(database) == []
            assert (await nodes[1].stats("jobs")).leased <= 50

    async def run(node: Any, seed: int) -> None:
        work = Work(node, seed)
        for _ in range(80):
            await work.call()

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        turning = tasks.create_task(turn())
        await asyncio.gather(*(run(node, seed) for seed, node in enumerate(nodes * 3)))
        is_over = True
        await turning
    assert await miscounted(database) == []


async def test_full_slot_of_counts_is_folded_to_one_row_per_topic(database: Database) -> None:  # noqa: F811
    broker = await database.open()
    await broker.node.timekeepers[0].close()
    for topic in ("jobs", "mail", "gone"):
        await broker.create_topic(topic)
        for _ in range(100):
            await broker.enqueue(topic, b"x")
    await broker.delete_topic("gone")
    await rings.Rings(shard_of(broker), counts_bytes=0).turn()
    assert len(await used_slots(database, "counts", COUNTS_SLOTS)) == 1
    assert await database.admin.fetchval("SELECT count(*) FROM counts") == 2
    assert [(await broker.stats(topic)).ready for topic in ("jobs", "mail")] == [100, 100]


async def dead_letters(broker: Any) -> list[bytes]:
    return [info.payload for info in await broker.dlq_list("jobs")]


async def test_dead_letters_past_a_limit_are_deleted_once_by_two_nodes(database: Database) -> None:  # noqa: F811
    nodes = [await database.open(), await database.open()]
    for node in nodes:
        await node.node.timekeepers[0].close()
    broker = nodes[0]
    await broker.create_topic("jobs", retention=3600)
    for number in range(6):
        await broker.enqueue("jobs", b"%d" % number)
        (message,) = await broker.pop("jobs")
        await message.bury("boom")

    async def expire() -> int:
        await asyncio.gather(*(node.node.timekeepers[0].expire_dead_letters() for node in nodes))
        assert await miscounted(database) == []
        return sum([(await node.stats("jobs")).dead_expired_total for node in nodes])

    assert await expire() == 0
    (first, *_) = await broker.dlq_list("jobs")
    await database.admin.execute("UPDATE dead SET at = at - 2592000000 WHERE id = $1", first.id)
    assert (await expire(), await dead_letters(broker)) == (1, [b"1", b"2", b"3", b"4", b"5"])
    assert (await broker.get("jobs", first.id)).state == "deleted"
    await broker.update_topic("jobs", dlq_max_letters=2)
    assert (await expire(), await dead_letters(broker)) == (4, [b"4", b"5"])
    assert (await broker.stats("jobs")).dead == 2
    await broker.update_topic("jobs", dlq_retention=0)
    await database.admin.execute("UPDATE dead SET at = 0")
    assert (await expire(), await dead_letters(broker)) == (4, [b"4", b"5"])


async def test_limits_and_stats_read_no_messages(database: Database) -> None:  # noqa: F811
    broker = await database.open()
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 5000)
    topic = (await broker.get_topic("jobs")).incarnation
    for name in ("count_backlog", "count_leases", "topic_counts"):
        rows = await database.admin.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement(name)}", topic)
        plan = json.dumps(json.loads(rows[0][0]))
        assert "counts_0" in plan
        assert "ready_" not in plan
        assert "lease_" not in plan


async def test_depths_of_a_large_topic_are_estimated_with_the_right_sum(
    database: Database,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "SAMPLE_ROWS", 50)
    monkeypatch.setattr(stats, "SAMPLE_BYTES", 1 << 20)
    broker = await database.open()
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x", priority=i % 2 * 1000) for i in range(2000)])
    await broker.enqueue_batch("jobs", [Outgoing(b"x", delay=1800.0 + 5 * 86400 * (i % 2)) for i in range(200)])
    found = await broker.stats("jobs")
    assert (found.ready, sum(bucket.count for bucket in found.depth_by_priority)) == (2000, 2000)
    assert [bucket.count > 500 for bucket in found.depth_by_priority] == [True, True]
    assert sum(bucket.count for bucket in found.due_histogram) == found.delayed == 200


async def test_wrong_counts_are_detected_and_corrected(database: Database) -> None:  # noqa: F811
    broker = await database.open()
    await broker.create_topic("jobs")
    topic = (await broker.get_topic("jobs")).incarnation
    await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 5)
    await database.admin.execute("INSERT INTO counts (slot, topic, ready, dead) VALUES (2, $1, 7, 1)", topic)
    assert await miscounted(database) == [(topic, -7, 0, 0, -1)]
    await database.admin.execute("INSERT INTO counts SELECT 0, * FROM miscounted")
    assert await miscounted(database) == []
    assert (await broker.stats("jobs")).ready == 5


async def test_upgrade_counts_what_is_stored(empty_database: Database) -> None:  # noqa: F811
    await migrate(empty_database.admin, empty_database.schema, 0, 1, all_migrations()[:2])
    topic = await empty_database.admin.fetchval(
        "INSERT INTO topics (namespace, name, config, id_suffix) VALUES ('default', 'jobs', $1, 1) RETURNING id",
        heapline.sql.shard.write_config(heapline.TopicConfig()),
    )
    await empty_database.admin.execute(
        "INSERT INTO ready (slot, topic, id, key, due, priority, attempts, payload) "
        "SELECT n % 3, $1, n, 0, 9, 5, 0, 'x' FROM generate_series(1, 100) AS n",
        topic,
    )
    broker = await empty_database.open()
    assert (await broker.stats("jobs")).ready == 100
    assert await miscounted(empty_database) == []
    assert len(await broker.pop("jobs", 1000)) == 100, "from all slots: it is not known yet which ones have rows"
