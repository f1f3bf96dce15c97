"""Store messages that were acknowledged before Postgres had them: by COPY, in the transaction of a flush.

Messages of a topic that was deleted meanwhile are dropped; if it was created again, they go there, because they may
have been meant for it. The caller knows which units have not been stored before, and records them in the transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, NamedTuple

import asyncpg

from heapline.core.ids import unix_ms_of
from heapline.logs import Log
from heapline.sql.events import record_new
from heapline.sql.insert import insert, taken_ids
from heapline.sql.layout import COLUMNS, Layout
from heapline.sql.rows import NOTHING, columns_of
from heapline.sql.shard import Name, Shard, Topic, topic_of
from heapline.sql.statements import statement
from heapline.sql.timekeeper import Timekeeper
from heapline.sql.wal import Batch

log = Log("heapline.sql")
READY_COLUMNS = ("slot", *COLUMNS.split(", "))


class Stored(NamedTuple):
    """The stored messages, once the transaction has committed."""

    topics: list[Topic]
    deadline: int | None  # when time alone changes something about the messages


class UnitStore:
    def __init__(self, shard: Shard, timekeeper: Timekeeper) -> None:
        self._shard, self._timekeeper = shard, timekeeper

    async def store(self, connection: asyncpg.Connection, layout: Layout, batches: Sequence[Batch]) -> Stored:
        topics = await self._topics(connection, batches, layout.now)
        ready: list[tuple[Any, ...]] = []
        delayed: dict[int, list[tuple[Any, ...]]] = {}  # by topic
        deadlines: list[int] = []
        slot = layout.open("ready")
        for batch, ids in zip(batches, await self._free_ids(connection, layout, batches, topics), strict=True):
            topic = topics.get(_name_of(batch))
            if topic is None:
                log.info("topic was deleted; its messages are dropped", topic=batch.name, count=len(batch.rows))
                continue
            rows = list(self._rows(batch, topic, ids))
            for is_delayed in (False, True) if topic.config.retention else ():
                some = columns_of([row for row in rows if (row[2] > layout.now) == is_delayed])
                await record_new(connection, topic.id, topic.config, layout.now, some, is_delayed)
            for row in rows:
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
        for id, later in delayed.items():
            await insert(connection, layout, id, NOTHING, columns_of(later))
        return Stored(list(topics.values()), min(deadlines, default=None))

    def committed(self, stored: Stored) -> None:
        """Wake pops, and let the timekeeper act when it has to."""
        for topic in stored.topics:
            self._shard.wakeups.wake(topic.name)
        if stored.deadline is not None:
            self._timekeeper.expect(stored.deadline)

    async def _free_ids(
        self, connection: asyncpg.Connection, layout: Layout, batches: Sequence[Batch], topics: Mapping[Name, Topic]
    ) -> list[list[int]]:
        """Return the ids under which the messages of each batch are stored: another one if theirs is taken.

        They were acknowledged, so they must be stored.
        """
        ids = [[row[0] for row in batch.rows] for batch in batches]
        flat = list(chain.from_iterable(ids))
        taken = await taken_ids(connection, layout, flat)
        late = {_name_of(batch) for batch in batches if any(row[2] > layout.now for row in batch.rows)}
        if late:
            where = [topic.id for name, topic in topics.items() if name in late]
            taken |= {row["id"] for row in await connection.fetch(statement("taken_delayed"), where, flat)}
        if not taken and len(set(flat)) == len(flat):
            return ids
        log.error("message id conflict; giving other ids", shard=self._shard.index, ids=_repeated(flat, taken))
        node = self._shard.node
        until = await connection.fetchval(statement("node_until"), node.number, node.owner)
        others = iter(node.mint(len(_repeated(flat, taken)), layout.now, until))
        for row in ids:
            for i, id in enumerate(row):
                if id in taken:
                    row[i] = next(others)
                else:
                    taken.add(id)
        return ids

    def _rows(self, batch: Batch, topic: Topic, ids: Sequence[int]) -> Iterable[tuple[Any, ...]]:
        """Return the messages of a batch as they are stored, in the order of rows.Stored."""
        for id, (_, key, due, priority, *rest) in zip(ids, batch.rows, strict=True):
            if topic.id != batch.topic:  # created again, perhaps with another order
                key = topic.ordering.key(priority, unix_ms_of(id))
            yield (id, key, due, priority, *rest)

    async def _topics(self, connection: asyncpg.Connection, batches: Sequence[Batch], now: int) -> dict[Name, Topic]:
        """Return the topics that have these names now.

        The incarnation in the log does not identify one: after a failover to an older state, another topic may have it.
        """
        wanted = {_name_of(batch) for batch in batches}
        rows = await connection.fetch(statement("topics_by_name"), *map(list, zip(*wanted, strict=True)))
        names = [Name(row["namespace"], row["name"]) for row in rows]
        return {name: topic_of(name, row, now) for name, row in zip(names, rows, strict=True)}


def _name_of(batch: Batch) -> Name:
    return Name(batch.namespace, batch.name)


def _repeated(ids: Sequence[int], taken: AbstractSet[int]) -> list[int]:
    """Return the ids that are taken, or repeat an earlier one."""
    counts = Counter(ids)
    return [id for id, count in counts.items() for _ in range(count if id in taken else count - 1)]
