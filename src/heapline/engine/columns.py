"""Messages to enqueue, as columns, and the enqueue calls that carry them.

A batch becomes `Columns` in its caller's own step, so an invalid message is refused before any other component sees it.
Single messages are checked one by one and become columns together with all others of the same turn. This module decides
nothing; `admission.py` handles the calls turn by turn.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from heapline.contract.check import instant_to_ms, seconds_to_ms
from heapline.contract.columns import unpack
from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, HeaplineError, PayloadTooLarge
from heapline.contract.message import Outgoing
from heapline.contract.messages import NewMessages, check_message
from heapline.core.events import I64
from heapline.core.fairness.keys import hashes_of
from heapline.core.order import TURN_PRIORITY_MAX, TURN_PRIORITY_MIN
from heapline.core.record import DEFAULT_RETRIES, FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY, FLAG_WALL, ROW

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
SCOPES = {"window": 0, "pending": 1, "until_ack": 2}
SCOPE_NAMES = (None, *SCOPES)

#: Columns that are None if no message has a value, and the message's field of each.
_OPTIONAL = {
    "keys": "key",
    "headers": "headers",
    "delays": "delay",
    "at": "deliver_at",
    "ttls": "ttl",
    "retries": "max_retries",
    "tokens": "idempotency_key",
    "scopes": "idempotency_scope",
    "fairness": "fairness_key",
}
_read_optional: Callable[[Any], tuple[Any, ...]] = attrgetter(*_OPTIONAL.values())
_NO_OPTIONAL = (None,) * len(_OPTIONAL)
_encode = msgspec.msgpack.Encoder().encode
BATCH_BYTES_MAX = 15 << 20  # capacity of one unit
BYTES_PER_PARTITION = 768  # upper bound of what a call's share in one partition adds to its unit
ROW_BYTES = ROW.itemsize
EVENT_BYTES_PER_ROW = 64  # upper bound of what one row adds to an event: sequences, hashes, fingerprints


class Columns:
    """A list of messages by field; a field that no message uses is None."""

    __slots__ = (
        "at", "count", "delays", "due", "fairness", "headers", "keys", "payloads", "priorities", "retries", "scopes",
        "seqs", "tokens", "ttls",
    )  # fmt: skip

    keys: list[str | None] | None
    headers: list[Any] | None
    delays: list[Any] | None
    at: list[Any] | None
    ttls: list[Any] | None
    retries: list[int | None] | None
    tokens: list[Any] | None
    scopes: list[Any] | None
    fairness: list[str | None] | None

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self.count = len(messages)
        self.due: I64 | None = None  # alternative to `at`: wall ms, 0 for none
        self.seqs: I64 | None = None  # the numbers that a producer gave; -1 for none
        self.payloads = [m.payload for m in messages]
        self.priorities = np.array([m.priority for m in messages], dtype=np.int64)
        seqs = [m.seq for m in messages]
        if seqs.count(None) < self.count:
            self.seqs = np.array([-1 if seq is None else seq for seq in seqs], dtype=np.int64)
        rows = list(map(_read_optional, messages))
        if rows.count(_NO_OPTIONAL) == self.count:
            self._clear_optional()
            return
        for name, column in zip(_OPTIONAL, zip(*rows, strict=True), strict=True):
            setattr(self, name, None if column.count(None) == self.count else list(column))

    def _clear_optional(self) -> None:
        self.keys = self.headers = self.delays = self.at = self.ttls = None
        self.retries = self.tokens = self.scopes = self.fairness = None

    @classmethod
    def of(cls, payloads: list[bytes], priorities: I64, due: I64 | None = None) -> Columns:
        """Create columns of messages that have only payload, priority and perhaps a due time (wall ms, 0 for none)."""
        made = cls.__new__(cls)
        made.due, made.seqs = due, None
        made.count = len(payloads)
        made.payloads = payloads
        made.priorities = priorities
        made._clear_optional()
        return made

    @classmethod
    def of_batch(cls, batch: NewMessages, first_seq: int | None = None) -> Columns:
        """Create columns from the messages of a command, whose columns are valid. They are numbered from `first_seq`
        on, if it is given."""
        count = len(batch.payloads)
        priorities = batch.priorities
        made = cls.of(
            batch.payloads,
            np.zeros(count, dtype=np.int64) if priorities is None else np.frombuffer(priorities, dtype="<i8"),
            None if batch.deliver_at_ms is None else np.frombuffer(batch.deliver_at_ms, dtype="<i8"),
        )
        if first_seq is not None:
            made.seqs = np.arange(count, dtype=np.int64) + first_seq
        elif batch.seqs is not None:
            made.seqs = np.frombuffer(batch.seqs, dtype="<i8")
        if batch.is_plain:
            return made
        made.keys, made.headers = batch.keys, batch.headers
        made.tokens, made.fairness = batch.idempotency_keys, batch.fairness_keys
        made.delays = _numbers(batch.delays)
        made.ttls = _numbers(batch.ttls)
        if batch.max_retries is not None:
            made.retries = [None if n < 0 else n for n in unpack(batch.max_retries)]
        if batch.idempotency_scopes is not None:
            made.scopes = [SCOPE_NAMES[n] for n in bytes(batch.idempotency_scopes)]
        return made

    def check(self, config: TopicConfig, topic: str, atomic: bool) -> dict[int, HeaplineError]:
        """Return errors by row, for messages that this topic does not accept. If the batch is atomic, raise the
        first."""
        if not self.count:
            return {}
        low, high = priority_range(config)
        fits = max(map(len, self.payloads)) <= config.max_payload_bytes
        fits = fits and (self.fairness is None or config.fairness == "keys")
        if fits and (config.fairness == "none" or (low <= self.priorities.min() and self.priorities.max() <= high)):
            return {}
        errors: dict[int, HeaplineError] = {}
        for i, payload in enumerate(self.payloads):
            fairness = None if self.fairness is None else self.fairness[i]
            message = Outgoing(payload, int(self.priorities[i]), fairness_key=fairness)
            try:
                check_for_topic(message, config, topic)
            except HeaplineError as error:
                if atomic:
                    raise
                errors[i] = error
        return errors

    def small_parts(self) -> tuple[list[bytes] | None, Any, Any, Any]:
        """Return (small part of each message, lengths of keys and of fairness keys, flags).

        A small part is the key's bytes, the fairness key's, then headers as msgpack.
        """
        if self.keys is None and self.headers is None and self.fairness is None:
            return None, 0, 0, 0
        count = self.count
        keys = [b"" if k is None else k.encode() for k in self.keys] if self.keys else [b""] * count
        headers = [b"" if not h else _encode(dict(h)) for h in self.headers] if self.headers else [b""] * count
        flags = np.zeros(count, dtype=np.uint16)
        if self.keys:
            flags |= np.array([k is not None for k in self.keys], dtype=np.uint16) * np.uint16(FLAG_KEY)
        flags |= np.array([bool(h) for h in headers], dtype=np.uint16) * np.uint16(FLAG_HEADERS)
        if not self.fairness:
            return [k + h for k, h in zip(keys, headers, strict=True)], [len(k) for k in keys], 0, flags
        fair = [b"" if f is None else f.encode() for f in self.fairness]
        flags |= np.array([f is not None for f in self.fairness], dtype=np.uint16) * np.uint16(FLAG_FAIRNESS)
        smalls = [k + f + h for k, f, h in zip(keys, fair, headers, strict=True)]
        return smalls, [len(k) for k in keys], [len(f) for f in fair], flags

    def fairness_hashes(self) -> I64:
        """Return the hash of each message's fairness key."""
        if self.fairness is None:
            return np.zeros(self.count, dtype=np.int64)
        return hashes_of((None if f is None else f.encode() for f in self.fairness), self.count)

    def places(self) -> list[str | None] | None:
        """Return the key that places each message: its fairness key, else its key."""
        if self.fairness is None or self.keys is None:
            return self.keys if self.fairness is None else self.fairness
        return [key if f is None else f for f, key in zip(self.fairness, self.keys, strict=True)]

    def fill(self, steady: int, wall: int) -> tuple[np.ndarray[Any, Any], list[bytes] | None]:
        """Return the record rows of these messages (without ids), and their small parts."""
        rows = np.zeros(self.count, dtype=ROW)
        rows["priority"] = self.priorities
        rows["enqueued_at"] = steady
        smalls = None
        if self.keys is not None or self.headers is not None or self.fairness is not None:
            smalls, rows["key_len"], rows["fairness_len"], rows["flags"] = self.small_parts()
        if self.delays is not None:
            waits = np.array([0 if d is None else seconds_to_ms(d) for d in self.delays], dtype=np.int64)
            rows["due"] = np.where(waits > 0, steady + waits, 0)
        if (moments := self.due if self.at is None else self.times()) is not None:
            later = moments > wall
            rows["due"][later] = moments[later]
            rows["flags"] |= later.astype(np.uint16) * np.uint16(FLAG_WALL)
        if self.ttls is not None:
            rows["ttl_ms"] = [0 if t is None else max(1, round(t * 1000)) for t in self.ttls]
        rows["max_retries"] = DEFAULT_RETRIES
        if self.retries is not None:
            rows["max_retries"] = [DEFAULT_RETRIES if r is None else r for r in self.retries]
        return rows, smalls

    def times(self) -> I64 | None:
        """Return the delivery time of each message, wall ms, 0 for immediately; None if all are immediate."""
        if self.at is None:
            return self.due
        found = np.array([0 if a is None else instant_to_ms(a) for a in self.at], dtype=np.int64)
        return found if self.due is None else np.maximum(found, self.due)  # a row has only one of them

    def subset(self, index: Sequence[int]) -> Columns:
        part = Columns.__new__(Columns)
        part.count = len(index)
        part.priorities = self.priorities[index]
        part.due = None if self.due is None else self.due[index]
        part.seqs = None if self.seqs is None else self.seqs[index]
        for name in ("payloads", *_OPTIONAL):
            column = getattr(self, name)
            setattr(part, name, None if column is None else [column[i] for i in index])
        return part


