"""Messages on their way in, as columns: checked once, then never touched one by one again.

A batch becomes `Columns` in its caller's own turn, so a bad message is refused before anything else knows of it.
Single messages are checked one by one and become columns together with all others of the same turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np

from heapline.config import MAX_RETRIES_MAX, TopicConfig
from heapline.core.events import I64
from heapline.core.key_hashes import hashes_of
from heapline.core.order import TURN_PRIORITY_MAX, TURN_PRIORITY_MIN
from heapline.core.record import DEFAULT_RETRIES, FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY, FLAG_WALL, ROW
from heapline.errors import BadRequest, PayloadTooLarge
from heapline.model import EPOCH, Outgoing

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
KEY_BYTES_MAX = 4096
HEADERS_BYTES_MAX = 32 << 10
SECONDS_MAX = 200 * 366 * 86400.0  # two centuries: longer is a mistake, and sums of times stay in range
MOMENT_MAX = EPOCH + timedelta(seconds=SECONDS_MAX, milliseconds=1_704_067_200_000)
SCOPES = {"window": 0, "pending": 1, "until_ack": 2}

_OPTIONAL = ("keys", "headers", "delays", "at", "ttls", "retries", "tokens", "scopes", "seqs", "fairness")
_encode = msgspec.msgpack.Encoder().encode
_MS = timedelta(milliseconds=1)


class Columns:
    """A list of messages by field; a field that no message uses is None."""

    __slots__ = (
        "at", "count", "delays", "due", "fairness", "headers", "keys", "payloads", "priorities", "retries", "scopes",
        "seqs", "tokens", "ttls",
    )  # fmt: skip

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self.count = len(messages)
        self.due: I64 | None = None  # instead of `at`: wall ms, 0 for none
        self.payloads = [m.payload for m in messages]
        self.priorities = np.array([m.priority for m in messages], dtype=np.int64)
        self.keys = _used([m.key for m in messages])
        self.headers = _used([m.headers for m in messages])
        self.delays = _used([m.delay for m in messages])
        self.at = _used([m.deliver_at for m in messages])
        self.ttls = _used([m.ttl for m in messages])
        self.retries = _used([m.max_retries for m in messages])
        self.tokens = _used([m.idempotency_key for m in messages])
        self.scopes = _used([m.idempotency_scope for m in messages])
        self.seqs = _used([m.seq for m in messages])
        self.fairness = _used([m.fairness_key for m in messages])

    @classmethod
    def of(cls, payloads: list[bytes], priorities: I64, due: I64 | None = None) -> Columns:
        """Messages with nothing but payload, priority and perhaps a time (wall ms, 0 for none) that are columns
        already."""
        made = cls.__new__(cls)
        made.due = due
        made.count = len(payloads)
        made.payloads = payloads
        made.priorities = priorities
        for name in _OPTIONAL:
            setattr(made, name, None)
        return made

    def are_good(self, config: TopicConfig) -> bool:
        """`are_plain` for what `of` made: bytes and int64 they are by construction."""
        low, high = priority_range(config)
        return self.count > 0 and bool(
            max(map(len, self.payloads)) <= config.max_payload_bytes
            and low <= self.priorities.min() and self.priorities.max() <= high
            and (self.due is None or (self.due.min() >= 0 and self.due.max() <= to_ms(MOMENT_MAX)))
        )  # fmt: skip

    def small_parts(self) -> tuple[list[bytes] | None, Any, Any, Any]:
        """(small part of each message, lengths of keys and of fairness keys, flags).

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
        """The hash of each message's fairness key."""
        if self.fairness is None:
            return np.zeros(self.count, dtype=np.int64)
        return hashes_of((None if f is None else f.encode() for f in self.fairness), self.count)

    def places(self) -> list[str | None] | None:
        """What each message is placed by: its fairness key, else its key."""
        if self.fairness is None or self.keys is None:
            return self.keys if self.fairness is None else self.fairness
        return [key if f is None else f for f, key in zip(self.fairness, self.keys, strict=True)]

    def fill(self, steady: int, wall: int) -> tuple[np.ndarray[Any, Any], list[bytes] | None]:
        """The record rows of these messages (but for ids), and their small parts."""
        rows = np.zeros(self.count, dtype=ROW)
        rows["priority"] = self.priorities
        rows["enqueued_at"] = steady
        smalls, rows["key_len"], rows["fairness_len"], rows["flags"] = self.small_parts()
        if self.delays is not None:
            waits = np.array([0 if d is None else delay_ms(d) for d in self.delays], dtype=np.int64)
            rows["due"] = np.where(waits > 0, steady + waits, 0)
        moments = self.times()
        if moments is not None:
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
        """When each is to be delivered, wall ms, 0 for at once; None if all are."""
        if self.at is None:
            return self.due
        found = np.array([0 if a is None else to_ms(a) for a in self.at], dtype=np.int64)
        return found if self.due is None else np.maximum(found, self.due)  # a row has one of them

    def subset(self, index: Sequence[int]) -> Columns:
        part = Columns.__new__(Columns)
        part.count = len(index)
        part.priorities = self.priorities[index]
        part.due = None if self.due is None else self.due[index]
        for name in ("payloads", *_OPTIONAL):
            column = getattr(self, name)
            setattr(part, name, None if column is None else [column[i] for i in index])
        return part


