"""Store messages that were acknowledged before Postgres had them: by COPY, in the transaction of a flush.

Messages of a topic that was deleted meanwhile are dropped; if it was created again, they go there, because they may
have been meant for it. The caller knows which units have not been stored before, and records them in the transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import asyncpg

from heapline.core.ids import unix_ms_of
from heapline.logs import Log
from heapline.sql.layout import COLUMNS, Layout, of_columns
from heapline.sql.rows import columns_of
from heapline.sql.shard import Name, Shard, Topic, topic_of
from heapline.sql.statements import statement
from heapline.sql.timekeeper import Timekeeper
from heapline.sql.wal import Batch

log = Log("heapline.sql")
READY_COLUMNS = ("slot", *COLUMNS.split(", "))


class Stored(NamedTuple):
    """What was stored, once the transaction has committed."""

    topics: list[Topic]
    deadline: int | None  # when time alone changes something about the messages


class UnitStore:
    def __init__(self, shard: Shard, timekeeper: Timekeeper) -> None:
        self._shard, self._timekeeper = shard, timekeeper
        self._renamed: dict[int, int] = {}  # ids that were stored before, of other messages -> ids given instead

    async def store(self, connection: asyncpg.Connection, layout: Layout, batches: Sequence[Batch]) -> Stored:
        topics = await self._topics(connection, batches, layout.now)
        ready: list[tuple[Any, ...]] = []
        delayed: dict[int, list[tuple[Any, ...]]] = {}  # by topic
        deadlines: list[int] = []
        slot = layout.open("ready")
        for batch in batches:
            topic = topics.get(batch.topic)
            if topic is None:
                log.info("topic was deleted; its messages are dropped", topic=batch.name, count=len(batch.rows))
                continue
            for row in self._rows(batch, topic):
                due, expires = row[2], row[5]
                if due > layout.now:
                    delayed.setdefault(topic.id, []).append(row)
                    deadlines.append(due)
                else:
                    ready.append((slot, topic.id, *row[:4], 0, *row[4:7], None, *row[7:]))
                    if expires is not None:
                        deadlines.append(expires)
        if ready:
            await connection.copy_records_to_table(f"ready_{slot}", records=ready, columns=READY_COLUMNS)
            counts = Counter(row[1] for row in ready)
            await connection.execute(statement("count_flushed"), list(counts), list(counts.values()))
        for id, rows in delayed.items():
            await connection.execute(of_columns("insert_delayed"), id, *columns_of(rows))
        return Stored(list(topics.values()), min(deadlines, default=None))

    def committed(self, stored: Stored) -> None:
        """Wake pops, and let the timekeeper act when it has to."""
        for topic in stored.topics:
            self._shard.wakeups.wake(topic.name)
        if stored.deadline is not None:
            self._timekeeper.expect(stored.deadline)

    def _rows(self, batch: Batch, topic: Topic) -> Iterable[tuple[Any, ...]]:
        """Return the messages of a batch as they are stored, in the order of rows.Stored."""
        for id, key, due, priority, *rest in batch.rows:
            id = self._renamed.get(id, id)
            if topic.id != batch.topic:  # created again, perhaps with another order
                key = topic.ordering.key(priority, unix_ms_of(id))
            yield (id, key, due, priority, *rest)

    async def _topics(self, connection: asyncpg.Connection, batches: Sequence[Batch], now: int) -> dict[int, Topic]:
        """Return topics by the incarnation in the log: the same one, or else the one that has its name now."""
        wanted = {batch.topic: Name(batch.namespace, batch.name) for batch in batches}
        rows = await connection.fetch(statement("topics_by_id"), list(wanted))
        found = {row["id"]: topic_of(Name(row["namespace"], row["name"]), row, now) for row in rows}
        for id, name in wanted.items():
            if id not in found:
                row = await connection.fetchrow(statement("topic_by_name"), *name)
                if row is not None:
                    found[id] = topic_of(name, row, now)
        return found

    async def rename(self, batches: Sequence[Batch], error: Exception) -> None:
        """Give new ids to messages whose id is taken: they were acknowledged, so they must be stored."""
        batch_of = {row[0]: batch for batch in batches for row in batch.rows}
        async with self._shard.connection() as connection:
            rows = await connection.fetch(statement("stored_ids"), list(batch_of))
        taken = [row["id"] for row in rows]
        log.error("message id conflict; giving other ids", shard=self._shard.index, ids=taken, error=str(error))
        for id in taken:
            batch = batch_of[id]
            turn = await self._shard.read_topic(Name(batch.namespace, batch.name))
            (self._renamed[id],) = self._shard.node.mint(1, turn.now, turn.node_until)
