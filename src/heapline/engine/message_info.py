"""Answers about single messages: `get`, `peek`, dead letters. Reads state and records; changes nothing."""

from __future__ import annotations

from typing import Any

from heapline.contract.errors import MessageNotFound
from heapline.contract.message import DlqFilter, MessageInfo, State, from_ms
from heapline.core.entries import DEAD, DELAYED, LEASED, READY
from heapline.core.ids import partition_of, unix_ms_of
from heapline.core.leases import DEADLINE, HOLDER
from heapline.core.partition import Found, Partition
from heapline.core.record import FLAG_WALL, attempts_of
from heapline.engine.delivery import split_small
from heapline.engine.topic import Topic

_STATES: dict[int, State] = {READY: "ready", DELAYED: "delayed", LEASED: "leased", DEAD: "dead"}


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
    touched = partition.touched.get(id)
    lease = partition.leases.by_id.get(id)
    dead = partition.dead.get(id)
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
        reason=dead.reason if dead is not None else partition.reasons.get(id),
        ended_at=None if dead is None else from_ms(dead.at),
        payload=None if record is None else record.payload,
        key=None if record is None else record.key,
        headers={} if record is None else record.headers,
        fairness_key=None if record is None else record.fairness_key,
    )


def departed(topic: Topic, partition: Partition, id: int) -> MessageInfo:
    """Return how a message ended, while that is remembered."""
    gone = partition.gone.find(id)
    if gone is None:
        raise MessageNotFound(topic.name, topic.ulid(id))
    how: Any = gone.how
    return MessageInfo(
        id=id, id_suffix=topic.id_suffix, topic=topic.name, partition=partition.number, state=how,
        reason=gone.reason, ended_at=from_ms(gone.at), enqueued_at=from_ms(unix_ms_of(id)),
    )  # fmt: skip


def owner_of(topic: Topic, id: int) -> Partition:
    number = partition_of(id)
    if number >= len(topic.partitions):
        raise MessageNotFound(topic.name, topic.ulid(id))
    return topic.partitions[number]


def matches(info: MessageInfo, where: DlqFilter) -> bool:
    """Return whether a dead letter matches the filter."""
    if where.reason is not None and where.reason.lower() not in (info.reason or "").lower():
        return False
    priority = info.priority if info.priority is not None else 0
    if where.priority_min is not None and priority < where.priority_min:
        return False
    if where.priority_max is not None and priority > where.priority_max:
        return False
    if where.died_after is not None and (info.ended_at is None or info.ended_at < where.died_after):
        return False
    if where.died_before is not None and (info.ended_at is None or info.ended_at >= where.died_before):
        return False
    return where.key is None or info.key == where.key
