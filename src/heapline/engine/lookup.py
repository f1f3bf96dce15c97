"""Calls on single messages by id (get, peek, cancel, reschedule), and the information about a message that they return.

A record may have to be read from disk between two reads of the state, so each call reads the state again afterwards;
the last state is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from heapline.contract.call import Page, cursor_of, read_cursor
from heapline.contract.check import fail, instant_to_ms, seconds_to_ms
from heapline.contract.errors import MessageLeased, MessageNotFound
from heapline.contract.message import MessageInfo, State, from_ms
from heapline.core.entries import DEAD, DELAYED, LEASED, READY, Found
from heapline.core.events import I64
from heapline.core.ids import partition_of, unix_ms_of
from heapline.core.leases import DEADLINE, HOLDER, TOKEN
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.record import FLAG_WALL, attempts_of, size_bound
from heapline.engine.delivery import split_small
from heapline.engine.runner import TopicRunner
from heapline.engine.topic import Topic
from heapline.journal.records import Records

_STATES: dict[int, State] = {READY: "ready", DELAYED: "delayed", LEASED: "leased", DEAD: "dead"}
PEEK_MAX = 10_000


class Record:
    """One record that was read."""

    def __init__(self, records: Any, index: int) -> None:
        row = records.rows[index]
        self.id = int(row["id"])
        self.priority = int(row["priority"])
        self.enqueued_at = int(row["enqueued_at"])
        self.due = int(row["due"])
        self.ttl_ms = int(row["ttl_ms"])
        self.flags = int(row["flags"])
        self.wall = bool(self.flags & FLAG_WALL)
        self.payload: bytes = records.payloads[index]
        self.key, self.fairness_key, headers = split_small(
            records.smalls[index], int(row["key_len"]), int(row["fairness_len"]), self.flags
        )
        self.headers = headers or {}

    @property
    def due_at(self) -> int:
        return self.due or self.enqueued_at


def living(topic: Topic, partition: Partition, id: int, found: Found, record: Record | None) -> MessageInfo:
    """Return the information about a live message."""
    touched = partition.entries.touched.get(id)
    lease = partition.entries.leases.by_id.get(id)
    dead = partition.entries.dead.get(id)
    due = expires = None
    priority = None
    if record is not None:
        priority = record.priority
        due = record.due_at
        expires = record.due_at + record.ttl_ms if record.ttl_ms else None
    if found.due:
        due = found.due
    if touched is not None:
        expires = touched.expires or None
        if touched.priority is not None:
            priority = touched.priority
    return MessageInfo(
        id=id,
        id_suffix=topic.id_suffix,
        topic=topic.name,
        partition=partition.number,
        state=_STATES[found.place],
        priority=priority,
        attempts=attempts_of(found.position),
        due_at=None if due is None else from_ms(due),
        enqueued_at=from_ms(record.enqueued_at if record is not None else unix_ms_of(id)),
        expires_at=None if expires is None or dead is not None else from_ms(expires),
        deadline=None if lease is None else from_ms(lease[DEADLINE]),
        holder=None if lease is None else lease[HOLDER],
        reason=dead.reason if dead is not None else partition.entries.reasons.get(id),
        ended_at=None if dead is None else from_ms(dead.at),
        payload=None if record is None else record.payload,
        key=None if record is None else record.key,
        headers={} if record is None else record.headers,
        fairness_key=None if record is None else record.fairness_key,
    )


def departed(topic: Topic, partition: Partition, id: int) -> MessageInfo:
    """Return how a message ended, while that is remembered."""
    gone = partition.state.gone.find(id)
    if gone is None:
        raise MessageNotFound(topic.name, topic.ulid(id))
    how: Any = gone.how
    return MessageInfo(
        id=id,
        id_suffix=topic.id_suffix,
        topic=topic.name,
        partition=partition.number,
        state=how,
        reason=gone.reason,
        ended_at=from_ms(gone.at),
        enqueued_at=from_ms(unix_ms_of(id)),
    )


def owner_of(topic: Topic, id: int) -> Partition:
    number = partition_of(id)
    if number >= len(topic.partitions):
        raise MessageNotFound(topic.name, topic.ulid(id))
    return topic.partitions[number]


async def read_records(runner: TopicRunner, positions: Sequence[int]) -> list[Record | None]:
    """Return the records at these positions; None for a corrupt one."""
    records = await load_records(runner, np.array(positions, dtype=np.int64))
    return [None if i in records.bad else Record(records, i) for i in range(len(positions))]


async def load_records(runner: TopicRunner, positions: I64) -> Records:
    records, missing = runner.loaded.journal.cached(positions)
    if len(missing):
        records.fill(missing, await runner.load(positions[missing]))
    return records


def owner(runner: TopicRunner, id: int) -> Partition:
    return owner_of(runner.loaded.topic, id)


def waiting(runner: TopicRunner, id: int) -> Found:
    """Return where a message waits. Raise if it is leased, dead or deleted."""
    found = owner(runner, id).entries.find(id)
    if found is None or found.place == DEAD:
        raise MessageNotFound(runner.name, runner.loaded.topic.ulid(id))
    if found.place == LEASED:
        raise MessageLeased(runner.name, runner.loaded.topic.ulid(id))
    return found


async def get(runner: TopicRunner, id: int) -> MessageInfo:
    found = await runner.call(lambda now: owner(runner, id).entries.find(id))
    record = None if found is None else (await read_records(runner, [found.position]))[0]

    def answer(now: Now) -> MessageInfo:
        partition = owner(runner, id)
        current = partition.entries.find(id)
        if current is None:
            return departed(runner.loaded.topic, partition, id)
        return living(runner.loaded.topic, partition, id, current, record)

    return await runner.call(answer)


async def lease_of(runner: TopicRunner, id: int) -> tuple[int, str | None] | None:
    """Return token and holder of a message's lease, or None if it is not leased.

    Read in a turn, so the answer waits until that lease is durable, for two reasons. A token is the offset of the row
    that granted it: if that row were lost with a failed commit, the topic reloaded from disk would give the same number
    to another lease, and a caller with the token would act on that one. And an expiry that a crash may undo must not
    make this return None.
    """

    def look(now: Now) -> tuple[int, str | None] | None:
        number, partitions = partition_of(id), runner.loaded.topic.partitions
        lease = partitions[number].entries.leases.by_id.get(id) if number < len(partitions) else None
        return None if lease is None else (lease[TOKEN], lease[HOLDER])

    return await runner.call(look)


async def peek(runner: TopicRunner, limit: int, cursor: str | None, max_bytes: int) -> Page[MessageInfo]:
    """Return the next messages in order, as far as they are still ready when their records have been read."""
    skip = read_cursor(cursor, int, 0)
    if not 0 <= skip < PEEK_MAX:
        fail("cursor", "one that the previous page returned", cursor)
    limit = min(limit, PEEK_MAX - skip)

    def first(now: Now) -> list[tuple[int, int, int]]:
        heads = [p.eligible(skip + limit + 1) for p in runner.loaded.topic.partitions]
        rows = [row for head in heads for row in zip(*(column.tolist() for column in head), strict=True)]
        return sorted(rows)[skip : skip + limit + 1]

    rows = await runner.call(first)
    sizes = np.cumsum(size_bound(np.array([position for _, _, position in rows], dtype=np.int64)))
    count = min(limit, max(1, int(np.searchsorted(sizes, max_bytes, side="right"))), len(rows))
    more = len(rows) > count and skip + count < PEEK_MAX
    rows = rows[:count]
    records = await read_records(runner, [position for _, _, position in rows])

    def answer(now: Now) -> list[MessageInfo]:
        infos = []
        for (_, id, _), record in zip(rows, records, strict=True):
            partition = owner(runner, id)
            found = partition.entries.find(id)
            if found is not None:
                infos.append(living(runner.loaded.topic, partition, id, found, record))
        return infos

    return Page(await runner.call(answer), cursor_of(skip + count) if more else None)


async def cancel(runner: TopicRunner, id: int) -> None:
    def decide(now: Now) -> None:
        found = waiting(runner, id)
        partition = owner(runner, id)
        runner.loaded.emit(partition, partition.decide_cancel(id, found), now)

    await runner.call(decide)


async def reschedule(
    runner: TopicRunner, id: int, delay: float | None, deliver_at: datetime | None, priority: int | None
) -> None:
    found = await runner.call(lambda now: waiting(runner, id))
    (record,) = await read_records(runner, [found.position])
    if record is None:
        raise MessageNotFound(runner.name, runner.loaded.topic.ulid(id))
    plan = _Reschedule(id, record, delay, deliver_at, priority)
    await runner.call(lambda now: plan.carry_out(runner, now))


class _Reschedule:
    """A reschedule whose record has been read; applied in a turn. Fields that are not given keep their values."""

    def __init__(
        self,
        id: int,
        record: Record,
        delay: float | None,
        deliver_at: datetime | None,
        priority: int | None,
    ) -> None:
        self._id = id
        self._record = record
        self._delay = delay
        self._deliver_at = deliver_at
        self._priority = priority

    def carry_out(self, runner: TopicRunner, now: Now) -> None:
        found = waiting(runner, self._id)
        partition = owner(runner, self._id)
        due, wall = self._new_due(now)
        expires, expires_wall = self._new_expiry(partition, due, wall)
        event = partition.decide_reschedule(
            self._id,
            found,
            now,
            runner.loaded.topic.take_seq(),
            priority=self._new_priority(partition),
            enqueued_at=self._record.enqueued_at,
            due=due,
            wall=wall,
            expires=expires,
            expires_wall=expires_wall,
        )
        runner.loaded.emit(partition, event, now)

    def _new_due(self, now: Now) -> tuple[int | None, bool]:
        if self._delay is not None:
            return now.steady + seconds_to_ms(self._delay), False
        if self._deliver_at is not None:
            return instant_to_ms(self._deliver_at), True
        return None, False

    def _new_expiry(self, partition: Partition, due: int | None, wall: bool) -> tuple[int, bool]:
        """Return the new expiry. A time to live counts from the due time, so a new due time moves it."""
        record = self._record
        if due is not None:
            return (due + record.ttl_ms, wall) if record.ttl_ms else (0, wall)
        touched = partition.entries.touched.get(self._id)
        if touched is not None:
            return touched.expires, touched.expires_wall
        return (record.due_at + record.ttl_ms, record.wall) if record.ttl_ms else (0, record.wall)

    def _new_priority(self, partition: Partition) -> int:
        if self._priority is not None:
            return self._priority
        touched = partition.entries.touched.get(self._id)
        if touched is not None and touched.priority is not None:
            return touched.priority
        return self._record.priority
