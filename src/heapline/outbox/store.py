"""The rows of an outbox, and its database as the relay uses it. Each call of a store is one transaction.

A row has the columns of a message, which are checked when it is written. A *lane* is one relay's own line of numbers:
its name is the producer's name at the broker. Rows are claimed by a lane, with an epoch and a number, before they are
sent. A lane's own row has its owner, when the owner was last active (`beat_ms`), and an epoch that rises whenever the
lane is taken. Every turn begins by checking that epoch, so a turn of a relay that has lost its lane changes nothing.
"""

from __future__ import annotations

import json
import secrets
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


@dataclass(frozen=True, slots=True)
class FreeLane:
    """A lane that a relay may take, as it was read."""

    name: str
    owner: str | None
    epoch: int
    beat_ms: int
    has_rows: bool


@dataclass(slots=True)
class Turn:
    """Outcomes of rows since the last turn, and what to claim next."""

    lane: str
    owned_epoch: int  # of the lane's row, unless another relay has taken it
    epoch: int  # of the lane's row from now on, and of the rows that are claimed
    now_ms: int
    sent: list[int] = field(default_factory=list)  # ids of rows that were enqueued, to be deleted
    failed: list[tuple[int, str]] = field(default_factory=list)  # ids and reasons of rows that stay for an operator
    returned: list[int] = field(default_factory=list)  # ids of rows that were not sent, to be released
    next_seq: int = 0
    without: frozenset[str] = frozenset()  # topics whose rows are not claimed
    rows_max: int = 0
    bytes_max: int = 0


class OutboxStore(Protocol):
    async def free_lanes(self, owner: str, stale_ms: int) -> list[FreeLane]:
        """Return lanes of this owner, of none, and of owners that have been silent since before `stale_ms`."""

    async def take(self, lane: FreeLane, owner: str, epoch: int, now_ms: int) -> bool:
        """Own a lane under a new epoch. Return False if it was used or taken since it was read."""

    async def add_lane(self, name: str, owner: str, epoch: int, now_ms: int) -> None: ...

    async def held(self, lane: str) -> list[Row]:
        """Return the rows that a lane has claimed, by number."""

    async def turn(self, turn: Turn) -> list[Row] | None:
        """Settle, and return the rows that were claimed. Return None, and change nothing, if the lane was taken."""

    async def give_back(self, lane: str, epoch: int) -> None: ...

    async def close(self) -> None: ...


def next_epoch(last: int) -> int:
    """Return an epoch above `last` that is unlikely to have been used, even if `last` is from a backup.

    The same epoch again would repeat numbers, and the broker would take new rows for old ones. The time makes it higher
    than the lost ones. The random part makes it differ from them if the clock was set back; a lower epoch is rejected.
    """
    return max(last, time.time_ns() // 1000) + 1 + secrets.randbelow(1_000_000)


def number(rows: list[tuple[int, int]], turn: Turn) -> dict[int, int]:
    """Return the ids to claim now, of (id, bytes) in order, each with its number."""
    numbers: dict[int, int] = {}
    total = 0
    for id, nbytes in rows:
        total += nbytes or 0
        if numbers and total > turn.bytes_max:
            break
        numbers[id] = turn.next_seq + len(numbers)
    return numbers
