"""Enqueues that Redis acknowledges: stored in Postgres once, by any node; refused, or slow, while Redis is down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.contract.errors import JournalCorrupt, UnknownFormat
from tests.integration.sql_rig import crash, fresh_topic, no_flush, open_node, rig_schema, stored, take_all
from tests.postgres import fresh_schema, shared_url
from tests.unit.engine.rig import until
from tests.valkey import Valkey

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import redis_buffer  # noqa: E402 - needs asyncpg
from heapline.sql.redis import buffer_key  # noqa: E402 - needs asyncpg
from heapline.sql.redis_buffer import BufferDown, RedisFlusher, decode_unit, encode_unit  # noqa: E402
from heapline.sql.wal import Batch  # noqa: E402 - needs asyncpg

KEY = buffer_key(0)


@pytest.fixture
async def admin() -> AsyncIterator[Any]:
    connection = await asyncpg.connect(shared_url(), server_settings={"search_path": rig_schema()})
    yield connection
    await connection.close()


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    server = Valkey("--appendonly", "yes", "--appendfsync", "always").start()
    yield server
    server.close()


@pytest.fixture
async def topic() -> str:
    return fresh_topic()


@contextlib.asynccontextmanager
async def node(valkey: Valkey, **config: Any) -> AsyncIterator[Any]:
    broker = await open_node(**{"redis": valkey.url(), "durability": "redis", **config})
    try:
        yield broker
    finally:
        await broker.close()


def flusher_of(broker: Any) -> RedisFlusher:
    found: RedisFlusher = broker.node.redis_flushers[0]
    return found


async def length(broker: Any) -> int:
    found: int = await broker.node.redis.run(lambda client: client.llen(KEY))
    return found


async def test_node_that_dies_leaves_its_enqueues_to_another(valkey: Valkey, admin: Any, topic: str) -> None:
    first = await open_node(redis=valkey.url(), durability="redis")
    await first.create_topic(topic, k=10)
    async with no_flush(first, admin):
        results = await first.enqueue_batch(topic, [Outgoing(b"%d" % n, priority=n) for n in range(5)])
        one = await first.enqueue(topic, b"last", priority=9, headers={"a": "b"}, key="customer", ttl=60)
        late = await first.enqueue(topic, b"late", delay=3.0, priority=10)
        assert await stored(admin, topic) == 0
        await crash(first)
    async with node(valkey, durability="postgres", poll_interval=0.05) as second:
        while await stored(admin, topic) < 7:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        messages = await second.pop(topic, 6)
        assert [m.id for m in messages] == [*(r.id for r in results), one.id]
        assert (messages[-1].headers, messages[-1].key) == ({"a": "b"}, "customer")
        await second.ack(messages)
        assert [m.id for m in await second.pop(topic, 10, wait=20.0)] == [late.id]


async def test_units_that_repeat_ids_are_stored_under_others(
    valkey: Valkey, admin: Any, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes had one number, or Redis has a unit twice: neither stops the flushes that follow."""
    async with node(valkey, poll_interval=0.05) as hl:
        info = await hl.create_topic(topic, k=10)
        leased = await hl.enqueue(topic, b"leased")
        await flusher_of(hl).flush_all()
        assert len(await hl.pop(topic, visibility=3600)) == 1
        now = await admin.fetchval("SELECT clock_ms()")

        def unit(number: int, *tags: tuple[int, bytes, int]) -> bytes:
            rows: list[Any] = [(id, 0, due, 0, *[None] * 7, tag) for id, tag, due in tags]
            return encode_unit(number, [Batch(1, info.incarnation, "default", topic, rows)])

        later = now + 3_600_000
        first = unit(1, (leased.id, b"of a leased one", now), (7, b"a", now), (9, b"late", later))
        other = unit(2, (7, b"b", now), (8, b"c", now), (9, b"later", later))
        await hl.node.redis.run(lambda client: client.rpush(KEY, first, first, other))
        await until(lambda: flusher_of(hl).depth == 0)
        while await length(hl):  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        await hl.node.redis.run(lambda client: client.rpush(KEY, unit(3, (9, b"latest", later))))
        while await stored(admin, topic) < 8:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        assert "message id conflict" in caplog.text
        rows = await admin.fetch("SELECT id, payload FROM items WHERE topic = $1", topic)
        assert len({row["id"] for row in rows}) == len(rows) == 8
        payloads = {bytes(row["payload"]) for row in rows}
        assert payloads == {b"leased", b"of a leased one", b"a", b"b", b"c", b"late", b"later", b"latest"}


