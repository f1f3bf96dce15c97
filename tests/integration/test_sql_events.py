"""Events of the Postgres broker: what is recorded, offsets that late commits cannot upset, and bounded retention."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import heapline
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.sql.events import SLOTS
from tests.integration.sql_rig import fresh_topic, node, rig_schema
from tests.postgres import shared_url

DAY = 86400.0


async def events(hl: Any, topic: str, start: int = 0, end: int | None = None) -> list[tuple[int, str, int]]:
    """Return (offset, kind, id) of the topic's events."""
    found = []
    async for frame in hl.read_log(topic, start=start, end=end):
        for event in frame.events:
            ids = event.columns["id"] if "id" in event.columns else event.columns["ids"]
            found += [(event.offset + n, event.kind, id) for n, id in enumerate(ids.tolist())]
    return found


async def kinds(hl: Any, topic: str) -> dict[int, list[str]]:
    """Return the kinds of events of each message, in order."""
    found: dict[int, list[str]] = {}
    for _, kind, id in await events(hl, topic):
        found.setdefault(id, []).append(kind)
    return found


async def test_every_change_of_a_message_is_one_event_with_the_next_offset() -> None:
    async with node() as hl:
        topic = fresh_topic()
        await hl.create_topic(topic, retention=DAY, backoff=heapline.Backoff(base=0.0), max_retries_default=1)
        names = ("acked", "retried", "buried", "expired", "cancelled", "moved", "purged", "late")
        given = {name: Outgoing(name.encode(), n) for n, name in enumerate(names)}
        given["expired"] = Outgoing(b"expired", 3, ttl=0.05)
        given["moved"] = Outgoing(b"moved", 5, delay=DAY)
        given["late"] = Outgoing(b"late", 9, delay=0.05)
        ids = dict(zip(names, [e.id for e in await hl.enqueue_batch(topic, list(given.values()))], strict=True))
        await asyncio.sleep(0.1)
        await hl.node.tick()
        acked, retried, buried = await hl.pop(topic, 3, holder="w")
        await acked.ack()
        await retried.nack(reason="broken")
        await buried.bury("bad")
        (retried,) = await hl.pop(topic)
        await retried.release()
        for _ in range(2):
            (retried,) = await hl.pop(topic)
            await retried.nack(reason="broken")
            if (await hl.get(topic, retried.id)).state == "dead":
                break
        await hl.cancel(topic, ids["cancelled"])
        await hl.reschedule(topic, ids["moved"], priority=-1)
        await hl.dlq_replay(topic, ids=[ids["buried"]])
        (buried,) = await hl.pop(topic)
        await buried.bury("bad")
        await hl.dlq_delete(topic, ids=[ids["buried"]])
        await hl.purge(topic)
        found = await kinds(hl, topic)
        assert {name: found[id] for name, id in ids.items()} == {
            "acked": ["enqueued", "leased", "acked"],
            "retried": ["enqueued", "leased", "nacked", "leased", "released", "leased", "dead_lettered"],
            "buried": ["enqueued", "leased", "dead_lettered", "replayed", "leased", "dead_lettered", "dead_deleted"],
            "expired": ["enqueued", "expired"],
            "cancelled": ["enqueued", "cancelled"],
            "moved": ["enqueued", "rescheduled", "purged"],
            "purged": ["enqueued", "purged"],
            "late": ["enqueued", "fired", "purged"],
        }
        every = await events(hl, topic)
        assert [offset for offset, _, _ in every] == list(range(len(every)))
        assert (await hl.offsets(topic))[0] == (0, len(every))
        assert await events(hl, topic, 5, 9) == [event for event in every if 5 <= event[0] < 9]


