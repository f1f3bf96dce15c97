"""Between the contract's things and the JSON of the HTTP face, as a client has them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from heapline.broker import Broker
from heapline.client.http_calls import read_error
from heapline.client.leases import Outcome
from heapline.model import EPOCH, DlqFilter, Enqueued, Message, MessageInfo, Outgoing, TopicInfo
from heapline.ulid import parse_id
from heapline.wire import json_requests as ask
from heapline.wire import json_shapes as told

_MS = timedelta(milliseconds=1)
_SAME = (
    "topic", "partition", "state", "priority", "attempts", "due_at", "enqueued_at", "expires_at", "deadline", "holder",
    "reason", "ended_at", "payload", "key", "fairness_key",
)  # fmt: skip


def fields_of(m: Outgoing) -> dict[str, Any]:
    return {
        "payload": m.payload, "priority": m.priority, "key": m.key, "delay": m.delay, "deliver_at": m.deliver_at,
        "headers": dict(m.headers) if m.headers else None, "ttl": m.ttl, "max_retries": m.max_retries,
        "idempotency_key": m.idempotency_key, "idempotency_scope": m.idempotency_scope, "seq": m.seq,
        "fairness_key": m.fairness_key,
    }  # fmt: skip


def new_message(m: Outgoing) -> ask.NewMessage:
    return ask.NewMessage(**fields_of(m))


def leases(ids: list[int], tokens: list[int]) -> list[ask.Lease]:
    return [ask.Lease(message_id=str(id), lease_token=str(t)) for id, t in zip(ids, tokens, strict=True)]


def where(filter: DlqFilter) -> ask.Where:
    return ask.Where(**{name: getattr(filter, name) for name in DlqFilter.__struct_fields__})


def topic_info(heap: told.HeapTold) -> TopicInfo:
    return TopicInfo(name=heap.topic, incarnation=heap.incarnation, config=heap.config)


def enqueued(answer: told.EnqueuedTold) -> Enqueued:
    return Enqueued(int(answer.id), answer.duplicate)


def results(rows: list[told.RowTold]) -> list[Enqueued]:
    return [
        Enqueued(int(row.id or 0), bool(row.duplicate))
        if row.error is None else Enqueued(0, error=read_error(msgspec.to_builtins(row.error)))
        for row in rows
    ]  # fmt: skip


def message(broker: Broker, topic: str, row: told.PoppedTold) -> Message:
    return Message(
        broker, topic, row.partition, int(row.id), int(row.lease_token), row.payload or b"", row.priority,
        row.attempts, row.key, row.headers, _ms(row.enqueued_at), _ms(row.deadline), row.fairness_key,
    )  # fmt: skip


def message_info(row: told.MessageTold) -> MessageInfo:
    same: dict[str, Any] = {name: getattr(row, name) for name in _SAME}
    return MessageInfo(id=int(row.id), headers=row.headers or {}, **same)


def outcome(ids: list[int], answer: told.LeasesTold) -> Outcome:
    lost = [int(id) for id in answer.lost or ()]
    if answer.deadlines is None:
        return Outcome(lost, [])
    deadlines = {parse_id(d.message_id): _ms(d.deadline) for d in answer.deadlines}
    return Outcome(lost, [deadlines.get(id, -1) for id in ids])


def _ms(moment: datetime) -> int:
    return (moment - EPOCH) // _MS
