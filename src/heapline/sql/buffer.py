"""Enqueues that are acknowledged before Postgres has them: by the node's write-ahead log, or by Redis.

Accepted here are enqueues without idempotency keys or sequences, on topics whose order is not strict (k > 1) and whose
backlog is not limited: the database must decide about the others. An enqueue does not query the database either: each
topic's settings, the time and the lease of the node id are read once per `fresh` seconds, so a change that another node
makes is noticed after that time at most.

The time here is the database's, continued by this machine's boot clock from before the request was sent: it is never
behind the database, so no message becomes due early. Ids are minted only while the lease of the node id has not ended
by that time. A node that was paused cannot mint an id of another's: an id contains the time that was compared.

A message without a delay is due at a time that is never ahead of the database, so it is ready as soon as it is flushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from heapline.clock import Clock
from heapline.contract.config import TopicConfig
from heapline.contract.errors import CorruptionError, HeaplineError
from heapline.contract.message import Enqueued
from heapline.logs import Log
from heapline.owned_tasks import KeyedLocks
from heapline.sql.node_id import NodeIdLost
from heapline.sql.rows import NewRow, check_rows, values_of
from heapline.sql.shard import Name, Shard, Topic
from heapline.sql.wal import BATCH_BYTES_MAX, BATCH_VERSION, Batch

log = Log("heapline.sql")
DRAIN_RETRY_SECONDS = 0.2
VIEWS_MAX = 10_000  # topics


def is_buffered(config: TopicConfig) -> bool:
    """Whether enqueues on a topic may be acknowledged before Postgres has them."""
    return config.k > 1 and not config.max_backlog


class View(NamedTuple):
    """A topic as it was read a short time ago."""

    topic: Topic
    now: int  # ms, by the database's clock
    read_at: int  # boot ms, before it was read
    received_at: int  # boot ms, after it was read
    node: int  # the node id then
    node_until: int | None


class BatchFlusher(Protocol):
    """Keeps batches until they are in Postgres, and moves them there: flusher.py, redis_buffer.py."""

    def accepts(self) -> bool:
        """Whether enqueues go here now. False: to Postgres. Raise UnavailableError if they are refused."""

    async def append(self, topic: str, batch: Batch) -> None:
        """Store messages of a topic; return when they are durable."""

    async def flush(self, topic: str) -> None:
        """Wait until everything that this node has acknowledged for a topic is in Postgres."""

    async def flush_all(self) -> None:
        """Wait until everything that this node has acknowledged is in Postgres."""

    async def close(self) -> None:
        """Stop flushing."""

    async def durability(self) -> str:
        """Return what an acknowledgment means."""

    @property
    def failures_total(self) -> int:
        """Flushes that failed."""

    @property
    def depth(self) -> int:
        """Units that are not known to be in Postgres."""

    @property
    def lag_ms(self) -> int:
        """Return an upper bound of the milliseconds that the oldest of these units has waited; 0 if there is none."""

    @property
    def is_slow(self) -> bool:
        """Whether enqueues go to Postgres directly although this node is to acknowledge them earlier."""


class WriteBuffer:
    def __init__(self, shard: Shard, flusher: BatchFlusher, clock: Clock, fresh: float) -> None:
        self._shard, self.flusher, self._clock = shard, flusher, clock
        self._fresh_ms = round(fresh * 1000)
        self._views: dict[Name, View] = {}
        self._forgotten = 0  # how often something was
        self._reading: KeyedLocks[Name] = KeyedLocks()

    def forget(self, name: Name | None = None) -> None:
        """Read a topic again before it is used, or all of them. What is being read now may be old."""
        self._forgotten += 1
        if name is None:
            self._views.clear()
        else:
            self._views.pop(name, None)

    async def drain(self, seconds: float | None) -> None:
        """Flush everything, for at most this long. None: however long it takes."""
        try:
            async with asyncio.timeout(seconds):
                await self._flush_all()
        except (TimeoutError, CorruptionError):  # a damaged log stays so
            shard, units = self._shard.index, self.flusher.depth
            log.warning("messages not flushed before the end; they are flushed later", shard=shard, units=units)

    async def _flush_all(self) -> None:
        """Flush everything; while that fails, try again."""
        while True:
            try:
                await self.flusher.flush_all()
                return
            except CorruptionError:
                raise
            except HeaplineError as error:
                log.warning("flush failed; will retry", shard=self._shard.index, error=str(error))
            await asyncio.sleep(DRAIN_RETRY_SECONDS)

    async def _view(self, name: Name) -> View:
        view = self._views.get(name)
        if view is not None and self._is_fresh(view):
            return view
        async with self._reading.alone(name):
            view, boot = self._views.get(name), self._clock.boot_ms()
            if view is None or not self._is_fresh(view):
                number, forgotten = self._shard.node.number, self._forgotten
                turn = await self._shard.read_topic(name)
                view = View(turn.topic, turn.now, boot, self._clock.boot_ms(), number, turn.node_until)
                if len(self._views) >= VIEWS_MAX:
                    self._views.clear()
                if forgotten == self._forgotten:
                    self._views[name] = view
            return view

    def _is_fresh(self, view: View) -> bool:
        return view.node == self._shard.node.number and self._clock.boot_ms() - view.read_at <= self._fresh_ms

    async def enqueue(self, name: Name, rows: Sequence[NewRow], atomic: bool) -> list[Enqueued] | None:
        """Store rows. Return None if they must be stored in the database instead."""
        if sum(row.nbytes for row in rows) > BATCH_BYTES_MAX:
            return None
        view = await self._view(name)
        topic, config = view.topic, view.topic.config
        if not is_buffered(config) or not self.flusher.accepts():
            return None
        invalid = check_rows(rows, config, topic.name, atomic)
        good = [row for i, row in enumerate(rows) if i not in invalid]
        now = view.now + self._clock.boot_ms() - view.read_at
        try:
            ids = self._shard.node.mint(
                len(good), now, view.node_until if view.node == self._shard.node.number else None
            )
        except NodeIdLost:
            self.forget(name)
            return None
        if good:
            earliest = now - (view.received_at - view.read_at) - 1  # whole milliseconds: one may be missing
            values = [values_of(row, id, topic.ordering, now, earliest) for row, id in zip(good, ids, strict=True)]
            await self.flusher.append(name.canonical, Batch(BATCH_VERSION, topic.id, *name, values))
        results = iter([Enqueued(id, id_suffix=topic.id_suffix) for id in ids])
        return [
            Enqueued(0, error=invalid[i], id_suffix=topic.id_suffix) if i in invalid else next(results)
            for i in range(len(rows))
        ]
