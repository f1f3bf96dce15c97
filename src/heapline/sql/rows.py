"""New messages as rows: when they become ready and expire, and their place in the order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from heapline.contract.check import instant_to_ms, seconds_to_ms
from heapline.contract.columns import unpack
from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, HeaplineError, PayloadTooLarge, Unsupported
from heapline.contract.messages import SCOPES, NewMessages
from heapline.core.dedup.idempotency import WINDOW, key_hash
from heapline.core.ids import unix_ms_of
from heapline.core.order import Ordering

BATCH_BYTES_MAX = 15 << 20  # of an atomic batch: it is one statement
ROW_BYTES = 200  # upper bound of what a row adds to its payload, key and headers
PLAIN = ("payloads", "priorities")
_encode = msgspec.msgpack.Encoder().encode


class NewRow(NamedTuple):
    payload: bytes
    priority: int = 0
    key: str | None = None
    delay_ms: int = 0
    at_ms: int = 0  # 0: none
    headers: dict[str, str] | None = None
    ttl_ms: int | None = None
    max_retries: int | None = None
    idempotency_key: str | None = None
    scope: int = WINDOW  # as in core/dedup/idempotency.py
    seq: int | None = None
    fairness_key: str | None = None

    @property
    def nbytes(self) -> int:
        headers = sum(len(k) + len(v) for k, v in self.headers.items()) * 4 if self.headers else 0
        return len(self.payload) + ROW_BYTES + headers + len(self.key or "") * 4


def row_of_command(command: Any) -> NewRow:
    """Return the row of an `Enqueue`."""
    return NewRow(
        command.payload,
        int(command.priority),
        command.key,
        0 if command.delay is None else seconds_to_ms(command.delay),
        0 if command.deliver_at is None else instant_to_ms(command.deliver_at),
        command.headers or None,
        _ttl_ms(command.ttl),
        command.max_retries,
        command.idempotency_key,
        WINDOW if command.idempotency_scope is None else SCOPES.index(command.idempotency_scope),
        command.seq,
        command.fairness_key,
    )


def rows_of_batch(batch: NewMessages) -> list[NewRow]:
    """Return the rows of an `EnqueueBatch`."""
    count = len(batch.payloads)

    def numbers(column: memoryview | None, form: str, none: Any) -> list[Any]:
        return [none] * count if column is None else unpack(column, form)

    priorities = numbers(batch.priorities, "q", 0)
    if is_plain(batch):
        return [NewRow(*row) for row in zip(batch.payloads, priorities, strict=True)]
    columns = zip(
        batch.payloads,
        priorities,
        batch.keys or [None] * count,
        (0 if d != d else seconds_to_ms(d) for d in numbers(batch.delays, "d", 0.0)),
        numbers(batch.deliver_at_ms, "q", 0),
        (h or None for h in batch.headers or [None] * count),
        (None if t != t else _ttl_ms(t) for t in numbers(batch.ttls, "d", float("nan"))),
        (None if n < 0 else n for n in numbers(batch.max_retries, "q", -1)),
        batch.idempotency_keys or [None] * count,
        (max(0, s - 1) for s in numbers(batch.idempotency_scopes, "B", 0)),
        (None if s < 0 else s for s in numbers(batch.seqs, "q", -1)),
        batch.fairness_keys or [None] * count,
        strict=True,
    )
    return [NewRow(*row) for row in columns]


def is_plain(batch: NewMessages) -> bool:
    """Whether the messages have nothing but payloads and priorities."""
    given = (getattr(batch, name) is not None for name in batch.__struct_fields__ if name not in PLAIN)
    return not any(given)


def _ttl_ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))


def check_row(row: NewRow, config: TopicConfig, topic: str) -> None:
    """Raise for a valid message that this topic does not accept."""
    if len(row.payload) > config.max_payload_bytes:
        raise PayloadTooLarge(len(row.payload), config.max_payload_bytes, topic)
    if row.fairness_key is not None:
        raise Unsupported("fairness_key", "fairness")


def check_rows(rows: Sequence[NewRow], config: TopicConfig, topic: str, atomic: bool) -> dict[int, HeaplineError]:
    """Return errors by row. The first one is raised if the batch is atomic."""
    errors: dict[int, HeaplineError] = {}
    for i, row in enumerate(rows):
        try:
            check_row(row, config, topic)
        except HeaplineError as error:
            if atomic:
                raise
            errors[i] = error
    return errors


def check_batch_bytes(rows: Sequence[NewRow]) -> None:
    size = sum(row.nbytes for row in rows)
    if size > BATCH_BYTES_MAX:
        raise BadRequest(
            f"an atomic batch of {size} bytes is over the limit of {BATCH_BYTES_MAX}; "
            "split it, or enqueue with atomic=False"
        )


class Stored(NamedTuple):
    """The columns of new messages, in the order of the insert statements."""

    ids: list[int]
    keys: list[int]
    dues: list[int]
    priorities: list[int]
    ttls: list[int | None]
    expires: list[int | None]
    max_retries: list[int | None]
    names: list[bytes | None]
    headers: list[bytes | None]
    scopes: list[int | None]
    hashes: list[bytes | None]
    payloads: list[bytes]


def values_of(row: NewRow, id: int, ordering: Ordering, now: int, earliest: int | None = None) -> tuple[Any, ...]:
    """Return the columns of a new message, in the order of Stored.

    `now` is never behind the database's time. A message without a delay is due at `earliest`, which is never ahead.
    """
    earliest = now if earliest is None else earliest
    is_due = not row.delay_ms and row.at_ms <= earliest
    due = earliest if is_due else max(now + row.delay_ms, row.at_ms)
    holds = row.idempotency_key is not None and row.scope != WINDOW
    return (
        id,
        ordering.key(row.priority, unix_ms_of(id)),
        due,
        row.priority,
        row.ttl_ms,
        None if row.ttl_ms is None else due + row.ttl_ms,
        row.max_retries,
        None if row.key is None else row.key.encode(),
        None if row.headers is None else _encode(row.headers),
        row.scope if holds else None,
        key_hash(row.idempotency_key) if holds and row.idempotency_key is not None else None,
        row.payload,
    )


def place_rows(rows: Sequence[NewRow], ids: Sequence[int], ordering: Ordering, now: int) -> tuple[Stored, Stored]:
    """Return the columns of the messages that are ready now, and of those that become ready later."""
    ready: list[tuple[Any, ...]] = []
    delayed: list[tuple[Any, ...]] = []
    for row, id in zip(rows, ids, strict=True):
        values = values_of(row, id, ordering, now)
        (delayed if values[2] > now else ready).append(values)
    return columns_of(ready), columns_of(delayed)


def columns_of(rows: list[tuple[Any, ...]]) -> Stored:
    """Return rows as columns. One that has only NULL is empty: the statements fill it up."""
    if not rows:
        return NOTHING
    return Stored(*([] if column == (None,) * len(rows) else list(column) for column in zip(*rows, strict=True)))


NOTHING = Stored([], [], [], [], [], [], [], [], [], [], [], [])
