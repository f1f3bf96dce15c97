"""Rows of the outbox: the columns of a message, checked when it is written, and the message of a row."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from heapline.client.tasks.task import Item
from heapline.contract.check import instant_to_ms
from heapline.contract.config import canonical_topic
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.contract.messages import check_message

TOPIC_CHARACTERS = 257  # a namespace, a slash, a name
KEY_CHARACTERS = 1024
ERROR_CHARACTERS = 500
#: The columns of a message, in both the SQLAlchemy table and the Django model.
MESSAGE_COLUMNS = (
    "topic", "payload", "priority", "message_key", "deliver_at_ms", "headers", "ttl", "max_retries", "fairness_key",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A row that a lane has claimed, with the epoch and number under which every try sends it."""

    id: int
    epoch: int
    seq: int
    topic: str
    payload: bytes
    priority: int
    message_key: str | None
    deliver_at_ms: int | None
    headers: str | None
    ttl: float | None
    max_retries: int | None
    fairness_key: str | None

    def outgoing(self) -> Outgoing:
        moment = None
        if self.deliver_at_ms is not None:
            moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self.deliver_at_ms)
        return Outgoing(
            bytes(self.payload),
            self.priority,
            self.message_key,
            deliver_at=moment,
            headers=None if self.headers is None else json.loads(self.headers),
            ttl=self.ttl,
            max_retries=self.max_retries,
            seq=self.seq,
            fairness_key=self.fairness_key,
        )


def fields_of(call: Any) -> dict[str, Any]:
    """Return the fields of a task's call, `send.item(…)`, for the outbox's `enqueue`."""
    if not isinstance(call, Item):
        raise BadRequest(f"enqueue_call needs a call of a task, such as send.item(…), got {type(call).__name__}")
    fields = {name: value for name, value in call.fields().items() if value is not None}
    for name in ("idempotency_key", "idempotency_scope"):
        if name in fields:
            raise BadRequest(f"a row of the outbox is enqueued exactly once without a key; omit {name}")
    return {"topic": call.task.topic, **fields}


def new_row(
    topic: str,
    payload: bytes,
    *,
    priority: int,
    key: str | None,
    delay: float | None,
    deliver_at: datetime | None,
    headers: Mapping[str, str] | None,
    ttl: float | None,
    max_retries: int | None,
    fairness_key: str | None,
) -> dict[str, Any]:
    """Return the columns of a new row. Raise BadRequest for a message that no topic would accept."""
    topic = canonical_topic(topic)  # a relay opens one epoch per name, and a topic must not have two
    message = Outgoing(payload, priority, key, delay, deliver_at, headers, ttl, max_retries, fairness_key=fairness_key)
    check_message(message)
    for name, text in (("key", key), ("fairness_key", fairness_key)):
        if text is not None and (len(text) > KEY_CHARACTERS or "\0" in text):
            raise BadRequest(
                f"{name} of a row of the outbox must be at most {KEY_CHARACTERS} characters, without NUL; "
                "not every database can store it otherwise"
            )
    now = time.time_ns() // 1_000_000
    moment = None if deliver_at is None else instant_to_ms(deliver_at)
    if delay is not None:
        moment = now + round(delay * 1000)
    return {
        "topic": topic,
        "payload": payload,
        "priority": priority,
        "message_key": key,
        "deliver_at_ms": moment,
        "headers": json.dumps(dict(headers)) if headers else None,
        "ttl": ttl,
        "max_retries": max_retries,
        "fairness_key": fairness_key,
        "created_ms": now,
    }
