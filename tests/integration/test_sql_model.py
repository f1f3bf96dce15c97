"""The Postgres broker against a naive model: two nodes, a clock that the test advances, rings that turn at any time.

Every pop must return exactly the best messages, in order, whichever node serves it and however the slots were turned.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline import Message, Outgoing
from tests.conformance.worlds import SqlWorld
from tests.valkey import fresh_redis

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import rings  # noqa: E402 - needs asyncpg

STEPS = 250
K = 12  # of the topic with prefetched messages
SLOT_BYTES = 8192  # one page, so that almost every step could close a slot


@dataclass
class Row:
    """One message of the model."""

    id: int
    priority: int
    due: int
    wake: int | None  # delayed until then
    ttl: int | None
    attempts: int = 0
    lease: Message | None = None
    until: int = 0
    is_dead: bool = False
    expires: int = 1 << 62

    def __post_init__(self) -> None:
        self.set_due(self.due)

    def set_due(self, due: int) -> None:
        self.due = due
        if self.ttl is not None:
            self.expires = due + self.ttl

    @property
    def is_ready(self) -> bool:
        return self.wake is None and self.lease is None and not self.is_dead

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.priority, self.due, self.id


class Model:
    """A list of all messages."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def of(self, *states: str) -> list[Row]:
        tests = {
            "ready": lambda r: r.is_ready,
            "delayed": lambda r: r.wake is not None,
            "leased": lambda r: r.lease is not None,
            "dead": lambda r: r.is_dead,
        }
        return [row for row in self.rows.values() if any(tests[state](row) for state in states)]

    def best(self, count: int) -> list[Row]:
        return sorted(self.of("ready"), key=lambda row: row.rank)[:count]

    def give_back(self, row: Row, now: int, wake: int | None = None) -> None:
        """A lease ended without an ack."""
        row.lease = None
        if row.expires <= now:
            del self.rows[row.id]
        else:
            row.wake = wake

    def tick(self, now: int) -> None:
        for row in self.of("leased"):
            if row.until <= now:
                self.give_back(row, now)
        for row in self.of("ready", "delayed"):
            if row.expires <= now:
                del self.rows[row.id]
            elif row.wake is not None and row.wake <= now:
                row.wake = None

    def counts(self) -> tuple[int, ...]:
        return tuple(len(self.of(state)) for state in ("ready", "delayed", "leased", "dead"))


class Run:
    """Random steps on two nodes, each checked against the model."""

    def __init__(self, world: SqlWorld, nodes: list[Any], seed: int) -> None:
        self.world, self.nodes, self.rng, self.model = world, nodes, random.Random(seed), Model()
        self.turned = 0

    @property
    def node(self) -> Any:
        return self.rng.choice(self.nodes)

    async def enqueue(self) -> None:
        now, rng = self.world.ms, self.rng
        delay, ttl = rng.choice([0, 0, 0.05, 1.5]), rng.choice([None, None, 0.5, 3.0])
        batch = [
            Outgoing(b"x" * rng.randrange(2000), priority=rng.randrange(8), delay=delay, ttl=ttl)
            for _ in range(rng.randint(1, 8))
        ]
        due = now + (round(delay * 1000) + 1 if delay else 0)
        for message, result in zip(batch, await self.node.enqueue_batch("jobs", batch), strict=True):
            ttl_ms = None if ttl is None else round(ttl * 1000)
            self.model.rows[result.id] = Row(result.id, message.priority, due, due if delay else None, ttl_ms)

    async def pop(self) -> None:
        count, visibility = self.rng.randint(1, 12), self.rng.choice([0.2, 2.0, 60.0])
        expected = self.model.best(count)
        messages = await self.node.pop("jobs", count, visibility=visibility, max_bytes=1 << 30)
        assert [m.id for m in messages] == [row.id for row in expected]
        for row, message in zip(expected, messages, strict=True):
            row.lease, row.attempts, row.until = message, row.attempts + 1, self.world.ms + round(visibility * 1000)
            assert (message.attempts, message.priority) == (row.attempts, row.priority)

    async def settle(self) -> None:
        leased = self.model.of("leased")
        some = self.rng.sample(leased, min(len(leased), self.rng.randint(1, 6)))
        held = [heapline.LeaseRef("jobs", row.id, row.lease.token) for row in some if row.lease is not None]
        node, now = self.node, self.world.ms
        way = self.rng.choice(["ack", "ack", "nack", "nack later", "release", "extend", "bury"])
        if way == "ack":
            await node.ack(held)
        elif way == "nack":
            await node.nack(held, backoff=0)
        elif way == "nack later":
            await node.nack(held, backoff=0.7)
        elif way == "release":
            await node.release(held)
        elif way == "bury":
            await node.bury(held)
        else:
            await node.extend(held, 5.0)
        for row in some:
            if way == "ack":
                del self.model.rows[row.id]
            elif way == "bury":
                row.lease, row.is_dead = None, True
            elif way == "extend":
                row.until = max(row.until, now + 5000)
            else:
                row.attempts -= way == "release"
                self.model.give_back(row, now, now + 701 if way == "nack later" else None)

    async def change(self) -> None:
        waiting = self.model.of("ready", "delayed")
        if not waiting:
            return
        row, now = self.rng.choice(waiting), self.world.ms
        way = self.rng.choice(["cancel", "priority", "later", "now"])
        if way == "cancel":
            await self.node.cancel("jobs", row.id)
            del self.model.rows[row.id]
        elif way == "priority":
            row.priority = self.rng.randrange(8)
            await self.node.reschedule("jobs", row.id, priority=row.priority)
        else:
            delay = 0.3 if way == "later" else 0
            await self.node.reschedule("jobs", row.id, delay=delay)
            row.set_due(now + (301 if delay else 0))
            row.wake = row.due if delay else None

    async def replay(self) -> None:
        dead = self.model.of("dead")
        assert await self.node.dlq_replay("jobs") == len(dead)
        for row in dead:
            row.is_dead, row.attempts = False, 0
            if row.ttl is not None:
                row.expires = self.world.ms + row.ttl  # it restarts now, and the position in the order stays

    async def pass_time(self) -> None:
        await self.world._move_clock(self.rng.choice([0.01, 0.1, 0.6, 2.0]))
        await self.node.node.tick()
        self.model.tick(self.world.ms)

    async def turn(self) -> None:
        node = self.node
        await rings.Rings(node.node.shards[0], SLOT_BYTES).turn()
        self.turned = await self.world.admins[0].fetchval("SELECT last_value FROM ready_turn")

    async def compare(self) -> None:
        stats = await self.node.stats("jobs")
        assert (stats.ready, stats.delayed, stats.leased, stats.dead) == self.model.counts()

    @property
    def kinds(self) -> dict[Any, int]:
        """The steps, and how often each is chosen."""
        return {
            self.enqueue: 20, self.pop: 20, self.settle: 20, self.change: 8, self.replay: 2, self.pass_time: 8,
            self.turn: 20, self.compare: 2,
        }  # fmt: skip

    async def steps(self) -> None:
        kinds = self.kinds
        for _ in range(STEPS):
            (step,) = self.rng.choices(list(kinds), list(kinds.values()))
            await step()
        await self.compare()
        assert self.turned > 16, "too few turns to prove anything"


