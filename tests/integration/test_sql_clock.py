"""The Postgres broker while the clock of its database is set back: nothing is lost, handed out twice or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.core.ids import partition_of
from tests.conformance.worlds import SqlWorld

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import node_id, rings  # noqa: E402 - needs asyncpg
from heapline.sql.layout import ENDED_MS, ENDED_SLOTS  # noqa: E402 - needs asyncpg

BACK = [4, 30, 3600]  # seconds: less and more than ids may be ahead of the clock


class Database(SqlWorld):
    """A database whose clock moves only when a test moves it, and nodes on it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._nodes: list[Any] = []

    async def open(self, **config: Any) -> Any:
        self.settings = config
        self._nodes.append(await self._open_node())
        return self._nodes[-1]

    async def _open(self) -> None:
        """Open no node; each test opens its own."""

    async def _close(self) -> None:
        for node in self._nodes:
            await node.close()

    @property
    def admin(self) -> Any:
        return self.admins[0]

    async def move(self, seconds: float) -> None:
        await self._move_clock(seconds)

    async def run_for(self, broker: Any, seconds: int) -> None:
        """Let time pass in steps in which a node keeps its number."""
        for _ in range(0, seconds, 20):
            await self.move(20)
            await renew(broker)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    found = Database(tmp_path)
    await found.start()
    yield found
    await found.stop()


def shard_of(broker: Any) -> Any:
    return broker.node.shards[0]


async def renew(broker: Any) -> None:
    async with shard_of(broker).connection() as connection:
        await shard_of(broker).node.renew(connection)


async def ring_of(broker: Any) -> Any:
    """Rings that only the test turns."""
    await broker.node.timekeepers[0].close()
    return rings.Rings(shard_of(broker))


async def node_number(broker: Any) -> int:
    return int(partition_of((await broker.enqueue("jobs", b"x")).id))


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", BACK)
@pytest.mark.parametrize("has_log", [False, True])
async def test_enqueues_continue_after_the_clock_was_set_back(
    database: Database, tmp_path: Any, seconds: int, has_log: bool
) -> None:
    broker = await database.open(**({"wal": str(tmp_path / "wal")} if has_log else {}))
    await broker.create_topic("jobs", k=10)
    await database.run_for(broker, 100)
    sent = await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 5000)
    await database.move(-seconds)
    for _ in range(3):
        sent += await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 10)
    assert len({r.id for r in sent}) == 5030
    assert (await broker.stats("jobs")).ready + (await broker.stats("jobs")).delayed == 5030


@pytest.mark.parametrize("seconds", BACK)
async def test_node_started_after_the_clock_was_set_back_enqueues(database: Database, seconds: int) -> None:
    first = [await database.open() for _ in range(3)]
    await first[0].create_topic("jobs")
    ids = [(await broker.enqueue("jobs", b"x")).id for broker in first]
    for broker in first:
        await broker.close()
    await database.move(-seconds)
    second = await database.open()
    sent = await second.enqueue("jobs", b"x")
    assert sent.id > max((id for id in ids if partition_of(id) == partition_of(sent.id)), default=0)


async def test_number_stays_reserved_as_far_as_its_ids_may_reach(database: Database) -> None:
    """Its next owner would mint the same ids when the clock is there again."""
    first = await database.open()
    await first.create_topic("jobs")
    await database.run_for(first, 400)
    assert await node_number(first) == 0
    await database.move(-400)
    await renew(first)
    first.node.is_open = False
    for keeper in first.node.timekeepers:
        await keeper.close()
    await database.move(60 + node_id.GRACE_MS / 1000 + 1)
    assert await node_number(await database.open()) == 1
    await database.move(400)
    assert await node_number(await database.open()) == 0


async def test_ids_of_a_crashed_node_are_not_minted_again_by_its_second_successor(database: Database) -> None:
    """The first successor mints nothing, so its clean stop knows of no ids but those."""
    first = await database.open()
    await first.create_topic("jobs")
    sent = (await first.enqueue("jobs", b"x")).id
    owner = "UPDATE nodes SET owner = gen_random_uuid()"  # as if it had crashed: it can release nothing
    await database.admin.execute(owner)
    await database.move(60 + node_id.GRACE_MS / 1000 + 1)
    successor = await database.open()
    assert await database.admin.fetchval("SELECT node FROM nodes") == 0
    await successor.close()
    await database.move(-60 - node_id.GRACE_MS / 1000 - 1)
    again = await (await database.open()).enqueue("jobs", b"y")
    assert again.id > sent or partition_of(again.id) != 0


