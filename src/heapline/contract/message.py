"""Message types: messages to enqueue, delivered messages, and information about them.

This module decides nothing; a message only has a reference to its broker.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from heapline.contract import payload_codec
from heapline.contract.config import TopicConfig
from heapline.contract.ids import to_ulid

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
State = Literal["ready", "delayed", "leased", "dead", "acked", "cancelled", "expired", "purged", "dropped", "deleted"]
IdempotencyScope = Literal["window", "pending", "until_ack"]


def from_ms(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


class Outgoing(msgspec.Struct, frozen=True):
    """A message to be enqueued; everything but the payload has a default.

    >>> Outgoing(b"a", priority=1).priority
    1
    """

    payload: bytes
    priority: int = 0
    key: str | None = None  # partition key: messages with the same key are in one partition
    delay: float | None = None  # seconds from now until it may be delivered
    deliver_at: datetime | None = None  # or as a wall-clock time (with a time zone)
    headers: Mapping[str, str] | None = None
    ttl: float | None = None  # seconds after its due time at which it expires unless it was leased
    max_retries: int | None = None  # None = the topic's max_retries_default
    idempotency_key: str | None = None
    idempotency_scope: IdempotencyScope | None = None  # None = "window"
    seq: int | None = None  # this message's number in its producer's epoch
    fairness_key: str | None = None  # keys take turns on topics with fairness="keys"; also places the message


class Enqueued(msgspec.Struct, frozen=True):
    """The result of an enqueue. `error` is only set in a batch that is not atomic."""

    id: int
    duplicate: bool = False
    error: Exception | None = None
    id_suffix: int = 0  # the topic's; see contract/ids.py

    @property
    def message_id(self) -> str:
        return to_ulid(self.id, self.id_suffix)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Enqueued(error={self.error!r})"
        return f"Enqueued({self.message_id}{', duplicate' if self.duplicate else ''})"


class Delivered:
    """Base of leased messages and stream rows. The subclasses have the fields."""

    __slots__ = ()

    id: int
    id_suffix: int
    payload: bytes
    _headers: dict[str, str] | None
    _enqueued_ms: int

    @property
    def headers(self) -> dict[str, str]:
        return self._headers or {}

    @property
    def message_id(self) -> str:
        return to_ulid(self.id, self.id_suffix)

    @property
    def enqueued_at(self) -> datetime:
        return from_ms(self._enqueued_ms)

    def json(self) -> Any:
        """Return the payload as plain values, decoded by its content-type header; as JSON without that header."""
        return self.decode(Any)

    def decode(self, kind: Any) -> Any:
        """Return the payload as a `kind`: a dataclass, a struct, a pydantic model, list[int], …"""
        return payload_codec.decode(self.payload, self.headers.get(payload_codec.CONTENT_TYPE), kind)


class LeaseSettler(Protocol):
    """Settles leased messages. Every `Broker` does, and so does a prefetching consumer."""

    def ack(self, messages: Message, /) -> Coroutine[Any, Any, None]: ...
    def nack(self, messages: Message, /, *, backoff: float | None, reason: str | None) -> Coroutine[Any, Any, None]: ...
    def release(self, messages: Message, /) -> Coroutine[Any, Any, None]: ...
    def extend(self, messages: Message, seconds: float, /) -> Coroutine[Any, Any, None]: ...
    def bury(self, messages: Message, /, *, reason: str | None) -> Coroutine[Any, Any, None]: ...


class Message(Delivered, msgspec.Struct, weakref=True, eq=False):
    """A leased message. Ack it when the work is done; nack, release or bury it otherwise."""

    _broker: LeaseSettler
    topic: str
    partition: int
    id: int
    token: int
    payload: bytes
    priority: int
    attempts: int
    key: str | None
    _headers: dict[str, str] | None
    _enqueued_ms: int
    _deadline_ms: int
    fairness_key: str | None = None
    id_suffix: int = 0  # the topic's

    @property
    def deadline(self) -> datetime:
        """The time at which the lease ends unless it is extended."""
        return from_ms(self._deadline_ms)

    def ack(self) -> Coroutine[Any, Any, None]:
        return self._broker.ack(self)  # not awaited here, which would cost each ack a coroutine

    async def nack(self, backoff: float | None = None, reason: str | None = None) -> None:
        await self._broker.nack(self, backoff=backoff, reason=reason)

    async def release(self) -> None:
        await self._broker.release(self)

    async def extend(self, seconds: float) -> None:
        await self._broker.extend(self, seconds)

    async def bury(self, reason: str | None = None) -> None:
        await self._broker.bury(self, reason=reason)

    def __repr__(self) -> str:
        return (
            f"<Message {self.message_id} of {self.topic!r}, priority {self.priority}, attempt {self.attempts}, "
            f"{len(self.payload)} bytes>"
        )


class LeaseRef(NamedTuple):
    """The data that acting on a lease needs; for code that sends leases over the network."""

    topic: str
    id: int
    token: int


class MessageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Information about one message, as returned by `get`, `peek` and `dlq_list`."""

    id: int
    topic: str
    partition: int
    state: State
    priority: int | None = None
    attempts: int = 0  # deliveries so far
    due_at: datetime | None = None  # when it is or was due
    enqueued_at: datetime | None = None
    expires_at: datetime | None = None
    deadline: datetime | None = None  # of its lease
    holder: str | None = None
    reason: str | None = None  # of its last failure, or of its end
    ended_at: datetime | None = None  # when it was removed or became a dead letter
    payload: bytes | None = None
    key: str | None = None
    headers: dict[str, str] = {}
    fairness_key: str | None = None
    id_suffix: int = 0  # the topic's

    @property
    def message_id(self) -> str:
        return to_ulid(self.id, self.id_suffix)

    def __repr__(self) -> str:
        return repr_with_ulid(self)