async def test_enqueues_survive_kill_9_of_redis(valkey: Valkey, admin: Any, topic: str) -> None:
    async with node(valkey) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            for n in range(20):
                await hl.enqueue(topic, b"%d" % n)
            valkey.kill()
            valkey.start()
        await until(lambda: hl.node.redis.is_up)
        assert sorted(int(p) for p in await take_all(hl, topic)) == list(range(20))


async def test_node_continues_after_redis_lost_what_it_had(admin: Any, topic: str) -> None:
    """It restarts without a file: what was not flushed is lost, as `stats` says, and no call waits for that."""
    forgetful = Valkey().start()
    try:
        async with node(forgetful) as hl:
            await hl.create_topic(topic, k=10)
            assert "lost when Redis restarts" in (await hl.stats(topic)).durability
            async with no_flush(hl, admin):
                sent = await hl.enqueue(topic, b"lost")
                forgetful.kill()
                forgetful.start()
            await until(lambda: hl.node.redis.is_up)
            with pytest.raises(heapline.MessageNotFound):
                await hl.get(topic, sent.id)
            await hl.enqueue(topic, b"kept")
            assert await take_all(hl, topic) == [b"kept"]
    finally:
        forgetful.close()


@pytest.mark.parametrize("crashes", [False, True])
async def test_unit_whose_removal_failed_is_stored_once(
    valkey: Valkey, admin: Any, topic: str, monkeypatch: pytest.MonkeyPatch, crashes: bool
) -> None:
    async def fail(*args: Any) -> None:
        """Leave the units in the list, as a node that dies after its commit does."""

    first = await open_node(redis=valkey.url(), durability="redis")
    await first.create_topic(topic, k=10)
    with monkeypatch.context() as patch:
        patch.setattr(flusher_of(first), "_remove", fail)
        await first.enqueue_batch(topic, [Outgoing(b"%d" % n) for n in range(5)])
        await flusher_of(first).flush(topic)
        assert (await stored(admin, topic), await length(first)) == (5, 1)
        await (crash(first) if crashes else first.close())
    async with node(valkey, poll_interval=0.05) as second:
        while await length(second):  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        assert sorted(await take_all(second, topic)) == [b"0", b"1", b"2", b"3", b"4"]


async def test_ids_of_units_are_forgotten_once_redis_cannot_have_them(
    valkey: Valkey, admin: Any, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_buffer, "UNIT_KEEP_MS", -1)
    monkeypatch.setattr(redis_buffer, "FORGET_MS", 0)
    async with node(valkey, poll_interval=0.02) as hl:
        await admin.execute("DELETE FROM flushed_units")
        await hl.create_topic(topic, k=10)
        flusher = flusher_of(hl)
        units: list[Any] = []
        remove = flusher._remove

        async def keep(found: Any) -> None:
            units.extend(found)

        flusher._remove = keep  # type: ignore[method-assign]
        await hl.enqueue(topic, b"x")
        await flusher.flush(topic)
        turns = flusher._reads
        await until(lambda: flusher._reads > turns + 3)
        assert await admin.fetchval("SELECT count(*) FROM flushed_units") == 1, "Redis still has the unit"
        flusher._remove = remove  # type: ignore[method-assign]
        while await admin.fetchval("SELECT count(*) FROM flushed_units"):  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        assert await take_all(hl, topic) == [b"x"]


