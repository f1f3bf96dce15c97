"""Several nodes of the Postgres broker on one shard: node ids, wakeups, and rings that turn while they work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline import Outgoing
from heapline.core.ids import partition_of
from heapline.sql.layout import (
    COLD_SLOTS,
    ENDED_MS,
    ENDED_SLOTS,
    LEASE_SLOTS,
    LONG_LEASES,
    POP_SLOTS,
    READY_SLOTS,
    START,
    Turns,
)
from tests.postgres import drop_schema, fresh_schema, shared_url

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import node_id, rings, shard  # noqa: E402 - needs asyncpg
from heapline.sql.migrations import all_migrations, migrate  # noqa: E402 - needs asyncpg
from heapline.sql.pops import PopQueue  # noqa: E402 - needs asyncpg
from heapline.sql.shard import Name  # noqa: E402 - needs asyncpg

WRAPPED = 20  # turns of the ring of ready messages: more than it has slots


class Database:
    """A schema, and nodes on it."""

    def __init__(self, admin: Any, schema: str) -> None:
        self.admin, self.schema = admin, schema
        self._nodes: list[Any] = []

    async def open(self, **config: Any) -> Any:
        node = await heapline.sql.open([shared_url()], schema=self.schema, **config).__aenter__()
        self._nodes.append(node)
        return node

    async def close(self) -> None:
        for node in self._nodes:
            await node.close()

    async def drop(self) -> None:
        await self.close()
        await drop_schema(self.admin, self.schema)
        await self.admin.close()


async def connect_to(schema: str) -> Database:
    return Database(await asyncpg.connect(shared_url(), server_settings={"search_path": schema}), schema)


@pytest.fixture
async def empty_database() -> AsyncIterator[Database]:
    """A schema that does not exist yet."""
    found = await connect_to(fresh_schema())
    yield found
    await found.drop()


#: A schema as a migration creates it, that an earlier test has used. A new one costs more CPU than most of these tests.
_spare: list[str] = []

MADE = """
SELECT (SELECT array_agg(relname::text ORDER BY 1) FROM pg_class WHERE relnamespace = $1::regnamespace),
       (SELECT array_agg(pg_get_functiondef(oid) ORDER BY oid) FROM pg_proc WHERE pronamespace = $1::regnamespace),
       (SELECT row(meta) FROM meta)::text
"""
SEQUENCES = """
SELECT format('%I.%I', schemaname, sequencename) AS name, coalesce(last_value, start_value) AS last,
       last_value IS NOT NULL AS is_called
FROM pg_sequences WHERE schemaname = $1
"""
USED = """
SELECT string_agg(oid::regclass::text, ', ') FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind = 'r'
  AND relname NOT IN ('meta', 'events_numbered') AND pg_relation_size(oid) > 0
"""
UNNUMBERED = "UPDATE events_numbered SET upto = 0, sample_drawn = NULL, sample_transaction = NULL"


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    """A schema without messages. It is used again, unless the test has changed what a migration creates."""
    found = await connect_to(_spare.pop() if _spare else fresh_schema())
    admin, schema = found.admin, found.schema
    await admin.execute("SET lock_timeout = '10s'")
    await migrate(admin, schema, 0, 1)
    made, sequences = await admin.fetchrow(MADE, schema), await admin.fetch(SEQUENCES, schema)
    yield found
    await found.close()
    if await admin.fetchrow(MADE, schema) != made:
        await found.drop()
        return
    if used := await admin.fetchval(USED, schema):
        await admin.execute(f"TRUNCATE {used}")
    for name, last, is_called in sequences:
        await admin.execute("SELECT setval($1::text::regclass, $2, $3)", name, last, is_called)
    await admin.execute(UNNUMBERED)
    await admin.close()
    _spare.append(schema)


def shard_of(broker: Any) -> Any:
    return broker.node.shards[0]


async def node_number(broker: Any) -> int:
    """The node's part of the ids that this broker mints."""
    return int(partition_of((await broker.enqueue("jobs", b"x")).id))


# -- node ids ----------------------------------------------------------------------------------------------------------


async def test_nodes_that_run_together_have_different_numbers(database: Database) -> None:
    nodes = [await database.open() for _ in range(3)]
    await nodes[0].create_topic("jobs")
    assert sorted([await node_number(node) for node in nodes]) == [0, 1, 2]