def join(parts: Sequence[Columns]) -> Columns:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    whole = Columns.__new__(Columns)
    whole.count = sum(p.count for p in parts)
    whole.priorities = np.concatenate([p.priorities for p in parts])
    whole.payloads = [payload for p in parts for payload in p.payloads]
    dues = [p.due for p in parts]
    whole.due = None
    if any(due is not None for due in dues):
        zeros = [np.zeros(p.count, dtype=np.int64) if p.due is None else p.due for p in parts]
        whole.due = np.concatenate(zeros)
    for name in _OPTIONAL:
        columns = [getattr(p, name) for p in parts]
        if all(c is None for c in columns):
            setattr(whole, name, None)
        else:
            filled = [[None] * p.count if c is None else c for p, c in zip(parts, columns, strict=True)]
            setattr(whole, name, [value for column in filled for value in column])
    return whole


def _used(column: list[Any]) -> list[Any] | None:
    return None if column.count(None) == len(column) else column


def delay_ms(seconds: float) -> int:
    """A delay in ms from a look at the clock that was rounded down: one more, so that nothing is ever early."""
    return math.ceil(round(seconds * 1000, 6)) + 1 if seconds > 0 else 0


def to_ms(moment: datetime) -> int:
    """The first millisecond that is not before the moment: what waits for it is never early."""
    return -((EPOCH - moment) // _MS)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_one(message: Outgoing, config: TopicConfig, topic: str) -> None:
    """Refuse what cannot be enqueued, saying what to do."""
    payload = message.payload
    if type(payload) is not bytes:
        raise BadRequest(f"a payload is bytes, not {type(payload).__name__}: encode it first, for example as JSON")
    if len(payload) > config.max_payload_bytes:
        raise PayloadTooLarge(len(payload), config.max_payload_bytes, topic)
    check_priority(message.priority, config)
    if message.key is not None:
        _check_text("key", message.key, KEY_BYTES_MAX)
    if message.fairness_key is not None:
        if config.fairness != "keys":
            raise BadRequest(f'topic {topic!r} knows no fairness keys: make one with fairness="keys", or leave it away')
        _check_text("fairness_key", message.fairness_key, KEY_BYTES_MAX)
    if message.headers:
        _check_headers(message.headers)
    if message.delay is not None:
        check_seconds("delay", message.delay)
    if message.deliver_at is not None:
        check_moment("deliver_at", message.deliver_at)
        if message.delay is not None:
            raise BadRequest("give delay or deliver_at, not both")
    if message.ttl is not None:
        check_seconds("ttl", message.ttl)
        if message.ttl <= 0:
            raise BadRequest("ttl must be over 0 seconds")
    if message.max_retries is not None:
        check_retries(message.max_retries)
    if message.idempotency_key is not None:
        _check_text("idempotency_key", message.idempotency_key, KEY_BYTES_MAX)
    if message.idempotency_scope is not None:
        if message.idempotency_scope not in SCOPES:
            raise BadRequest(f"idempotency_scope is one of {', '.join(SCOPES)}, not {message.idempotency_scope!r}")
        if message.idempotency_key is None:
            raise BadRequest("idempotency_scope goes with an idempotency_key")
    if message.seq is not None and not (type(message.seq) is int and 0 <= message.seq <= INT64_MAX):
        raise BadRequest(f"seq is an int from 0 to 2^63−1, not {message.seq!r}")


def are_plain(messages: list[Outgoing], config: TopicConfig) -> bool:
    """Whether these are good messages with nothing but payload and priority: the common case, checked by columns."""
    return _are_sound(messages, config) and not any(
        m.headers or m.seq is not None or m.delay is not None or m.deliver_at is not None
        or m.ttl is not None or m.max_retries is not None or m.idempotency_key is not None
        or m.idempotency_scope is not None or m.key is not None or m.fairness_key is not None
        for m in messages
    )  # fmt: skip


def are_scheduled(messages: list[Outgoing], config: TopicConfig) -> bool:
    """Whether these are good messages with payload, priority and either delays or moments of UTC: the next in line."""
    if not _are_sound(messages, config) or any(
        m.headers or m.seq is not None or m.ttl is not None or m.max_retries is not None
        or m.idempotency_key is not None or m.idempotency_scope is not None or m.key is not None
        or m.fairness_key is not None
        for m in messages
    ):  # fmt: skip
        return False
    delays = [m.delay for m in messages if m.delay is not None]
    moments = [m.deliver_at for m in messages if m.deliver_at is not None]
    if not moments:
        return set(map(type, delays)) <= {int, float} and all(0 <= delay <= SECONDS_MAX for delay in delays)
    if delays or set(map(type, moments)) != {datetime} or any(m.tzinfo is not UTC for m in moments):
        return False
    return min(moments) >= EPOCH and max(moments) <= MOMENT_MAX


def _are_sound(messages: list[Outgoing], config: TopicConfig) -> bool:
    if set(map(type, messages)) != {Outgoing}:
        return False
    payloads = [m.payload for m in messages]
    if set(map(type, payloads)) != {bytes} or max(map(len, payloads)) > config.max_payload_bytes:
        return False
    priorities = [m.priority for m in messages]
    low, high = priority_range(config)
    return set(map(type, priorities)) == {int} and low <= min(priorities) and max(priorities) <= high


def priority_range(config: TopicConfig) -> tuple[int, int]:
    """Where keys take turns, the turn stands in the same 64 bits as the priority."""
    return (INT64_MIN, INT64_MAX) if config.fairness == "none" else (TURN_PRIORITY_MIN, TURN_PRIORITY_MAX)


def check_priority(priority: Any, config: TopicConfig | None = None) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int) or not INT64_MIN <= priority <= INT64_MAX:
        raise BadRequest(f"a priority is an int of 64 bits, not {priority!r}")
    low, high = (INT64_MIN, INT64_MAX) if config is None else priority_range(config)
    if not low <= priority <= high:
        raise BadRequest(f"on a topic with fairness between keys a priority is {low} to {high}, not {priority}")