# -- leases and acks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", BACK)
async def test_lease_is_held_until_its_end_by_the_clock(database: Database, seconds: int) -> None:
    broker, other = await database.open(), await database.open()
    await broker.create_topic("jobs", backoff=heapline.Backoff(base=0))
    await broker.enqueue("jobs", b"x")
    (message,) = await broker.pop("jobs", visibility=30)
    await database.move(-seconds)
    for node in (broker, other):
        await node.node.tick()
        assert await node.pop("jobs") == []
    deadline = message.deadline
    await message.extend(30)
    assert message.deadline >= deadline
    await database.move(seconds + 29)
    await other.node.tick()
    assert await other.pop("jobs") == []
    await database.move(1.001)
    await other.node.tick()
    assert [m.id for m in await other.pop("jobs")] == [message.id]
    with pytest.raises(heapline.LeaseLost):
        await message.ack()


@pytest.mark.parametrize("seconds", BACK)
async def test_ack_may_be_repeated_after_the_clock_was_set_back(database: Database, seconds: int) -> None:
    """The slot that the acks were in is then the one that is opened next."""
    broker = await database.open()
    ring = await ring_of(broker)
    await broker.create_topic("jobs")
    await database.move((ENDED_MS - database.ms % ENDED_MS + 1000) / 1000)
    await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 2)
    acked, ended = await broker.pop("jobs", 2, visibility=3600)
    await acked.ack()
    await ended.ack()
    cancelled = await broker.enqueue("jobs", b"y")
    await broker.cancel("jobs", cancelled.id)
    await database.move(-seconds)
    for _ in range(4):  # all slots have been next
        await ring.sweep()
        await acked.ack()
        assert (await broker.get("jobs", cancelled.id)).state == "cancelled"
        if seconds < ENDED_MS / 1000:
            break
        await database.move(ENDED_MS / 1000)


async def test_acks_from_before_the_clock_was_set_back_are_forgotten_later(database: Database) -> None:
    broker = await database.open()
    ring = await ring_of(broker)
    await broker.create_topic("jobs")

    async def work(times: int, seconds: float) -> None:
        for _ in range(times):
            await broker.enqueue("jobs", b"x")
            (message,) = await broker.pop("jobs", visibility=3600)
            await message.ack()
            await database.move(seconds)
            await ring.sweep()

    await work(2, -3600)
    await work(12, ENDED_MS / 1000)
    acks = await database.admin.fetch("SELECT a.at FROM acked AS a JOIN topics AS t ON t.id = a.topic")
    assert 2 <= len(acks) <= ENDED_SLOTS
    assert max(row["at"] for row in acks) < database.ms


# -- what waits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", BACK)
async def test_delayed_messages_become_ready_once(database: Database, seconds: int) -> None:
    broker = await database.open()
    ring = await ring_of(broker)
    await broker.create_topic("jobs")
    delays = [1, 59, 61, 125, 250, 3000]
    began = database.ms
    await broker.enqueue_batch("jobs", [Outgoing(b"%d" % delay, delay=delay) for delay in delays])
    await database.move(2)
    await broker.node.tick()
    await database.move(-seconds)
    await broker.enqueue_batch("jobs", [Outgoing(b"%d" % (5000 + n), delay=n) for n in (1, 59, 61, 125)])
    found: dict[bytes, int] = {}
    while database.ms < began + 3100_000:
        await ring.sweep()
        await broker.node.tick()
        for message in await broker.pop("jobs", 20, visibility=43_200):
            assert message.payload not in found
            found[message.payload] = database.ms
        await database.move(10 if database.ms < began else 59)
        if seconds == 3600 and began - 3_000_000 < database.ms < began - 200_000:
            await database.move((began - 200_000 - database.ms) / 1000)
    assert len(found) == len(delays) + 4
    assert all(found[b"%d" % delay] >= began + 1000 * delay for delay in delays[1:])


async def test_schedule_fires_each_time_once(database: Database) -> None:
    broker = await database.open()
    await broker.create_topic("jobs")
    await broker.create_schedule("tick", topic="jobs", every=60)
    for _ in range(3):
        await database.move(61)
        await broker.fire_schedules()
    fired = (await broker.stats("jobs")).ready
    await database.move(-125)
    for _ in range(2):
        await broker.fire_schedules()
        await database.move(61)
    assert (await broker.stats("jobs")).ready == fired >= 2