async def test_enqueues_are_refused_while_redis_is_down(valkey: Valkey, admin: Any, topic: str) -> None:
    async with node(valkey) as hl:
        await hl.create_topic(topic, k=10)
        await hl.create_topic(topic + "-strict")
        await hl.enqueue(topic, b"before")
        await flusher_of(hl).flush(topic)
        valkey.kill()
        with pytest.raises(
            heapline.UnavailableError, match=r"outcome is unknown|redis is down"
        ):  # the flusher may notice
            await hl.enqueue(topic, b"unknown")
        with pytest.raises(heapline.UnavailableError, match="redis is down"):
            await hl.enqueue(topic, b"refused")
        await hl.enqueue(topic + "-strict", b"direct")
        assert (await hl.stats(topic)).durability == "redis is down; enqueues are refused"
        assert [m.payload for m in await hl.pop(topic, 10)] == [b"before"]
        valkey.start()
        await until(lambda: hl.node.redis.is_up)
        await hl.enqueue(topic, b"after")
        assert [m.payload for m in await hl.pop(topic, 10)] == [b"after"]


async def test_slow_mode_enqueues_into_postgres_while_redis_is_down(valkey: Valkey, admin: Any, topic: str) -> None:
    async with node(valkey, slow_mode=True) as hl:
        await hl.create_topic(topic, k=10)
        valkey.kill()
        await until(lambda: not hl.node.redis.is_up)
        await hl.enqueue(topic, b"slow")
        assert await stored(admin, topic) == 1
        rows = {row.name: row.value for row in await hl.metric_rows()}
        assert (rows["slow_mode"], rows["redis_up"]) == (1, 0)
        assert (await hl.stats(topic)).durability == "redis is down; enqueues go to Postgres"
        assert [m.payload for m in await hl.pop(topic, 10)] == [b"slow"]
        valkey.start()
        await until(lambda: hl.node.redis.is_up)
        async with no_flush(hl, admin):
            await hl.enqueue(topic, b"fast")
            assert await length(hl) == 1
            rows = {row.name: row.value for row in await hl.metric_rows()}
            assert rows["slow_mode"] == 0


async def test_calls_that_need_a_message_fail_while_redis_has_it_and_is_down(
    valkey: Valkey, admin: Any, topic: str
) -> None:
    async with node(valkey) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            sent = await hl.enqueue(topic, b"x")
            valkey.kill()
        with pytest.raises(BufferDown):
            await hl.cancel(topic, sent.id)
        assert await hl.pop(topic, 10) == []
        valkey.start()
        await until(lambda: hl.node.redis.is_up)
        await hl.cancel(topic, sent.id)
        assert await take_all(hl, topic) == []