async def test_enqueues_by_log_and_batch_and_ends_of_leases_are_recorded(tmp_path: Path) -> None:
    async with node(wal=str(tmp_path / "wal")) as hl:
        topic = fresh_topic()
        await hl.create_topic(topic, retention=DAY, k=100, backoff=heapline.Backoff(base=0.0), max_retries_default=0)
        later = Outgoing(b"later", 7, delay=DAY, ttl=DAY, max_retries=3)
        buffered = [e.id for e in await hl.enqueue_batch(topic, [Outgoing(b"now", 5), later])]
        (prepared,) = (await hl.prepare_batch("batch", "part", [Outgoing(b"prepared", 1)], topic=topic))[topic]
        assert len(await events(hl, topic)) == 2, "a prepared message is not in the topic yet"
        await hl.commit_batch("batch", ["part"])
        frames = [frame async for frame in hl.read_log(topic)]
        new = {id: (e, n) for f in frames for e in f.events for n, id in enumerate(e.columns["id"].tolist())}
        assert {new[id][0].kind for id in buffered} == {"enqueued"}
        event, n = new[buffered[1]]
        reported = [event.columns[name][n] for name in ("priority", "max_retries", "payload_len")]
        assert reported == [7, 3, 5]
        assert event.columns["due"][n] > event.columns["at"][n] == event.columns["enqueued_at"][n]
        assert event.columns["expires"][n] == event.columns["due"][n] + DAY * 1000
        event, _ = new[prepared.id]
        assert (event.kind, event.columns["batch_id"]) == ("batch_committed", "batch")
        (lost,) = await hl.pop(topic, visibility=0.01)
        assert lost.id == prepared.id
        await asyncio.sleep(0.05)
        await hl.node.tick()
        assert (await kinds(hl, topic))[lost.id] == ["batch_committed", "leased", "dead_lettered"]
        await hl.update_topic(topic, max_retries_default=5)
        (lost,) = await hl.pop(topic, visibility=0.01)
        await asyncio.sleep(0.05)
        await hl.node.tick()
        assert (await kinds(hl, topic))[lost.id] == ["enqueued", "leased", "lease_expired"]


async def test_reader_waits_for_a_lower_number_that_is_not_committed() -> None:
    """A transaction that has drawn a number stays open. What commits after it gets no offset before it ends."""
    async with node() as hl:
        topic = fresh_topic()
        id = (await hl.create_topic(topic, retention=DAY)).incarnation
        (first,) = [e.id for e in await hl.enqueue_batch(topic, [Outgoing(b"first")])]
        assert await events(hl, topic) == [(0, "enqueued", first)]
        other = await asyncpg.connect(shared_url(), server_settings={"search_path": rig_schema()})
        held = other.transaction()
        await held.start()
        await other.execute("INSERT INTO events (topic, kind, at, ids) VALUES ($1, 'acked', clock_ms(), $2)", id, [7])
        last = await hl.enqueue(topic, b"last")
        for _ in range(2):
            assert await events(hl, topic) == [(0, "enqueued", first)], "a reader must not pass the open transaction"
            assert (await hl.offsets(topic))[0] == (0, 1)
        await held.commit()
        assert await events(hl, topic) == [(0, "enqueued", first), (1, "acked", 7), (2, "enqueued", last.id)]
        held = other.transaction()
        await held.start()
        await other.execute("INSERT INTO events (topic, kind, at, ids) VALUES ($1, 'acked', clock_ms(), $2)", id, [8])
        await held.rollback()
        await hl.enqueue(topic, b"more")
        assert [offset for offset, _, _ in await events(hl, topic)] == [0, 1, 2, 3], "a rollback leaves no gap"
        await other.close()


async def test_transactions_that_always_overlap_delay_events_and_do_not_stop_them() -> None:
    async with node() as hl:
        topic = fresh_topic()
        await hl.create_topic(topic, retention=DAY)
        keeper = hl.node.timekeepers[0].events
        connections = [await asyncpg.connect(shared_url()) for _ in range(2)]
        for connection in connections:
            await connection.execute("BEGIN; SELECT pg_current_xact_id()")
        await hl.enqueue(topic, b"x")
        await keeper.number()
        for connection in connections:  # another one is always open
            assert await ends(hl, topic) == 0
            await connection.execute("COMMIT; BEGIN; SELECT pg_current_xact_id()")
            await keeper.number()
        assert await ends(hl, topic) == 1
        for connection in connections:
            await connection.close()