def repr_with_ulid(info: Any) -> str:
    """Show a struct with its ULID instead of `id`, without fields that have their default value."""
    fields = zip(info.__struct_fields__, msgspec.structs.fields(info), strict=True)
    shown = [
        f"{name}={value!r}"
        for name, field in fields
        if name not in ("id", "id_suffix") and (value := getattr(info, name)) not in (field.default, {})
    ]
    return f"{type(info).__name__}({', '.join([info.message_id, *shown])})"


class DlqFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects dead letters. A field that is not given matches all."""

    reason: str | None = None  # part of the reason, case-insensitive
    priority_min: int | None = None
    priority_max: int | None = None
    died_after: datetime | None = None
    died_before: datetime | None = None
    key: str | None = None


class DepthBucket(msgspec.Struct, frozen=True):
    """Ready messages in a range of priorities; of effective priorities on an aging topic."""

    low: int
    high: int  # inclusive, like `low`
    count: int


class DueBucket(msgspec.Struct, frozen=True):
    """Delayed messages that become due within `within` seconds, but not within those of the previous bucket."""

    within: float | None  # 0 = already due and about to fire; None = later than the previous bucket
    count: int


class PartitionStats(msgspec.Struct, frozen=True, kw_only=True):
    partition: int
    ready: int
    delayed: int
    leased: int
    dead: int
    offset: int  # of the next row
    throttled: str | None = None  # why it is excluded from pops ("" = no reason given); None = it is not
    leased_total: int = 0  # messages leased from here since this process opened the topic
    updates_total: int = 0  # times that its head was read again
    prepared: int = 0  # in parts of undecided batches
    oldest_ready_age: float | None = None  # as in TopicStats
    blocked: int = 0  # ready messages held back because their fairness key has as many leases as allowed
    lease_ends_in: float | None = None  # as in TopicStats


class SpineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of choosing the next message across the partitions."""

    strategy: str
    k: int  # a pop may return any of the k best
    bound: int | None  # the rank that no pop exceeds as the topic is served now; None = the strategy has no bound
    partitions: int
    available: int  # partitions that are not throttled
    candidates: int  # how many of these have messages to give
    updates_total: int  # heads read, since this process opened the topic, as are all totals
    selections_total: int  # times that the best messages were chosen
    refusals_total: int  # selections that found nothing to give although messages were ready