def check_retries(retries: Any) -> None:
    if type(retries) is not int or not 0 <= retries <= MAX_RETRIES_MAX:
        raise BadRequest(f"max_retries is an int from 0 to {MAX_RETRIES_MAX}, not {retries!r}")


def check_seconds(name: str, value: Any, low: float = 0.0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= SECONDS_MAX:
        raise BadRequest(f"{name} is a number of seconds from {low:g} to {SECONDS_MAX:g}, not {value!r}")


def check_moment(name: str, moment: Any) -> None:
    if not isinstance(moment, datetime):
        raise BadRequest(f"{name} is a datetime, not {moment!r}")
    if moment.utcoffset() is None:
        raise BadRequest(
            f"{name}={moment.isoformat()} has no time zone: use one, for example datetime.now(UTC) + timedelta(hours=1)"
        )
    if not EPOCH - _MS < moment <= MOMENT_MAX:
        raise BadRequest(f"{name}={moment.isoformat()} is out of range")


def _check_text(name: str, value: Any, limit: int) -> None:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} is a non-empty str, not {value!r}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{name} cannot be encoded as UTF-8") from None
    if size > limit:
        raise BadRequest(f"{name} is {size} bytes long; at most {limit} are allowed")


def _check_headers(headers: Any) -> None:
    try:
        pairs = list(headers.items())
    except AttributeError:
        raise BadRequest(f"headers is a mapping of str to str, not {headers!r}") from None
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadRequest(f"headers are str to str: {name!r}: {value!r} is not; write numbers as text")
    try:
        size = len(_encode(dict(pairs)))
    except UnicodeEncodeError:
        raise BadRequest("headers cannot be encoded as UTF-8") from None
    if size > HEADERS_BYTES_MAX:
        raise BadRequest(f"headers take {size} bytes; at most {HEADERS_BYTES_MAX} are allowed")