async def test_number_of_a_stopped_node_is_used_again_above_its_last_id(database: Database) -> None:
    first = await database.open()
    await first.create_topic("jobs")
    ids = [r.id for r in await first.enqueue_batch("jobs", [Outgoing(b"x")] * 5000)]
    await first.close()
    second = await database.open()
    again = await second.enqueue("jobs", b"x")
    assert int(partition_of(again.id)) == 0
    assert again.id > max(ids)


async def test_number_of_a_crashed_node_is_free_only_after_its_lease_and_grace(database: Database) -> None:
    first = await database.open()
    await first.create_topic("jobs")
    await database.admin.execute("UPDATE nodes SET until = clock_ms() - $1", node_id.GRACE_MS // 2)
    assert await node_number(await database.open()) == 1
    await database.admin.execute("UPDATE nodes SET until = clock_ms() - $1 WHERE node = 0", node_id.GRACE_MS + 1)
    assert await node_number(await database.open()) == 0


async def test_node_that_lost_its_number_mints_nothing_under_it(database: Database) -> None:
    paused = await database.open()
    await paused.create_topic("jobs")
    assert await node_number(paused) == 0
    await database.admin.execute("UPDATE nodes SET until = clock_ms() - $1", node_id.GRACE_MS + 1)
    other = await database.open()
    assert [await node_number(other), await node_number(paused)] == [0, 1]


async def test_calls_that_find_the_number_lost_lease_one_together(database: Database) -> None:
    broker = await database.open()
    await broker.create_topic("jobs")
    await database.admin.execute("UPDATE nodes SET until = clock_ms() - 1")
    await asyncio.gather(*(broker.enqueue("jobs", b"x") for _ in range(30)))
    assert await database.admin.fetchval("SELECT count(*) FROM nodes WHERE until > clock_ms()") == 1


async def test_transaction_from_before_the_lease_of_a_number_mints_nothing_under_it(database: Database) -> None:
    """The number was another node's then, which may have minted ids with that time."""
    broker = await database.open()
    now = await database.admin.fetchval("SELECT clock_ms()")
    with pytest.raises(node_id.NodeIdLost):
        shard_of(broker).node.mint(1, now - node_id.GRACE_MS, now + 1000)
    assert len(shard_of(broker).node.mint(1, now + 1, now + 1000)) == 1


async def test_repeated_message_id_is_logged_and_stores_nothing(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await database.open()
    await broker.create_topic("jobs")
    first = await broker.enqueue("jobs", b"first")
    with monkeypatch.context() as patch:
        patch.setattr(shard_of(broker).node, "mint", lambda count, now, until: [first.id])
        with pytest.raises(heapline.UnavailableError, match="minted twice"):
            await broker.enqueue("jobs", b"second")
    assert "message id conflict" in caplog.text
    assert [info.payload for info in await broker.peek("jobs")] == [b"first"]
    assert (await broker.enqueue("jobs", b"second")).id != first.id, "it continues under another number"


@pytest.mark.parametrize("place", ["leased", "long leased", "closed slot", "delayed"])
async def test_id_of_a_message_anywhere_is_an_alarm(
    database: Database, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    broker = await database.open()
    await broker.create_topic("jobs")
    first = await broker.enqueue("jobs", b"first", delay=3600 if place == "delayed" else None)
    if "leased" in place:
        await broker.pop("jobs")
    if place == "long leased":
        await database.admin.execute("UPDATE lease SET slot = $1", LONG_LEASES)
    if place == "closed slot":
        await database.admin.execute("SELECT setval('ready_turn', 1), setval('ready_live', 3)")
    other = await database.open()  # has remembered nothing
    monkeypatch.setattr(shard_of(other).node, "mint", lambda count, now, until: [first.id])
    for delay in (None, 3600) if place != "delayed" else (3600,):
        with pytest.raises(heapline.UnavailableError, match="minted twice"):
            await other.enqueue("jobs", b"second", delay=delay)
        with pytest.raises(heapline.UnavailableError, match="minted twice"):
            await other.enqueue_batch("jobs", [Outgoing(b"second", delay=delay)])
        await other.prepare_batch("b", "p", {"jobs": [Outgoing(b"second", delay=delay)]})
        with pytest.raises(heapline.UnavailableError, match="in use by other messages"):
            await other.commit_batch("b", ["p"])
        await other.abort_batch("b")
    assert await database.admin.fetchval("SELECT count(*) FROM items") == 1


# -- wakeups -----------------------------------------------------------------------------------------------------------


async def test_waiting_pop_is_woken_by_an_enqueue_on_another_node(database: Database) -> None:
    one, two = [await database.open(poll_interval=60.0) for _ in range(2)]
    await one.create_topic("jobs")
    waiting = asyncio.create_task(one.pop("jobs", wait=50.0))
    await one.stats("jobs")
    await two.enqueue("jobs", b"x")
    async with asyncio.timeout(20):
        assert [m.payload for m in await waiting] == [b"x"]


async def test_node_learns_of_one_that_starts_later(database: Database) -> None:
    one = await database.open(poll_interval=60.0)
    await one.create_topic("jobs")
    async with asyncio.timeout(20):
        await shard_of(one).wakeups.listening.wait()
        two = await database.open(poll_interval=60.0)
        waiting = asyncio.create_task(two.pop("jobs", wait=50.0))
        await shard_of(one).wakeups.others.wait()
        await shard_of(two).wakeups.listening.wait()
        await one.enqueue("jobs", b"x")
        assert [m.payload for m in await waiting] == [b"x"]


async def test_node_without_others_sends_no_notifications(database: Database) -> None:
    received: asyncio.Queue[str] = asyncio.Queue()
    await database.admin.add_listener(f"heapline_{database.schema}", lambda *event: received.put_nowait(event[3]))
    one = await database.open()
    await one.create_topic("jobs")
    await one.enqueue_batch("jobs", [Outgoing(b"x")] * 3)
    assert len(await one.pop("jobs", 3, wait=5.0)) == 3
    two = await database.open()
    await two.enqueue("jobs", b"x")
    async with asyncio.timeout(20):
        first = [(await received.get())[0] for _ in range(3)]
    assert first == ["/", "/", "j"], "two nodes started, and the second one enqueued"
    await two.close()
    async with shard_of(one).connection() as connection:
        await shard_of(one).find_others(connection)
    assert not shard_of(one).wakeups.others.is_set()


async def test_waiting_pop_polls_if_it_cannot_listen(database: Database) -> None:
    one, two = [await database.open(poll_interval=0.1) for _ in range(2)]
    await one.create_topic("jobs")
    await shard_of(one).wakeups.close()
    waiting = asyncio.create_task(one.pop("jobs", wait=50.0))
    await one.stats("jobs")
    await two.enqueue("jobs", b"x")
    async with asyncio.timeout(20):
        assert len(await waiting) == 1


async def test_close_refuses_waiting_pops_and_releases_what_they_leased(database: Database) -> None:
    one, two = await database.open(), await database.open()
    await one.create_topic("jobs")
    pops = [asyncio.create_task(one.pop("jobs", wait=60.0)) for _ in range(100)]
    await one.stats("jobs")
    enqueued = asyncio.create_task(two.enqueue_batch("jobs", [Outgoing(b"x")] * 50))
    await asyncio.sleep(0)
    await one.close()
    await enqueued
    ends = await asyncio.gather(*pops, return_exceptions=True)
    leased = [end for end in ends if isinstance(end, list)]
    assert all(isinstance(end, heapline.Closed | list) for end in ends)
    assert len(await two.pop("jobs", 100)) == 50 - len(leased)


async def test_lease_of_a_stopped_node_ends_on_another(database: Database) -> None:
    one, two = await database.open(), await database.open(poll_interval=0.1)
    await one.create_topic("jobs", backoff=heapline.Backoff(base=0))
    await one.enqueue("jobs", b"x")
    await one.pop("jobs", visibility=0.2)
    await one.close()
    async with asyncio.timeout(20):
        (again,) = await two.pop("jobs", wait=20.0)
    assert again.attempts == 2


async def test_delayed_message_of_another_node_is_delivered_on_time(database: Database) -> None:
    one, two = await database.open(), await database.open(poll_interval=0.1)
    await one.create_topic("jobs")
    sent = await one.enqueue("jobs", b"x", delay=0.3)
    async with asyncio.timeout(20):
        (message,) = await two.pop("jobs", wait=20.0)
    assert message.id == sent.id
    assert (message.deadline - message.enqueued_at).total_seconds() >= 30.3, "never early"


async def test_messages_are_shared_between_nodes_without_duplicates(database: Database) -> None:
    nodes = [await database.open() for _ in range(3)]
    await nodes[0].create_topic("jobs")
    for n, node in enumerate(nodes):
        await node.enqueue_batch("jobs", [Outgoing(b"%d" % (n * 100 + i), priority=i) for i in range(100)])
    pops = await asyncio.gather(*(node.pop("jobs", 40) for node in nodes for _ in range(4)))
    payloads = [m.payload for messages in pops for m in messages]
    assert sorted(payloads, key=int) == [b"%d" % i for i in range(300)]


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [("/postgres", "/nothing"), ("postgres@", "nobody@")], ids=["database", "user"])
async def test_database_that_cannot_be_opened_is_refused_by_name(change: tuple[str, str]) -> None:
    head, tail = shared_url().rsplit("/", 1)
    url = f"{head}/{tail}".replace(*change)
    with pytest.raises(heapline.BadRequest, match="cannot open shard 0"):
        async with heapline.sql.open([url]):
            pass


async def test_missing_server_is_unavailable() -> None:
    with pytest.raises(heapline.UnavailableError, match="cannot open shard 0"):
        async with heapline.sql.open(["postgresql://postgres@127.0.0.1:1/postgres"]):
            pass


async def test_old_server_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "POSTGRES_MIN", 99)
    with pytest.raises(heapline.BadRequest, match="upgrade it to 99"):
        await database.open()


# -- transactions ------------------------------------------------------------------------------------------------------


async def test_transaction_that_postgres_rolls_back_is_not_answered(database: Database) -> None:
    broker = await database.open()
    await broker.create_topic("jobs")

    async def work(connection: Any) -> None:
        await connection.execute("DELETE FROM topics")
        with contextlib.suppress(asyncpg.UndefinedTableError):
            await connection.execute("SELECT * FROM nothing")

    with pytest.raises(heapline.UnavailableError, match="rolled the transaction back"):
        await shard_of(broker).run(work)
    assert len(await broker.list_topics()) == 1


async def test_ring_is_not_turned_while_a_transaction_runs(database: Database) -> None:
    broker = await database.open()

    async def work(connection: Any) -> None:
        with pytest.raises(asyncpg.LockNotAvailableError):
            await shard_of(broker).run_alone(lambda connection: connection.fetchval("SELECT 1"))

    await shard_of(broker).run(work)
    assert await shard_of(broker).run_alone(lambda connection: connection.fetchval("SELECT 1")) == 1


@pytest.mark.parametrize("limit", [0, 10])
async def test_ring_turns_while_an_enqueue_waits_for_its_topic(database: Database, limit: int) -> None:
    broker = await database.open()
    await broker.create_topic("jobs", max_backlog=limit)
    await broker.enqueue("jobs", b"x")
    shard = shard_of(broker)
    for timekeeper in broker.node.timekeepers:
        await timekeeper.close()
    async with database.admin.transaction():
        await database.admin.execute("SELECT pg_advisory_xact_lock($1)", shard.lock_key(Name("default", "jobs")))
        key = None if limit else "a key also locks the topic"
        waiting = asyncio.create_task(broker.enqueue("jobs", b"x", idempotency_key=key))
        count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while not await database.admin.fetchval(count):
            assert not waiting.done()
        assert await shard.run_alone(lambda connection: connection.fetchval("SELECT 1")) == 1
    await waiting


# -- rings -------------------------------------------------------------------------------------------------------------


async def ring_of(broker: Any, slot_bytes: int) -> Any:
    """Rings that only the test turns, with small slots."""
    await broker.node.timekeepers[0].close()
    return rings.Rings(shard_of(broker), slot_bytes)


async def used_slots(database: Database, ring: str, count: int) -> list[int]:
    size = "SELECT pg_relation_size($1::text::regclass)"
    return [n for n in range(count) if await database.admin.fetchval(size, f"{ring}_{n}")]


async def test_full_slot_is_closed_and_truncated_with_its_survivors_moved(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100, priority=i) for i in range(200)])
    await ring.turn()
    assert await database.admin.fetchval("SELECT last_value FROM ready_turn") == 1
    await broker.ack(await broker.pop("jobs", 190))
    await ring.turn()
    assert await used_slots(database, "ready", 16) == [1]
    assert [m.priority for m in await broker.pop("jobs", 100)] == list(range(190, 200))