class PrefetchRun(Run):
    """The model with a ready queue in Redis, which may lose and resurrect entries. The order is not strict."""

    resurrected: Any = None

    async def pop(self) -> None:
        count = self.rng.choice([1, 1, 1, 2, 3, 12])
        ready = self.model.best(1 << 30)
        messages = await self.node.pop("jobs", count, visibility=2.0, max_bytes=1 << 30)
        assert len(messages) <= count
        assert bool(messages) == bool(ready)
        taken = {message.id for message in messages}
        for message in messages:
            row = self.model.rows[message.id]
            assert row.is_ready
            better = sum(other.rank < row.rank for other in ready if other.id not in taken)
            assert better < K, "worse than the k best"
            self.skipped = max(self.skipped, better)
            row.lease, row.attempts, row.until = message, row.attempts + 1, self.world.ms + 2000
            assert (message.attempts, message.priority) == (row.attempts, row.priority)

    skipped = 0  # the most messages that a pop skipped

    async def disturb_redis(self) -> None:
        redis = self.nodes[0].node.redis
        way = self.rng.choice(["empty", "save", "resurrect"])
        keys = list(await redis.run(lambda client: client.keys("mqueue:queue:*")))
        if way == "empty":
            await redis.run(lambda client: client.flushdb())
        elif keys and way == "save":
            self.resurrected = keys[0], await redis.run(lambda client: client.zrange(keys[0], 0, -1))
        elif self.resurrected is not None:
            key, entries = self.resurrected
            if entries:
                await redis.run(lambda client: client.zadd(key, dict.fromkeys(entries, 0)))

    async def settle_queues(self) -> None:
        await asyncio.sleep(0)
        for node in self.nodes:
            await node.node.tasks.join()

    @property
    def kinds(self) -> dict[Any, int]:
        return {**super().kinds, self.disturb_redis: 4, self.settle_queues: 20, self.enqueue: 40}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[SqlWorld]:
    world = SqlWorld(tmp_path)
    await world.start()
    yield world
    await world.stop()


@pytest.mark.usefixtures("old_transaction")
@pytest.mark.parametrize("seed", range(3))
async def test_two_nodes_agree_with_the_model(world: SqlWorld, seed: int) -> None:
    await world.broker.create_topic("jobs", backoff=heapline.Backoff(base=0), max_retries_default=250)
    async with heapline.sql.open(world.databases[world.shards]) as other:
        for node in (world.broker, other):
            await node.node.timekeepers[0].close()  # the run decides when time passes and rings turn
        await Run(world, [world.broker, other], seed).steps()


@pytest.mark.parametrize("seed", range(4))
async def test_prefetching_nodes_agree_with_the_model(world: SqlWorld, seed: int) -> None:
    """No message is delivered twice or early, and none that is worse than the k best."""
    redis, databases = fresh_redis(), world.databases[world.shards]
    await world.broker.create_topic("jobs", k=K, backoff=heapline.Backoff(base=0), max_retries_default=250)
    async with (
        heapline.sql.open(databases, redis=redis) as first,
        heapline.sql.open(databases, redis=redis) as second,
    ):
        for node in (world.broker, first, second):
            await node.node.timekeepers[0].close()  # the run decides when time passes and rings turn
        run = PrefetchRun(world, [first, second], seed)
        await run.steps()
        assert run.skipped > 0, "every pop was strict, which proves nothing"


@pytest.fixture(params=[False, True], ids=["free", "held"])
async def old_transaction(world: SqlWorld, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Optionally a transaction that keeps vacuum, and index scans, from removing deleted rows."""
    connection = await asyncpg.connect(world.databases[world.shards][0])
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    if request.param:
        await connection.fetchval("SELECT txid_current()")
    yield
    await transaction.rollback()
    await connection.close()