def join(parts: Sequence[Columns]) -> Columns:
    """Concatenate columns."""
    whole = Columns.__new__(Columns)
    whole.count = sum(p.count for p in parts)
    whole.priorities = np.concatenate([p.priorities for p in parts])
    whole.payloads = [payload for p in parts for payload in p.payloads]
    whole.due = _join_numbers([p.due for p in parts], parts, 0)
    whole.seqs = _join_numbers([p.seqs for p in parts], parts, -1)
    for name in _OPTIONAL:
        columns = [getattr(p, name) for p in parts]
        if all(c is None for c in columns):
            setattr(whole, name, None)
        else:
            filled = [[None] * p.count if c is None else c for p, c in zip(parts, columns, strict=True)]
            setattr(whole, name, [value for column in filled for value in column])
    return whole


def _join_numbers(columns: Sequence[I64 | None], parts: Sequence[Columns], absent: int) -> I64 | None:
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [np.full(p.count, absent) if column is None else column for column, p in zip(columns, parts, strict=True)]
    )


def _numbers(column: memoryview | None) -> list[Any] | None:
    return None if column is None else [None if v != v else v for v in unpack(column, "d")]


# -- checks that depend on the topic -----------------------------------------------------------------------------------


def check_one(message: Outgoing, config: TopicConfig, topic: str) -> None:
    """Raise unless this message could be enqueued to the topic; for messages that no caller's command has checked."""
    check_message(message)
    check_for_topic(message, config, topic)


