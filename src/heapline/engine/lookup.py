"""Calls on single messages by id: get, peek, cancel, reschedule.

A record may have to be read from disk between two looks at the state, so each call looks again afterwards; the last
look is what is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from heapline.core.entries import DEAD, LEASED
from heapline.core.ids import partition_of
from heapline.core.leases import HOLDER, TOKEN
from heapline.core.partition import Found, Partition
from heapline.engine import facts
from heapline.engine.columns import delay_ms, to_ms
from heapline.engine.runner import TopicRunner
from heapline.errors import MessageLeased, MessageNotFound
from heapline.model import MessageInfo, Now
from heapline.ulid import to_ulid


async def read_records(runner: TopicRunner, positions: Sequence[int]) -> list[facts.Record | None]:
    """The records at these positions; None where one does not check."""
    column = np.array(positions, dtype=np.int64)
    records, missing = runner.journal.cached(column)
    if len(missing):
        records.fill(missing, await runner.load(column[missing]))
    return [None if i in records.bad else facts.Record(records, i) for i in range(len(column))]


def owner(runner: TopicRunner, id: int) -> Partition:
    return facts.owner_of(runner.topic.partitions, runner.name, id)


def waiting(runner: TopicRunner, id: int) -> Found:
    """Where a message waits; refuses those that are out, dead or gone."""
    found = owner(runner, id).find(id)
    if found is None or found.place == DEAD:
        raise MessageNotFound(runner.name, to_ulid(id))
    if found.place == LEASED:
        raise MessageLeased(runner.name, to_ulid(id))
    return found


async def get(runner: TopicRunner, id: int) -> MessageInfo:
    found = await runner.call(lambda now: owner(runner, id).find(id))
    record = None if found is None else (await read_records(runner, [found.position]))[0]

    def answer(now: Now) -> MessageInfo:
        partition = owner(runner, id)
        current = partition.find(id)
        if current is None:
            return facts.departed(partition, runner.name, id)
        return facts.living(partition, runner.name, id, current, record)

    return await runner.call(answer)


async def lease_of(runner: TopicRunner, id: int) -> tuple[int, str | None] | None:
    """Token and holder of the lease under which a message is out, if it is.

    Asked in a turn, so the answer waits until that lease is durable, for two reasons. A token is the offset of the row
    that granted it: were that row lost with a failed commit, the topic read back from disk would give the same number
    to another lease, and who acts by it would act on that one. And that there is no lease must not be told by an
    expiry that a crash may undo.
    """

    def look(now: Now) -> tuple[int, str | None] | None:
        number, partitions = partition_of(id), runner.topic.partitions
        lease = partitions[number].leases.by_id.get(id) if number < len(partitions) else None
        return None if lease is None else (lease[TOKEN], lease[HOLDER])

    return await runner.call(look)


async def peek(runner: TopicRunner, limit: int) -> list[MessageInfo]:
    """The next messages in order, as far as they are still ready when their records have been read."""

    def first(now: Now) -> list[tuple[int, int, int]]:
        heads = [p.eligible(limit) for p in runner.topic.partitions]
        rows = [row for head in heads for row in zip(*(column.tolist() for column in head), strict=True)]
        return sorted(rows)[:limit]

    rows = await runner.call(first)
    records = await read_records(runner, [position for _, _, position in rows])

    def answer(now: Now) -> list[MessageInfo]:
        infos = []
        for (_, id, _), record in zip(rows, records, strict=True):
            partition = owner(runner, id)
            found = partition.find(id)
            if found is not None:
                infos.append(facts.living(partition, runner.name, id, found, record))
        return infos

    return await runner.call(answer)


async def cancel(runner: TopicRunner, id: int) -> None:
    def decide(now: Now) -> None:
        found = waiting(runner, id)
        partition = owner(runner, id)
        runner.emit(partition, partition.decide_cancel(id, found), now)

    await runner.call(decide)


async def reschedule(
    runner: TopicRunner, id: int, delay: float | None, deliver_at: datetime | None, priority: int | None
) -> None:
    found = await runner.call(lambda now: waiting(runner, id))
    (record,) = await read_records(runner, [found.position])
    if record is None:
        raise MessageNotFound(runner.name, to_ulid(id))
    plan = _Reschedule(id, record, delay, deliver_at, priority)
    await runner.call(lambda now: plan.carry_out(runner, now))


class _Reschedule:
    """A reschedule whose record has been read; carried out in a turn. What is not given stays as it is."""

    def __init__(
        self, id: int, record: facts.Record, delay: float | None, deliver_at: datetime | None, priority: int | None
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
            self._id, found, now, runner.topic.take_seq(), priority=self._new_priority(partition),
            enqueued_at=self._record.enqueued_at, due=due, wall=wall, expires=expires, expires_wall=expires_wall,
        )  # fmt: skip
        runner.emit(partition, event, now)

    def _new_due(self, now: Now) -> tuple[int | None, bool]:
        if self._delay is not None:
            return now.steady + delay_ms(self._delay), False
        if self._deliver_at is not None:
            return to_ms(self._deliver_at), True
        return None, False

    def _new_expiry(self, partition: Partition, due: int | None, wall: bool) -> tuple[int, bool]:
        """A time to live counts from when the message is due, so a new due time moves its end."""
        record = self._record
        if due is not None:
            return (due + record.ttl_ms, wall) if record.ttl_ms else (0, wall)
        touched = partition.touched.get(self._id)
        if touched is not None:
            return touched.expires, touched.expires_wall
        return (record.due_at + record.ttl_ms, record.wall) if record.ttl_ms else (0, record.wall)

    def _new_priority(self, partition: Partition) -> int:
        if self._priority is not None:
            return self._priority
        touched = partition.touched.get(self._id)
        if touched is not None and touched.priority is not None:
            return touched.priority
        return self._record.priority
