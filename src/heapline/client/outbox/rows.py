"""A message as a row of the outbox: its columns, checked when it is written, and the message again when it is read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from heapline.client.checks import check_outgoing
from heapline.client.numbering import one_name
from heapline.client.tasks.task import Item
from heapline.engine.columns import to_ms
from heapline.errors import BadRequest
from heapline.model import Outgoing

TOPIC_CHARACTERS = 257  # a namespace, a slash, a name
KEY_CHARACTERS = 1024
ERROR_CHARACTERS = 500
#: The columns of a message, in both the SQLAlchemy table and the Django model.
MESSAGE_COLUMNS = (
    "topic", "payload", "priority", "message_key", "deliver_at_ms", "headers", "ttl", "max_retries", "fairness_key",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A row that a lane has claimed: under which epoch and number it is sent, however often."""

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
            bytes(self.payload), self.priority, self.message_key, deliver_at=moment,
            headers=None if self.headers is None else json.loads(self.headers), ttl=self.ttl,
            max_retries=self.max_retries, seq=self.seq, fairness_key=self.fairness_key,
        )  # fmt: skip


def fields_of(call: Any) -> dict[str, Any]:
    """The message of a task's call, `send.item(…)`, as the outbox's `enqueue` takes it."""
    if not isinstance(call, Item):
        raise BadRequest(f"enqueue_call takes a call of a task, as send.item(…) makes it, not {type(call).__name__}")
    fields = {name: value for name, value in call.fields().items() if value is not None}
    for name in ("idempotency_key", "idempotency_scope"):
        if name in fields:
            raise BadRequest(f"a row of the outbox is enqueued once by itself: leave {name} out")
    return {"topic": call.task.topic, **fields}


def new_row(
    topic: str, payload: bytes, *, priority: int, key: str | None, delay: float | None, deliver_at: datetime | None,
    headers: Mapping[str, str] | None, ttl: float | None, max_retries: int | None, fairness_key: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The columns of a new row; refuses what no topic would take."""
    topic = one_name(topic)  # a relay opens an epoch for each name, and one topic must not have two
    message = Outgoing(
        payload, priority, key, delay, deliver_at, headers, ttl, max_retries, fairness_key=fairness_key
    )  # fmt: skip
    check_outgoing(message, topic)
    for name, text in (("key", key), ("fairness_key", fairness_key)):
        if text is not None and (len(text) > KEY_CHARACTERS or "\0" in text):
            raise BadRequest(
                f"{name} of a row of the outbox is at most {KEY_CHARACTERS} characters, without NUL: "
                "not every database would keep it as it is"
            )
    now = time.time_ns() // 1_000_000
    moment = None if deliver_at is None else to_ms(deliver_at)
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