async def test_slot_with_many_rows_stays_where_it_is(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SURVIVORS_MAX", 9)
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100, priority=i) for i in range(200)])
    await broker.ack(await broker.pop("jobs", 190))
    for _ in range(2):
        await ring.turn()
    assert await used_slots(database, "ready", 16) == [0]
    await broker.enqueue("jobs", b"x", priority=-1)
    assert [m.priority for m in await broker.pop("jobs", 100)] == [-1, *range(190, 200)]


async def test_ring_turns_at_its_limit_whatever_the_backlog_is(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed slots with many messages are emptied into cold ones, which are few and large."""
    monkeypatch.setattr(rings, "SURVIVORS_MAX", 9)
    monkeypatch.setattr(rings, "MOVED_MAX", 200)
    broker = await database.open()
    await broker.node.timekeepers[0].close()
    ring = rings.Rings(shard_of(broker), slot_bytes=8192, cold_bytes=8192)
    await broker.create_topic("jobs")
    await database.admin.execute("SELECT setval('cold_turn', $1)", COLD_SLOTS - 1)  # the last one
    rng, model = random.Random(2), list[tuple[int, int]]()
    size = "SELECT pg_relation_size($1::text::regclass)"
    for number in range(48):
        count = 20 if number // 24 % 2 == 0 else 130  # the backlog grows and shrinks
        batch = [Outgoing(b"x" * 100, priority=rng.randrange(1000)) for _ in range(80)]
        results = await broker.enqueue_batch("jobs", batch)
        model += [(m.priority, r.id) for m, r in zip(batch, results, strict=True)]
        model.sort()
        messages = await broker.pop("jobs", count)
        assert [m.id for m in messages] == [id for _, id in model[:count]]
        del model[:count]
        await broker.ack(messages)
        await ring.turn()
        turn = await database.admin.fetchval("SELECT last_value FROM ready_turn")
        assert await database.admin.fetchval(size, f"ready_{turn % READY_SLOTS}") <= 8 * 8192
        assert len(await used_slots(database, "ready", READY_SLOTS)) <= READY_SLOTS - rings.SPARE["ready"]
    assert await database.admin.fetchval("SELECT last_value FROM cold_turn") > COLD_SLOTS
    assert await database.admin.fetchval("SELECT count(*) FROM miscounted") == 0
    while model:
        messages = await broker.pop("jobs", 100)
        assert [m.id for m in messages] == [id for _, id in model[:100]]
        del model[:100]
        await broker.ack(messages)
        await ring.turn()
    assert len(await used_slots(database, "ready", POP_SLOTS)) <= 1


async def test_slot_with_a_lease_is_never_truncated(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100)] * 200)
    held, *others = await broker.pop("jobs", 200)
    await broker.ack(others)
    for _ in range(2):
        await ring.turn()
    assert await used_slots(database, "lease", 8) == [0]
    await held.extend(60)
    await held.ack()
    await ring.turn()
    assert await used_slots(database, "lease", 8) == []


async def test_large_payloads_move_in_small_steps(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is locked while rows of it are moved, and pops wait for it meanwhile."""
    monkeypatch.setattr(rings, "MOVED_BYTES", 1 << 20)
    broker = await database.open()
    await broker.create_topic("jobs")
    batch = [Outgoing(random.Random(n).randbytes(100_000), priority=n) for n in range(40)]
    ring = await ring_of(broker, 4 << 20)
    await broker.enqueue_batch("jobs", batch)
    await ring.turn()
    assert await database.admin.fetchval("SELECT last_value FROM ready_turn") == 0, "4 MB of payloads count for a 64th"
    await ring_turned_at(ring, 60 << 10)
    assert await database.admin.fetchval("SELECT last_value FROM ready_turn") == 1
    assert await used_slots(database, "ready", READY_SLOTS) == [0], "too many bytes to move them to the open slot"
    layout = await shard_of(broker).run(shard_of(broker).read_layout)
    for moved in (11, 22, 33, 40):
        await ring._move_some("ready", 0, layout)
        assert await database.admin.fetchval(f"SELECT count(*) FROM ready_{READY_SLOTS}") == moved
    assert await used_slots(database, "ready", READY_SLOTS) == []
    assert [m.payload for m in await broker.pop("jobs", 100, max_bytes=1 << 30)] == [m.payload for m in batch]


async def ring_turned_at(ring: Any, slot_bytes: int) -> None:
    ring._slot_bytes = slot_bytes
    await ring.turn()


async def test_long_lease_in_each_slot_does_not_keep_the_lease_ring_from_turning(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs")
    held: list[heapline.Message] = []
    for number in range(3 * LEASE_SLOTS):
        await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100, priority=n, key=str(number)) for n in range(80)])
        held += await broker.pop("jobs", 1, visibility=3600, request_id=f"r{number}")
        await broker.ack(await broker.pop("jobs", 79))
        await ring.turn()
        used = await used_slots(database, "lease", LEASE_SLOTS)
        assert len(used) <= LEASE_SLOTS - rings.SPARE["lease"]
    assert await database.admin.fetchval("SELECT last_value FROM lease_turn") == 3 * LEASE_SLOTS
    assert await database.admin.fetchval(f"SELECT count(*) FROM lease_{LONG_LEASES}") > LEASE_SLOTS
    assert await database.admin.fetchval("SELECT count(*) FROM miscounted") == 0

    first, second, third, fourth, fifth, *rest = held
    assert (await broker.get("jobs", first.id)).state == "leased"
    assert [m.token for m in await broker.pop("jobs", 1, request_id="r0")] == [first.token]
    before = first.deadline
    await first.extend(7200)
    assert first.deadline > before
    for message in (first, *rest):
        await message.ack()
    await first.ack()  # repeated
    await second.nack(backoff=0, reason="tried")
    await third.release()
    await fourth.bury("broken")
    await database.admin.execute("UPDATE lease SET until = 1 WHERE id = $1", fifth.id)
    await broker.node.tick()
    with pytest.raises(heapline.LeaseLost):
        await fifth.ack()
    stats = await broker.stats("jobs")
    assert (stats.ready + stats.delayed, stats.leased, stats.dead) == (3, 0, 1)
    assert await database.admin.fetchval("SELECT count(*) FROM miscounted") == 0