async def ends(hl: Any, topic: str) -> int:
    """Return the end of the topic's log, without waiting for transactions in progress."""
    shard = hl.node.shards[0]
    id = (await shard.read_topic(hl.node.home(topic).name)).topic.id
    async with shard.connection() as connection:
        return (await connection.fetchval("SELECT next FROM event_ends WHERE topic = $1", id)) or 0


async def test_two_nodes_that_number_while_writers_commit_lose_and_repeat_nothing() -> None:
    async with node() as a, node() as b:
        topic = fresh_topic()
        await a.create_topic(topic, retention=DAY)
        seen: list[tuple[int, str, int]] = []
        over = False

        async def read() -> None:
            while not (over and seen and seen[-1][0] + 1 == (await b.offsets(topic))[0][1]):
                end = (await b.offsets(topic))[0][1]
                start = seen[-1][0] + 1 if seen else 0
                seen.extend(await events(b, topic, start, end) if start < end else [])

        async def work(hl: Any) -> None:
            for _ in range(15):
                await hl.enqueue_batch(topic, [Outgoing(b"x") for _ in range(20)])
                await hl.ack(await hl.pop(topic, 20))

        reading = asyncio.create_task(read())
        await asyncio.gather(*(work(hl) for hl in (a, b) for _ in range(4)))
        while messages := await a.pop(topic, 1000):
            await a.ack(messages)
        over = True
        async with asyncio.timeout(60):
            await reading
        assert [offset for offset, _, _ in seen] == list(range(len(seen)))
        assert Counter(kind for _, kind, _ in seen) == {"enqueued": 2400, "leased": 2400, "acked": 2400}
        order: dict[int, list[str]] = {}
        for _, kind, id in seen:
            order.setdefault(id, []).append(kind)
        assert {tuple(each) for each in order.values()} == {("enqueued", "leased", "acked")}


async def test_old_events_are_truncated_and_readers_learn_where_the_log_starts() -> None:
    async with node() as hl:
        topic = fresh_topic()
        id = (await hl.create_topic(topic, retention=DAY)).incarnation
        keeper, shard = hl.node.timekeepers[0].events, hl.node.shards[0]
        for _ in range(SLOTS - 1):
            await hl.enqueue_batch(topic, [Outgoing(b"x")] * 10)
        await hl.offsets(topic)
        async with shard.connection() as connection:
            for n in range(SLOTS):  # as if the topic had been used for three days
                await connection.execute(f"UPDATE events_{n} SET at = at - $1", round(3 * DAY * 1000))
        await keeper.turn()  # opens the next slot, and empties the one before
        await hl.enqueue(topic, b"new")
        await keeper.turn()
        assert (await hl.offsets(topic))[0] == (70, 71)
        assert [kind for _, kind, _ in await events(hl, topic)] == ["enqueued"]
        with pytest.raises(BadRequest, match="offset 5 of partition 0 was reclaimed; the log starts at 70"):
            await events(hl, topic, 5)
        async with shard.connection() as connection:
            assert await connection.fetchval("SELECT count(*) FROM events WHERE topic = $1", id) == 1
            assert await connection.fetchval("SELECT count(*) FROM event_offsets WHERE topic = $1", id) == 1


async def test_topic_without_retention_records_nothing_and_says_so() -> None:
    async with node() as hl:
        topic = fresh_topic()
        id = (await hl.create_topic(topic)).incarnation
        await hl.enqueue(topic, b"x")
        await hl.ack(await hl.pop(topic))
        with pytest.raises(BadRequest, match="does not record events; set its retention"):
            await hl.offsets(topic)
        async with hl.node.shards[0].connection() as connection:
            assert await connection.fetchval("SELECT count(*) FROM events WHERE topic = $1", id) == 0
        await hl.update_topic(topic, retention=DAY)
        await hl.enqueue(topic, b"y")
        assert [kind for _, kind, _ in await events(hl, topic)] == ["enqueued"]