def check_for_topic(message: Any, config: TopicConfig, topic: str) -> None:
    """Raise for a valid message that this topic does not accept."""
    if len(message.payload) > config.max_payload_bytes:
        raise PayloadTooLarge(len(message.payload), config.max_payload_bytes, topic)
    if config.fairness != "none":
        check_priority(message.priority, config)
    elif message.fairness_key is not None:
        raise _no_fairness(topic)


def _no_fairness(topic: str) -> BadRequest:
    return BadRequest(
        f'topic {topic!r} has no fairness keys; omit fairness_key, or create a topic with fairness="keys"'
    )


def priority_range(config: TopicConfig) -> tuple[int, int]:
    """Return the valid priorities. With fairness, the turn is in the same 64 bits as the priority."""
    return (INT64_MIN, INT64_MAX) if config.fairness == "none" else (TURN_PRIORITY_MIN, TURN_PRIORITY_MAX)


def check_priority(priority: int, config: TopicConfig) -> None:
    low, high = priority_range(config)
    if not low <= priority <= high:
        raise BadRequest(f"on a topic with fairness between keys, priority must be {low} to {high}, got {priority}")


class Identity(NamedTuple):
    """The producer that numbered the messages of a call."""

    producer_id: str
    epoch: int
    answered_below: int


