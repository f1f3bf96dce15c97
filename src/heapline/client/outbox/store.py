"""The rows of an outbox, and its database as the relay uses it. Each call of a store is one transaction.

A row has the columns of a message, which are checked when it is written. A *lane* is one relay's own line of numbers:
its name is the producer's name at the broker. Rows are claimed by a lane, with an epoch and a number, before they are
sent. A lane's own row names its owner (`owner`, `beat_ms`), and every turn of a lane begins by renewing that. So a turn
of a relay that has lost its lane changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypedDict, Unpack

from heapline.client.tasks.task import Item
from heapline.contract.check import instant_to_ms
from heapline.contract.config import canonical_topic
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing, from_ms
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
        return Outgoing(
            bytes(self.payload),
            self.priority,
            self.message_key,
            deliver_at=None if self.deliver_at_ms is None else from_ms(self.deliver_at_ms),
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


class RowOptions(TypedDict, total=False):
    """Fields of a message in the outbox besides topic and payload, as in `Outgoing`.

    A `delay` counts from the call, a `ttl` from when the relay enqueues the message.
    """

    priority: int
    key: str | None
    delay: float | None
    deliver_at: datetime | None
    headers: Mapping[str, str] | None
    ttl: float | None
    max_retries: int | None
    fairness_key: str | None


def new_row(topic: str, payload: bytes, **options: Unpack[RowOptions]) -> dict[str, Any]:
    """Return the columns of a new row. Raise BadRequest for a message that no topic would accept."""
    for name in options:
        if name not in RowOptions.__annotations__:
            raise TypeError(f"enqueue has no option {name!r}; it has {', '.join(RowOptions.__annotations__)}")
    topic = canonical_topic(topic)  # a relay opens one epoch per name, and a topic must not have two
    message = Outgoing(payload, **options)
    check_message(message)
    for name, text in (("key", message.key), ("fairness_key", message.fairness_key)):
        if text is not None and (len(text) > KEY_CHARACTERS or "\0" in text):
            raise BadRequest(
                f"{name} of a row of the outbox must be at most {KEY_CHARACTERS} characters, without NUL; "
                "not every database can store it otherwise"
            )
    now = time.time_ns() // 1_000_000
    due_ms = None if message.deliver_at is None else instant_to_ms(message.deliver_at)
    if message.delay is not None:
        due_ms = now + round(message.delay * 1000)
    return {
        "topic": topic,
        "payload": payload,
        "priority": message.priority,
        "message_key": message.key,
        "deliver_at_ms": due_ms,
        "headers": json.dumps(dict(message.headers)) if message.headers else None,
        "ttl": message.ttl,
        "max_retries": message.max_retries,
        "fairness_key": message.fairness_key,
        "created_ms": now,
    }


# -- the database ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """The numbers of a lane on one topic."""

    epoch: int
    next_seq: int = 0


@dataclass(slots=True)
class Turn:
    """Outcomes of rows since the last turn, and what to claim next."""

    lane: str
    owner: str
    now_ms: int
    sent: list[int] = field(default_factory=list)  # ids of rows that were enqueued, to be deleted
    failed: list[tuple[int, str]] = field(default_factory=list)  # ids and reasons of rows that stay for an operator
    returned: list[int] = field(default_factory=list)  # ids of rows that were not sent, to be released
    lines: dict[str, Line] = field(default_factory=dict)  # by topic; numbers are taken from them
    without: frozenset[str] = frozenset()  # topics whose rows are not claimed
    rows_max: int = 0
    bytes_max: int = 0


@dataclass(slots=True)
class Claimed:
    rows: list[Row]
    unknown: list[str]  # topics of rows that were skipped because they have no line yet


class OutboxStore(Protocol):
    async def take_lane(self, owner: str, now_ms: int, stale_ms: int) -> str:
        """Return a lane without an owner, one whose owner has been silent since before `stale_ms`, or a new one."""

    async def abandoned_lanes(self, stale_ms: int) -> list[str]:
        """Return lanes with rows whose owner has been silent since before `stale_ms`."""

    async def adopt(self, lane: str, owner: str, now_ms: int, stale_ms: int) -> bool:
        """Own this lane, unless its owner has been active since. Return whether it is owned."""

    async def held(self, lane: str) -> list[Row]:
        """Return the rows that a lane has claimed, by number."""

    async def turn(self, turn: Turn) -> Claimed | None:
        """Settle and claim. Return None, and change nothing, if the lane has another owner."""

    async def give_back(self, lane: str, owner: str) -> None: ...

    async def close(self) -> None: ...


def cut(found: list[tuple[int, str, int]], turn: Turn) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the rows to claim now, of (id, topic, bytes) in order, and the topics without a line."""
    taken: list[tuple[int, str]] = []
    unknown: list[str] = []
    total = 0
    for id, topic, nbytes in found:
        if topic not in turn.lines:
            if topic not in unknown:
                unknown.append(topic)
            continue
        total += nbytes or 0
        if taken and total > turn.bytes_max:
            break
        taken.append((id, topic))
    return taken, unknown


def number(taken: list[tuple[int, str]], lines: dict[str, Line]) -> dict[int, tuple[int, int]]:
    """Return (epoch, seq) for each id, and advance the lines."""
    numbers: dict[int, tuple[int, int]] = {}
    for id, topic in taken:
        line = lines[topic]
        numbers[id] = (line.epoch, line.next_seq)
        line.next_seq += 1
    return numbers