async def test_removed_messages_are_forgotten_slot_by_slot(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, rings.SLOT_BYTES)
    await database.admin.execute(
        "CREATE TABLE skipped (ms bigint); INSERT INTO skipped VALUES (0); "
        "CREATE OR REPLACE FUNCTION clock_ms() RETURNS bigint LANGUAGE sql VOLATILE AS "
        "'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint + ms FROM skipped'"
    )
    await broker.create_topic("jobs")
    sent = await broker.enqueue("jobs", b"x")
    (message,) = await broker.pop("jobs", visibility=3600)
    await message.ack()
    for _ in range(ENDED_SLOTS - 1):
        assert (await broker.get("jobs", sent.id)).state == "acked"
        await message.ack()
        await database.admin.execute("UPDATE skipped SET ms = ms + $1", ENDED_MS)
        await ring.turn()
    with pytest.raises(heapline.MessageNotFound):
        await broker.get("jobs", sent.id)


async def test_paused_node_truncates_no_slot_that_was_reopened(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await database.open()
    ring = await ring_of(broker, rings.SLOT_BYTES)
    await database.admin.execute(
        "CREATE TABLE skipped (ms bigint); INSERT INTO skipped VALUES (0); "
        "CREATE OR REPLACE FUNCTION clock_ms() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT ms FROM skipped'"
    )
    await broker.create_topic("jobs")

    async def end_one() -> int:
        sent = await broker.enqueue("jobs", b"x")
        await broker.cancel("jobs", sent.id)
        return int(sent.id)

    skip = "UPDATE skipped SET ms = ms + $1"
    look, late = rings.Rings._look, list[int]()

    async def pause(self: Any, name: str) -> Any:
        seen = await look(self, name)
        if name == "ended":
            await database.admin.execute(skip, ENDED_MS)
            late.append(await end_one())
        return seen

    await database.admin.execute(skip, 1_800_000_000_000)
    await end_one()
    await database.admin.execute(skip, 3 * ENDED_MS)
    monkeypatch.setattr(rings.Rings, "_look", pause)
    await ring.sweep()
    assert [(await broker.get("jobs", id)).state for id in late] == ["cancelled"]


async def claim_plan(broker: Any, places: list[Any]) -> dict[str, Any]:
    """Return how the database executes a pop of 10 messages, with the broker's own plan settings; rolled back."""
    async with shard_of(broker).connection() as connection:
        layout = await shard_of(broker).read_layout(connection)
        topic = await connection.fetchval("SELECT id FROM topics")
        async with connection.transaction():
            values = (topic, layout.now, 10, 1 << 20, None, None, 30_000, *zip(*places, strict=True))
            rows = await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {layout.claim()}", *values)
            await connection.execute("SELECT 1")
            plan: dict[str, Any] = json.loads(rows[0][0])[0]["Plan"]
            return plan


async def test_pop_reads_only_indexes_and_skips_deleted_rows_of_closed_slots(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 64 << 10)
    await broker.create_topic("jobs")
    reader = await asyncpg.connect(shared_url())
    held = reader.transaction(isolation="repeatable_read")  # keeps vacuum from removing anything
    await held.start()
    await reader.fetchval("SELECT txid_current()")
    rng = random.Random(1)
    for _ in range(4):
        await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100, priority=rng.randrange(1000)) for _ in range(500)])
        await broker.ack(await broker.pop("jobs", 400))
        await ring._open_next("ready", ring._slot_bytes)
    topic = (await broker.get_topic("jobs")).incarnation
    turn = await database.admin.fetchval("SELECT last_value FROM ready_turn")
    with_floors = await claim_plan(broker, shard_of(broker).floors.of(topic, Turns(turn, 0)))
    without = await claim_plan(broker, [START] * POP_SLOTS)
    await held.rollback()
    await reader.close()
    for plan in (with_floors, without):
        scans = re.findall(r"'Node Type': '(?:Seq|Bitmap Heap) Scan'[^{}]*?'Relation Name': '(\w+)'", str(plan))
        assert set(scans) <= {"counts_turn", "lease_turn"}, "a sequence has one row"
    assert turn == 4
    assert with_floors["Shared Hit Blocks"] < without["Shared Hit Blocks"] / 2