class TopicAudit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of an audit of a topic, as the auditor reported it. A count is that of counterexamples."""

    until: datetime  # the audit covers what happened before
    recorded_at: datetime
    messages: int
    lost: int = 0
    doubled: int = 0  # leased to two holders at once, or leased again after its end
    early: int = 0  # leased before it was due
    refuted: list[str] = []  # all promises that were broken, by their names in the audit's report
    topics: int = 1  # audited together: the counts are of all of them


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics that only a broker with the feature "log" has."""

    commits_total: int  # units written, since this process opened the topic, as are all totals
    journal_bytes: int  # on disk
    journal_segments: int
    journal_bytes_written_total: int
    memory_bytes: int  # of heaps, timers and dedup
    clock_jumps_total: int
    reloads_total: int
    corrupt_records_total: int
    snapshot_bytes: int = 0  # of the newest snapshot; 0 = there is none
    snapshot_age: float | None = None  # seconds since it was written, or since this process opened the topic
    disk_free_bytes: int | None = None  # on the file system of the data directory; None = the disk is in memory
    audit: TopicAudit | None = None  # the last one that was recorded; None = there is none, or its file is damaged


class LatencyHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one kind of operation, counted by bucket since this process opened the topic."""

    bounds_ms: list[float]  # upper bounds of the buckets
    counts: list[int]  # one more than `bounds_ms`: the last counts all longer durations
    sum_ms: float


class TopicStats(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    ready: int
    delayed: int
    leased: int
    dead: int
    paused: bool
    durability: str  # the fsync policy in force, in words
    partitions: list[PartitionStats]
    enqueued_total: int  # since this process opened the topic, as are all totals
    duplicates_total: int
    leased_total: int
    acked_total: int
    nacked_total: int
    lease_timeouts_total: int
    dead_total: int
    expired_total: int
    dead_expired_total: int = 0  # dead letters that were deleted because of their age, number or size
    spine: SpineStats | None = None  # None: the broker lacks the feature "partitions"
    log: LogStats | None = None  # None: the broker lacks the feature "log"
    # Seconds since the oldest ready message was enqueued, even if it was delayed at first; None = none is ready. It may
    # be a removed message: one of 4096 neighbors in order, or one cancelled or expired and not yet swept.
    oldest_ready_age: float | None = None
    # By rising priority: 1, 2-4, 5-9, 10-19, … on both sides of 0; empty ones are omitted. Exact, unless messages were
    # cancelled, rescheduled or expired and not yet swept: then shares are estimated, and their sum is right.
    depth_by_priority: list[DepthBucket] = []
    # Already due, within 1 s, 10 s, 1 min, 10 min, 1 h, 6 h, 1 day, 7 days, 30 days, later. As exact as the depths.
    due_histogram: list[DueBucket] = []
    # Seconds until the first lease ends, unless it is extended or acked before; None = nothing is leased.
    lease_ends_in: float | None = None
    # "enqueue" and "pop" (calls, without waiting for a message), "commit" (units, until durable), "late" (how late the
    # engine handled planned timers), "fired" (delayed messages, from due to ready).
    latencies: dict[str, LatencyHistogram] = {}


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared batch, undecided or recently committed."""

    batch_id: str
    state: Literal["undecided", "committed"]
    parts: dict[str, dict[str, int]]  # part -> topic -> messages; of a committed batch the named parts, without topics
    messages: int  # prepared so far, or made visible by the commit
    since: datetime  # when its first part was prepared, or when it was committed


class SinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The last commit of a sink. Repeating it, or any lower version, changes nothing."""

    name: str
    version: int
    batch_id: str
    messages: int  # messages that it made visible
    topics: list[str]
    committed_at: datetime


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    incarnation: int
    config: TopicConfig
    id_suffix: int = 0  # the low bits of its messages' ULIDs, drawn when it was created; see contract/ids.py


class LogFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one partition in one durable unit, decoded into columns.

    `events` holds one `LogEvent` after the other, with offsets dense from `offset`.
    """

    topic: str
    partition: int
    unit: int
    offset: int
    row_count: int
    time_ms: int
    wall_ms: int
    events: Sequence[LogEvent]
    id_suffix: int = 0  # the topic's


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    offset: int
    row_count: int
    columns: dict[str, Any]  # arrays of row_count, or one value for all rows
    payloads: list[bytes] | None = None  # of messages in this event; batch_prepared has many in one row