class EnqueueCall:
    """One `Enqueue`, whose fields are those of a message, or the columns of an `EnqueueBatch`.

    Its future gets an `Enqueued`, or the `EnqueuedBatch` of the columns.
    """

    __slots__ = (
        "atomic", "began", "columns", "count", "first_seq", "future", "has_tokens", "identity", "is_plain", "is_quiet",
        "message", "nbytes", "parts",
    )  # fmt: skip

    def __init__(
        self,
        future: Future[Any],
        *,
        message: Any = None,
        columns: Columns | None = None,
        atomic: bool = True,
        identity: Identity | None = None,
        first_seq: int | None = None,
        is_quiet: bool = False,
    ) -> None:
        self.is_quiet = is_quiet  # a share of a prepared batch whose results are not wanted
        self.first_seq = first_seq  # if a producer numbered the messages from here on, without gaps
        self.parts: I64 | int | None = None  # the partition of each message, or of all, if its number placed it
        self.began = perf_counter()
        self.future = future
        self.message = message
        self.columns = columns
        self.atomic = atomic
        self.identity = identity
        if columns is not None:
            self.count = columns.count
            self.has_tokens = columns.tokens is not None  # whether messages of the call have idempotency keys
            self.nbytes = sum(map(len, columns.payloads)) + columns.count * 2 * ROW_BYTES
            if columns.keys or columns.headers or columns.fairness:
                self.nbytes += sum(map(len, columns.small_parts()[0] or ()))
        else:
            assert message is not None
            self.count = 1
            self.has_tokens = message.idempotency_key is not None
            self.nbytes = len(message.payload) + 2 * ROW_BYTES
            if message.key or message.headers or message.fairness_key:
                self.nbytes += len(Columns([message]).small_parts()[0][0])  # type: ignore[index]
        self.is_plain = identity is None and not self.has_tokens
        if not self.is_plain:
            self.nbytes += self.count * EVENT_BYTES_PER_ROW
        if identity is not None and first_seq is None:
            self.first_seq = _first_of_range(columns.seqs) if columns is not None else message.seq

    def numbers(self, first: int) -> I64:
        """Return the numbers of the messages from `first` on. The last may be INT64_MAX, which no range can end at."""
        return np.arange(self.count, dtype=np.int64) + first

    def places(self) -> list[str | None] | None:
        """Return the key that places each message, or None if no message has one."""
        if self.columns is not None:
            return self.columns.places()
        key = self.message.key if self.message.fairness_key is None else self.message.fairness_key
        return None if key is None else [key]


def _first_of_range(seqs: I64 | None) -> int | None:
    """Return the first of ascending numbers without gaps; None if they are not."""
    if seqs is None or not len(seqs) or seqs[-1] - seqs[0] != len(seqs) - 1:
        return None
    return int(seqs[0]) if len(seqs) == 1 or (seqs[1:] - seqs[:-1] == 1).all() else None


def gather(calls: list[EnqueueCall]) -> tuple[Columns, list[tuple[EnqueueCall, int, int]]]:
    """Return all messages of these calls as columns, and the rows of each call."""
    parts: list[Columns] = []
    singles: list[Outgoing] = []
    spans: list[tuple[EnqueueCall, int, int]] = []
    at = 0
    for call in calls:
        if call.message is not None:
            singles.append(call.message)
        else:
            if singles:
                parts.append(Columns(singles))
                singles = []
            parts.append(call.columns)  # type: ignore[arg-type]
        spans.append((call, at, at + call.count))
        at += call.count
    if singles:
        parts.append(Columns(singles))
    return parts[0] if len(parts) == 1 else join(parts), spans


def batch_bytes_max(config: TopicConfig, count: int) -> int:
    """Return the size of the largest batch of `count` messages that fits into one unit of one segment."""
    spread = min(count, config.partitions) * BYTES_PER_PARTITION
    return min(BATCH_BYTES_MAX, config.segment_bytes - (64 << 10)) - spread


def check_batch_bytes(call: EnqueueCall, config: TopicConfig) -> None:
    limit = batch_bytes_max(config, call.count)
    if call.nbytes > limit:
        raise BadRequest(
            f"an atomic batch of {call.nbytes} bytes is over the {limit} that one unit can hold; "
            "split it, or enqueue with atomic=False"
        )