async def live_slots(database: Database) -> set[int]:
    bits = await database.admin.fetchval("SELECT last_value FROM ready_live")
    return {slot for slot in range(POP_SLOTS) if bits >> slot & 1}


async def test_idle_node_finds_messages_that_a_failover_brought_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections broke without an error: no statement was running."""
    monkeypatch.setattr(rings, "SURVIVORS_MAX", 9)
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await shard_of(broker).circuit.close()
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100, priority=n) for n in range(200)])
    await ring.turn()
    taken = await broker.pop("jobs", 100)
    await broker.ack(taken)
    assert await used_slots(database, "ready", READY_SLOTS) == [0]
    row = "SELECT 0, topic, $1, $2, 0, $2, 0, payload FROM ready_0 LIMIT 1"
    columns = "slot, topic, id, key, due, priority, attempts, payload"
    await database.admin.execute(f"INSERT INTO ready_0 ({columns}) {row}", taken[0].id, taken[0].priority)
    others = "application_name = 'heapline' AND pid <> pg_backend_pid()"
    await database.admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
    pool = shard_of(broker)._pool
    async with asyncio.timeout(10):
        while pool.get_size():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
    assert [m.id for m in await broker.pop("jobs")] == [taken[0].id]


async def test_messages_are_only_in_slots_that_pops_read(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs", backoff=heapline.Backoff(base=0))
    assert await live_slots(database) == {0}
    rng = random.Random(1)
    for _ in range(3 * READY_SLOTS):
        await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100, priority=rng.randrange(50)) for _ in range(100)])
        messages = await broker.pop("jobs", 95)
        await broker.nack(messages[:5])
        await broker.ack(messages[5:])
        await ring.turn()
        stored = {row["slot"] for row in await database.admin.fetch("SELECT DISTINCT slot FROM ready")}
        assert stored <= await live_slots(database)
    assert len(await live_slots(database)) < 6


async def test_pops_stop_reading_slots_that_were_emptied(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs")
    for _ in range(6):
        await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100)] * 200)
        await ring._open_next("ready", ring._slot_bytes)
    while messages := await broker.pop("jobs", 1000):
        await broker.ack(messages)
    for _ in range(2):
        await ring.turn()
    assert len(await live_slots(database)) < rings.VAIN_MAX + 1


async def test_pop_locks_the_slots_that_have_messages_and_no_others(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker, 8192)
    await broker.create_topic("jobs")
    for _ in range(3):
        await broker.enqueue_batch("jobs", [Outgoing(b"x" * 100)] * 200)
        await broker.ack(await broker.pop("jobs", 200))
        await ring.turn()
    places = [START] * POP_SLOTS
    async with shard_of(broker).connection() as connection:
        layout = await shard_of(broker).read_layout(connection)
        async with connection.transaction():
            await connection.fetch(
                layout.claim(), 1, layout.now, 10, 1 << 20, None, None, 1, *zip(*places, strict=True)
            )
            locked = await connection.fetchval("SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()")
    assert locked < 40


async def test_messages_acked_together_are_remembered_in_one_row(database: Database) -> None:
    broker = await database.open()
    await broker.create_topic("jobs")
    await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 100)
    messages = await broker.pop("jobs", 100)
    await broker.ack(messages)
    await broker.ack(messages)  # like a client whose first response was lost
    assert await database.admin.fetchval("SELECT count(*) FROM acked") == 1
    assert (await broker.get("jobs", messages[7].id)).state == "acked"


async def test_ack_is_repeated_across_an_upgrade(empty_database: Database) -> None:
    await migrate(empty_database.admin, empty_database.schema, 0, 1, all_migrations()[:4])
    topic = await empty_database.admin.fetchval(
        "INSERT INTO topics (namespace, name, config, id_suffix) VALUES ('default', 'jobs', $1, 1) RETURNING id",
        shard.write_config(heapline.TopicConfig()),
    )
    await empty_database.admin.execute(
        "INSERT INTO ended (slot, topic, id, token, how, at) "
        "SELECT 0, $1, n, 80, CASE WHEN n < 4 THEN 'acked' ELSE 'cancelled' END, clock_ms() "
        "FROM generate_series(1, 4) AS n",
        topic,
    )
    broker = await empty_database.open()
    await broker.ack([heapline.LeaseRef("jobs", id, 80) for id in (1, 2, 3)])
    assert [(await broker.get("jobs", id)).state for id in (3, 4)] == ["acked", "cancelled"]


async def test_nothing_is_lost_or_duplicated_while_rings_turn(database: Database) -> None:
    nodes = [await database.open(), await database.open()]
    await nodes[0].create_topic("jobs", backoff=heapline.Backoff(base=0))
    ring = rings.Rings(shard_of(nodes[0]), slot_bytes=8192)
    turn_count = 0
    sent: list[bytes] = []
    acked: list[bytes] = []
    is_over = False

    async def produce(node: Any, name: int) -> None:
        rng = random.Random(name)
        number = 0
        while turn_count <= WRAPPED:
            number += 1
            batch = [b"%d.%d.%d" % (name, number, i) for i in range(20)]
            await node.enqueue_batch("jobs", [Outgoing(p, priority=rng.randrange(50)) for p in batch])
            sent.extend(batch)

    async def consume(node: Any) -> None:
        while not is_over or await node.peek("jobs", 1):
            messages = await node.pop("jobs", 17)
            returned = [m for m in messages if m.attempts == 1 and m.priority % 9 == 0]
            done = [m for m in messages if m not in returned]
            await node.nack(returned, backoff=0)
            await node.ack(done)
            acked.extend(m.payload for m in done)
            if not messages:
                await asyncio.sleep(0.005)

    async def turn() -> None:
        nonlocal turn_count
        while not is_over:
            await ring.turn()
            turn_count = await database.admin.fetchval("SELECT last_value FROM ready_turn")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        producers = [tasks.create_task(produce(node, n)) for n, node in enumerate(nodes * 2)]
        for node in nodes:
            tasks.create_task(consume(node))
        tasks.create_task(turn())
        await asyncio.gather(*producers)
        is_over = True
    assert sorted(acked) == sorted(sent)


async def test_pop_cancelled_after_its_answer_returns_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = PopQueue._answer

    def answer_and_cancel(queue: PopQueue, *args: Any) -> None:
        answer(queue, *args)
        task.cancel()  # before the task has received the answer

    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"once")
        with monkeypatch.context() as patch:
            patch.setattr(PopQueue, "_answer", answer_and_cancel)
            task = asyncio.create_task(hl.pop("jobs"))
            with pytest.raises(asyncio.CancelledError):
                await task
        (message,) = await hl.pop("jobs", wait=20)
        assert message.attempts == 1
