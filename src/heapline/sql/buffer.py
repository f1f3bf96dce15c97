"""Enqueues that are acknowledged by the node's write-ahead log, before Postgres has them.

Accepted here are enqueues without idempotency keys or sequences, on topics whose order is not strict (k > 1) and whose
backlog is not limited: the database has to decide about the others. Neither does an enqueue ask the database: each
topic's settings, the time and the lease of the node id are read once per `fresh` seconds, so a change that another node
makes is noticed after that time at most.

The time here is the database's, continued by this machine's boot clock from before the request was sent: it is never
behind the database, so no message becomes due early. Ids are minted only while the lease of the node id has not ended
by that time. A node that was paused cannot mint an id of another's: an id contains the time that was compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heapline.clock import Clock
from heapline.contract.message import Enqueued
from heapline.owned_tasks import KeyedLocks
from heapline.sql.flusher import Flusher
from heapline.sql.node_id import NodeIdLost
from heapline.sql.rows import NewRow, check_rows, values_of
from heapline.sql.shard import Name, Shard, Topic
from heapline.sql.wal import BATCH_BYTES_MAX, BATCH_VERSION, Batch, Wal

VIEWS_MAX = 10_000  # topics


class View(NamedTuple):
    """A topic as it was read a short time ago."""

    topic: Topic
    now: int  # ms, by the database's clock
    read_at: int  # boot ms, before it was read
    node: int  # the node id then
    node_until: int | None


class WriteBuffer:
    def __init__(self, shard: Shard, wal: Wal, flusher: Flusher, clock: Clock, fresh: float) -> None:
        self._shard, self.wal, self.flusher, self._clock = shard, wal, flusher, clock
        self._fresh_ms = round(fresh * 1000)
        self._views: dict[Name, View] = {}
        self._reading: KeyedLocks[Name] = KeyedLocks()

    def forget(self, name: Name | None = None) -> None:
        """Read a topic again before it is used, or all of them."""
        if name is None:
            self._views.clear()
        else:
            self._views.pop(name, None)

    async def _view(self, name: Name) -> View:
        view = self._views.get(name)
        if view is not None and self._is_fresh(view):
            return view
        async with self._reading.alone(name):
            view, boot = self._views.get(name), self._clock.boot_ms()
            if view is None or not self._is_fresh(view):
                number = self._shard.node.number
                turn = await self._shard.read_topic(name)
                view = View(turn.topic, turn.now, boot, number, turn.node_until)
                if len(self._views) >= VIEWS_MAX:
                    self._views.clear()
                self._views[name] = view
            return view

    def _is_fresh(self, view: View) -> bool:
        return view.node == self._shard.node.number and self._clock.boot_ms() - view.read_at <= self._fresh_ms

    async def enqueue(self, name: Name, rows: Sequence[NewRow], atomic: bool) -> list[Enqueued] | None:
        """Store rows in the log. Return None if they must be stored in the database instead."""
        if not self.wal.is_usable or sum(row.nbytes for row in rows) > BATCH_BYTES_MAX:
            return None
        view = await self._view(name)
        topic, config = view.topic, view.topic.config
        if config.k == 1 or config.max_backlog:
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
            values = [values_of(row, id, topic.ordering, now) for row, id in zip(good, ids, strict=True)]
            unit, durable = self.wal.append(Batch(BATCH_VERSION, topic.id, *name, values))
            self.flusher.appended(name.canonical, unit)
            await durable
        results = iter([Enqueued(id, id_suffix=topic.id_suffix) for id in ids])
        return [
            Enqueued(0, error=invalid[i], id_suffix=topic.id_suffix) if i in invalid else next(results)
            for i in range(len(rows))
        ]