async def test_call_that_waits_for_a_flush_fails_when_redis_goes_down(
    valkey: Valkey, admin: Any, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(valkey) as hl:
        await hl.create_topic(topic, k=10)
        flusher, began, may_go_on = flusher_of(hl), asyncio.Event(), asyncio.Event()
        flush_round = flusher._round

        async def slow_round() -> bool:
            began.set()
            await may_go_on.wait()
            return False  # it flushed some, and meanwhile another command has found Redis down

        monkeypatch.setattr(flusher, "_round", slow_round)
        await began.wait()
        await hl.enqueue(topic, b"x")
        peeking = asyncio.create_task(hl.peek(topic))
        await until(lambda: flusher._waiting)
        hl.node.redis._break(OSError("down"))
        may_go_on.set()
        with pytest.raises(BufferDown):
            await peeking
        monkeypatch.setattr(flusher, "_round", flush_round)
        await until(lambda: hl.node.redis.is_up)
        assert await take_all(hl, topic) == [b"x"]


async def test_flush_waits_for_messages_acknowledged_after_many_units(
    valkey: Valkey, admin: Any, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_buffer, "SLICE_UNITS", 3)
    async with node(valkey) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            for n in range(20):
                await hl.enqueue(topic, b"%d" % n)
        assert (await hl.stats(topic)).ready == 20
        assert sorted(int(p) for p in await take_all(hl, topic)) == list(range(20))


async def test_full_redis_refuses_enqueues_until_it_is_flushed(admin: Any, topic: str) -> None:
    valkey = Valkey("--maxmemory", "8mb", "--maxmemory-policy", "noeviction").start()
    try:
        async with node(valkey) as hl:
            await hl.create_topic(topic, k=10)
            sent: list[Any] = []

            async def fill() -> None:
                while len(sent) < 1000:
                    sent.append(await hl.enqueue(topic, b" " * 100_000))

            async with no_flush(hl, admin):
                with pytest.raises(heapline.UnavailableError, match="redis is full; nothing was stored"):
                    await fill()
                assert hl.node.redis.is_up
            await flusher_of(hl).flush(topic)
            assert await length(hl) == 0
            await hl.enqueue(topic, b"after")
            assert len(await take_all(hl, topic)) == len(sent) + 1
    finally:
        valkey.close()


async def test_stats_report_the_durability_of_redis(topic: str) -> None:
    valkey = Valkey().start()  # without an append-only file
    try:
        async with node(valkey) as hl:
            await hl.create_topic(topic, k=10)
            await hl.create_topic(topic + "-strict")
            assert "its append-only file is off" in (await hl.stats(topic)).durability
            assert "Redis" not in (await hl.stats(topic + "-strict")).durability
            assert (await hl.describe()).settings["durability"] == "redis"
    finally:
        valkey.close()


async def test_nodes_flush_one_list_together(valkey: Valkey, topic: str) -> None:
    async with node(valkey) as first, node(valkey) as second:
        await first.create_topic(topic, k=100)

        async def send(hl: Any, start: int) -> None:
            for n in range(start, start + 100):
                await hl.enqueue(topic, b"%d" % n)

        await asyncio.gather(*(send(hl, i * 100) for i, hl in enumerate((first, second) * 3)))
        await first.stats(topic)
        assert sorted(int(p) for p in await take_all(second, topic)) == list(range(600))


def test_unit_of_another_version_or_damaged_is_refused() -> None:
    batch = Batch(1, 7, "default", "jobs", [])
    assert decode_unit(encode_unit(5, [batch]), KEY) == (5, [batch])
    with pytest.raises(UnknownFormat):
        decode_unit(encode_unit(5, [Batch(2, 7, "default", "jobs", [])]), KEY)
    with pytest.raises(JournalCorrupt):
        decode_unit(b"short", KEY)


@pytest.mark.parametrize("slow_mode", [False, True])
async def test_nothing_is_acknowledged_behind_a_unit_that_cannot_be_read(
    valkey: Valkey, admin: Any, topic: str, slow_mode: bool
) -> None:
    """It would not be flushed."""
    async with node(valkey, slow_mode=slow_mode) as hl:
        await hl.create_topic(topic, k=10)
        await hl.node.redis.run(lambda client: client.rpush(KEY, b"not a unit of ours"))
        await until(lambda: flusher_of(hl)._is_refused)
        if slow_mode:
            await hl.enqueue(topic, b"to the database")
            assert await stored(admin, topic) == 1
        else:
            with pytest.raises(heapline.UnavailableError, match="a unit that cannot be read"):
                await hl.enqueue(topic, b"refused")
        await hl.node.redis.run(lambda client: client.delete(KEY))
        await until(lambda: not flusher_of(hl)._is_refused)
        await hl.enqueue(topic, b"x")
        assert await take_all(hl, topic) == [b"to the database", b"x"][not slow_mode :]


async def test_redis_of_another_deployment_is_refused_for_enqueues(valkey: Valkey) -> None:
    settings: dict[str, Any] = {"redis": valkey.url(), "durability": "redis"}
    async with node(valkey), heapline.sql.open([shared_url()], schema=fresh_schema(), **settings) as other:
        await other.create_topic("jobs", k=10)
        with pytest.raises(heapline.UnavailableError, match="redis is down"):
            await other.enqueue("jobs", b"x")
