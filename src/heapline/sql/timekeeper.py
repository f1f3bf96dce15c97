"""Changes that time causes on one shard: leases end, delayed messages become ready, messages expire.

Every node does it for every shard it uses, in slices that skip rows which another node is handling. A node sleeps until
the next deadline that it knows, at most for the poll interval, so deadlines set by other nodes are met too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import asyncpg
import numpy as np

from heapline.contract.config import PASSING, TopicConfig
from heapline.contract.errors import HeaplineError
from heapline.core.dedup.sequences import PASSED_MS
from heapline.core.partition import LEASE_EXPIRED
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.config import SqlConfig
from heapline.sql.counters import Counters
from heapline.sql.delayed import FOREVER, FiredUpTo, fire
from heapline.sql.events import EventKeeper
from heapline.sql.layout import Layout
from heapline.sql.retries import Held, Outcomes, retry
from heapline.sql.rings import Rings
from heapline.sql.settlement import settle
from heapline.sql.shard import Name, Shard, Topic, topic_of
from heapline.sql.statements import statement

log = Log("heapline.sql")
SLICE = 1000  # rows per transaction
RING_SECONDS = 0.5  # between checks of the rings
RECLAIM_SECONDS = 2.0  # until a slot that had too many rows is checked again
SWEEP_SECONDS = 10.0  # between checks for slots whose time is over
EVENTS_SECONDS = 1.0  # between two rounds that give events their offsets
FORGET_SECONDS = 10.0  # between deletions of identities that are too old
PAUSE_SECONDS = 0.02  # at least, between two checks for what is due
_draw = np.random.default_rng().random


class Change(NamedTuple):
    """The changes of a transaction to a topic."""

    timeouts: int = 0
    dead: int = 0
    expired: int = 0
    dead_expired: int = 0
    wakes: bool = False  # messages became ready, or leases ended


class Done(NamedTuple):
    """The changes of a transaction. They are counted once it has committed."""

    rows: int
    changes: list[tuple[Topic, Change]]


class Timekeeper:
    def __init__(self, shard: Shard, config: SqlConfig, counters: Callable[[str], Counters]) -> None:
        self._shard, self._config, self._counters = shard, config, counters
        self.rings = Rings(shard, pause=RECLAIM_SECONDS)
        self.events = EventKeeper(shard)
        self._next = FOREVER  # the first deadline that is known, ms
        self._fired = FiredUpTo(config.poll_interval)
        self._read_at = 0  # the database's time when the deadlines were read, ms
        self._started = 0.0  # this process's time then
        self._sooner = asyncio.Event()
        self._ticking = asyncio.Lock()
        self._tasks = OwnedTasks()

    def start(self) -> None:
        self._tasks.spawn(self._forever(self._until_next, self.tick))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(RING_SECONDS), self.rings.advance))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(SWEEP_SECONDS), self.rings.sweep))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(EVENTS_SECONDS), self.events.number))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(SWEEP_SECONDS), self.events.turn))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(FORGET_SECONDS), self._forget))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(FORGET_SECONDS), self.expire_dead_letters))
        self._tasks.spawn(self._forever(lambda: asyncio.sleep(self._config.node_lease / 3), self._renew))

    async def close(self) -> None:
        await self._tasks.cancel()

    def expect(self, at: int) -> None:
        """Act at this time, or earlier."""
        self._fired.lower(at)
        self._wake_at(at)

    def _wake_at(self, at: int) -> None:
        if at < self._next:
            self._next = at
            self._sooner.set()

    async def _forever(self, pause: Callable[[], Any], work: Callable[[], Any]) -> None:
        while True:
            try:
                await pause()
                await work()
                continue
            except HeaplineError as error:
                log.warning("maintenance failed; will retry", shard=self._shard.index, error=str(error))
            except Exception:  # a failed check must not stop the checks that follow
                log.exception("maintenance failed; will retry", shard=self._shard.index)
            await asyncio.sleep(PAUSE_SECONDS)  # a pause that fails must not become a busy loop

    # -- time ------------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Do everything that is due by now."""
        async with self._ticking:
            await self._repeat(self._end_leases)
            await self._fire_all()
            await self._repeat(self._expire_ready)

    async def _repeat(self, work: Callable[[asyncpg.Connection], Awaitable[Done]]) -> None:
        """Run transactions until nothing is left."""
        while (done := await self._shard.run(work)).rows:
            for topic, change in done.changes:
                self._report(topic, change)
            if done.rows < SLICE:
                return

    async def _fire_all(self) -> None:
        """Fire all delayed messages that are due."""
        began, seen = time.monotonic(), 0
        after = self._fired.start(began)

        async def work(connection: asyncpg.Connection) -> Done:
            nonlocal seen
            layout = await self._shard.read_layout(connection)
            fired = await fire(connection, layout, after, SLICE)
            topics = await self._topics(connection, fired.ready | fired.expired.keys(), layout.now)
            seen = layout.now
            changes = [
                (topic, Change(expired=fired.expired.get(topic.id, 0), wakes=topic.id in fired.ready))
                for topic in topics.values()
            ]
            return Done(fired.rows, changes)

        await self._repeat(work)
        self._fired.end(seen, began, time.monotonic())

    def _report(self, topic: Topic, change: Change) -> None:
        """Count what was committed, and wake pops."""
        counters = self._counters(topic.name)
        counters.timeouts += change.timeouts
        counters.dead += change.dead
        counters.expired += change.expired
        counters.dead_expired += change.dead_expired
        if change.dead_expired:
            log.info("dead letters expired", topic=topic.name, count=change.dead_expired)
        if change.wakes:
            self._shard.wakeups.wake(topic.name)

    async def _until_next(self) -> None:
        """Sleep until the next deadline, at most for the poll interval."""
        await self._read_next()
        latest = time.monotonic() + self._config.poll_interval
        while True:
            due = self._started + (self._next - self._read_at) / 1000
            left = min(latest, max(due, self._started + PAUSE_SECONDS)) - time.monotonic()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._sooner.wait()
            except TimeoutError:
                return
            self._sooner.clear()

    async def _read_next(self) -> None:
        self._sooner.clear()
        self._next = FOREVER
        try:
            async with self._shard.connection() as connection:
                self._started = time.monotonic()
                self._read_at = (await self._shard.read_layout(connection)).now
                found = await connection.fetchval(statement("next_deadline"), self._fired.time)
        except HeaplineError as error:
            log.warning("cannot read the next deadline; will retry", shard=self._shard.index, error=str(error))
            return
        if found is not None:
            self._wake_at(found)

    async def _end_leases(self, connection: asyncpg.Connection) -> Done:
        """Return messages whose lease has ended to the queue, or to the dead letters."""
        layout = await self._shard.read_layout(connection)
        now = layout.now
        rows = await connection.fetch(statement("overdue_leases"), now, SLICE)
        topics = await self._topics(connection, {row["topic"] for row in rows}, now)
        groups: dict[tuple[int, int], list[Held]] = {}
        for slot, topic, *held in rows:
            groups.setdefault((slot, topic), []).append(Held(*held))
        changes: list[tuple[Topic, Change]] = []
        for (slot, topic_id), held in groups.items():
            if topic_id in topics:
                outcomes = await self._return(connection, layout, slot, topics[topic_id], held)
                timeouts = len(outcomes.ready) + len(outcomes.delayed)
                change = Change(timeouts, len(outcomes.dead), len(outcomes.expired), wakes=True)
                changes.append((topics[topic_id], change))
            else:  # deleted
                await connection.execute(statement("delete_leases_of_topic"), topic_id)
        return Done(len(rows), changes)

    async def _return(
        self, connection: asyncpg.Connection, layout: Layout, slot: int, topic: Topic, held: list[Held]
    ) -> Outcomes:
        outcomes = retry(held, topic.config, layout.now, None, _draw)
        await settle(
            connection,
            layout,
            slot,
            topic.id,
            topic.config,
            outcomes,
            kind="lease_expired",
            reason=LEASE_EXPIRED,
            cause=LEASE_EXPIRED,
        )
        return outcomes

    async def _expire_ready(self, connection: asyncpg.Connection) -> Done:
        """Remove ready messages whose time to live has ended."""
        layout = await self._shard.read_layout(connection)
        now = layout.now
        expire = layout.to_ended("expire_ready")
        counts = {row["topic"]: row["count"] for row in await connection.fetch(expire, now, SLICE)}
        topics = await self._topics(connection, counts, now)
        return Done(sum(counts.values()), [(t, Change(expired=counts[t.id])) for t in topics.values()])

    async def _topics(self, connection: asyncpg.Connection, ids: Iterable[int], now: int) -> dict[int, Topic]:
        wanted = list(ids)
        if not wanted:
            return {}
        rows = await connection.fetch(statement("topics_by_id"), wanted)
        return {row["id"]: topic_of(Name(row["namespace"], row["name"]), row, now) for row in rows}

    # -- maintenance -----------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        async with self._shard.connection() as connection:
            await self._shard.node.renew(connection)
            await self._shard.find_others(connection)

    async def expire_dead_letters(self) -> None:
        """Delete dead letters that are too old or too many, oldest first."""
        await self._repeat(self._expire_dead)

    async def _expire_dead(self, connection: asyncpg.Connection) -> Done:
        layout = await self._shard.read_layout(connection)
        rows = await connection.fetch(statement("outdated_dead"), layout.now, SLICE, TopicConfig().dlq_retention)
        topics = await self._topics(connection, [row["topic"] for row in rows], layout.now)
        changes, read, end = [], 0, layout.to_ended("dead_to_ended")
        for row in rows:
            # Another node may have replayed a letter since, and it may have died again: `last` is before that.
            count = await connection.fetchval(end, row["topic"], row["ids"], layout.now, row["last"])
            read = max(read, len(row["ids"]))
            if count and row["topic"] in topics:
                changes.append((topics[row["topic"]], Change(dead_expired=count)))
        return Done(read, changes)

    async def _forget(self) -> None:
        """Delete identities that are older than their window."""

        async def work(connection: asyncpg.Connection) -> None:
            now = (await self._shard.read_layout(connection)).now
            await connection.execute(statement("delete_old_keys"), now, 10 * SLICE)
            await connection.execute(statement("delete_old_namespace_keys"), now, 10 * SLICE)
            for row in await connection.fetch(statement("old_sequences"), now):
                await connection.execute(statement("forget_sequences"), *row)
            await connection.execute(statement("delete_passed_producers"), PASSING + "%", now - PASSED_MS)

        await self._shard.run(work)
