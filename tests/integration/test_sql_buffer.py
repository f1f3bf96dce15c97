"""Enqueues that are acknowledged before Postgres has them, by a write-ahead log or by Redis: the same promises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from tests.integration.sql_rig import crash, fresh_topic, no_flush, open_node, rig_schema, stored, take_all
from tests.postgres import shared_url
from tests.valkey import fresh_redis

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql.flusher import Flushed  # noqa: E402 - needs asyncpg
from heapline.sql.redis_buffer import Turn  # noqa: E402 - needs asyncpg


@pytest.fixture(params=["wal", "redis"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "wal":
        return {"wal": str(tmp_path / "wal")}
    return {"redis": fresh_redis(), "durability": "redis"}


@pytest.fixture
async def admin() -> AsyncIterator[Any]:
    connection = await asyncpg.connect(shared_url(), server_settings={"search_path": rig_schema()})
    yield connection
    await connection.close()


@pytest.fixture
async def topic() -> str:
    return fresh_topic()


@contextlib.asynccontextmanager
async def node(config: dict[str, Any]) -> AsyncIterator[Any]:
    broker = await open_node(**config)
    try:
        yield broker
    finally:
        await broker.close()


def flusher_of(broker: Any) -> Any:
    return broker.node.buffers[0].flusher


async def test_enqueue_is_acknowledged_before_postgres_has_it_and_survives_a_crash(
    config: dict[str, Any], admin: Any, topic: str
) -> None:
    first = await open_node(**config)
    await first.create_topic(topic, k=10)
    async with no_flush(first, admin):
        results = await first.enqueue_batch(topic, [Outgoing(b"%d" % n, priority=n) for n in range(5)])
        one = await first.enqueue(topic, b"last", priority=9, headers={"a": "b"}, key="customer", ttl=60)
        assert await stored(admin, topic) == 0
        await crash(first)
    async with node(config) as second:
        while await stored(admin, topic) < 6:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        messages = await second.pop(topic, 10)
        assert [m.id for m in messages] == [*(r.id for r in results), one.id]
        assert (messages[-1].headers, messages[-1].key) == ({"a": "b"}, "customer")
        await second.ack(messages)
        assert await take_all(second, topic) == []


async def test_keys_sequences_strict_order_and_limits_bypass_the_buffer(
    config: dict[str, Any], admin: Any, topic: str
) -> None:
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        await hl.create_topic(topic + "-strict")
        await hl.create_topic(topic + "-limited", k=10, max_backlog=1)
        async with no_flush(hl, admin):
            first = await hl.enqueue(topic, b"x", idempotency_key="once")
            again = await hl.enqueue(topic, b"x", idempotency_key="once")
            assert (again.id, again.duplicate) == (first.id, True)
            assert await stored(admin, topic) == 1
            await hl.enqueue(topic + "-strict", b"x")
            assert await stored(admin, topic + "-strict") == 1
            await hl.enqueue(topic + "-limited", b"x")
            with pytest.raises(heapline.ResourceExhausted):
                await hl.enqueue(topic + "-limited", b"x")


async def test_calls_see_what_this_node_has_acknowledged(config: dict[str, Any], topic: str) -> None:
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        (sent,) = await hl.enqueue_batch(topic, [Outgoing(b"x")])
        assert (await hl.get(topic, sent.id)).payload == b"x"
        await hl.enqueue(topic, b"y")
        assert len(await hl.peek(topic)) == 2
        await hl.enqueue(topic, b"z")
        assert (await hl.stats(topic)).ready == 3
        last = await hl.enqueue(topic, b"cancelled")
        await hl.cancel(topic, last.id)
        await hl.enqueue(topic, b"purged")
        assert await hl.purge(topic) == 4
        await hl.enqueue(topic, b"kept")
        await hl.update_topic(topic, k=1)
        assert [m.payload for m in await hl.pop(topic, 10)] == [b"kept"]


async def test_settings_read_before_a_change_are_not_kept(config: dict[str, Any], admin: Any, topic: str) -> None:
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        shard, was_read, changed = hl.node.shards[0], asyncio.Event(), asyncio.Event()
        read_topic = shard.read_topic

        async def read_slowly(name: Any) -> Any:
            turn = await read_topic(name)
            was_read.set()
            await changed.wait()
            return turn

        shard.read_topic = read_slowly
        early = asyncio.ensure_future(hl.enqueue(topic, b"early"))
        await was_read.wait()
        await hl.update_topic(topic, k=1)
        shard.read_topic = read_topic
        changed.set()
        await early
        async with no_flush(hl, admin):
            await hl.enqueue(topic, b"directly")
            found = await admin.fetch("SELECT FROM items WHERE topic = $1 AND payload = 'directly'", topic)
            assert len(found) == 1


async def test_stop_waits_until_enqueues_are_in_postgres(config: dict[str, Any], admin: Any, topic: str) -> None:
    hl = await open_node(**config, drain_seconds=None)
    await hl.create_topic(topic, k=10)
    async with no_flush(hl, admin):
        await hl.enqueue(topic, b"x")
        closing = asyncio.create_task(hl.close())
        done, _ = await asyncio.wait([closing], timeout=0.3)
        assert not done
    await closing
    assert await stored(admin, topic) == 1


async def test_stop_ends_after_drain_seconds_and_the_next_node_continues(
    config: dict[str, Any], admin: Any, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    hl = await open_node(**config, drain_seconds=0.1)
    await hl.create_topic(topic, k=10)
    async with no_flush(hl, admin):
        await hl.enqueue(topic, b"x")
        await hl.close()
        assert "messages not flushed before the end" in caplog.text
        assert await stored(admin, topic) == 0
    async with node(config) as successor:
        while not await stored(admin, topic):  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        assert await take_all(successor, topic) == [b"x"]


async def test_commit_whose_answer_is_lost_is_not_repeated(config: dict[str, Any], topic: str) -> None:
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        shard, lost = hl.node.shards[0], 0
        transact = shard.transact

        async def lose_answer(begin: str, work: Any) -> Any:
            nonlocal lost
            result = await transact(begin, work)
            has_stored = isinstance(result, Flushed) or (isinstance(result, Turn) and result.new)
            if has_stored and lost < 3:
                lost += 1
                raise heapline.UnavailableError("the connection broke after the commit")
            return result

        shard.transact = lose_answer
        for n in range(5):
            await hl.enqueue(topic, b"%d" % n)
            with contextlib.suppress(heapline.UnavailableError):
                await flusher_of(hl).flush_all()
        assert lost == 3
        assert sorted(await take_all(hl, topic)) == [b"0", b"1", b"2", b"3", b"4"]


async def test_messages_of_a_deleted_topic_are_dropped_or_go_to_its_successor(
    config: dict[str, Any], admin: Any, topic: str
) -> None:
    async with node(config) as hl, node({}) as other:
        for name in (topic, topic + "-2"):
            await hl.create_topic(name, k=10)
        async with no_flush(hl, admin):
            await hl.enqueue_batch(topic, [Outgoing(b"low", priority=1), Outgoing(b"high", priority=2)])
            await hl.enqueue(topic + "-2", b"dropped")
            for name in (topic, topic + "-2"):
                await other.delete_topic(name)
            await other.create_topic(topic, k=10, mode="max")
        assert [m.payload for m in await hl.pop(topic, 10)] == [b"high", b"low"]
        await hl.create_topic(topic + "-2", k=10)
        assert await take_all(hl, topic + "-2") == []


async def test_messages_go_to_the_topic_of_their_name(config: dict[str, Any], admin: Any, topic: str) -> None:
    """After a failover to a state without their topic, another one may have been created with its incarnation."""
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            await hl.enqueue(topic, b"x")
            await admin.execute("UPDATE topics SET name = $1 WHERE name = $2", topic + "-other", topic)
            await hl.create_topic(topic, k=10)
        assert await take_all(hl, topic) == [b"x"]
        assert await take_all(hl, topic + "-other") == []


async def test_delayed_message_whose_id_is_taken_gets_another_in_a_topic_that_was_created_again(
    config: dict[str, Any], admin: Any, topic: str
) -> None:
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            sent = await hl.enqueue(topic, b"in the buffer", delay=3600)
            await admin.execute("UPDATE topics SET name = $1 WHERE name = $2", topic + "-other", topic)
            await hl.create_topic(topic, k=10)
            due = await admin.fetchval("SELECT clock_ms() + 3600000")
            await admin.execute(
                "INSERT INTO delayed (slot, topic, id, key, due, priority, attempts, payload, wake, at) "
                "SELECT 0, id, $1, 0, $2, 0, 0, 'in the database', $2, $2 FROM topics WHERE name = $3",
                sent.id, due, topic,
            )  # fmt: skip
        await hl.stats(topic)  # waits for the flush
        rows = await admin.fetch("SELECT id, payload FROM items WHERE topic = $1", topic)
        assert sorted(bytes(row["payload"]) for row in rows) == [b"in the buffer", b"in the database"]
        assert len({row["id"] for row in rows}) == 2


async def test_message_whose_id_is_taken_gets_another(config: dict[str, Any], admin: Any, topic: str) -> None:
    async with node(config) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            first = await hl.enqueue(topic, b"second with its id")
            await hl.enqueue(topic, b"another")
            slot = await admin.fetchval("SELECT last_value % 16 FROM ready_turn")
            await admin.execute(
                f"INSERT INTO ready_{slot} (slot, topic, id, key, due, priority, attempts, payload) "
                "SELECT $1, id, $2, 0, 0, 0, 0, 'first with its id' FROM topics WHERE name = $3",
                slot, first.id, topic,
            )  # fmt: skip
        messages = await hl.pop(topic, 10)
        assert sorted(m.payload for m in messages) == [b"another", b"first with its id", b"second with its id"]
        assert len({m.id for m in messages}) == 3
