"""The things people hold in their hands: what goes in, what comes out, what is told about it.

Nothing here decides anything; a message only remembers which broker to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from heapline import contents
from heapline.config import TopicConfig
from heapline.ulid import to_ulid

if TYPE_CHECKING:
    from heapline.broker import Broker

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
State = Literal["ready", "delayed", "leased", "dead", "acked", "cancelled", "expired", "purged", "dropped", "deleted"]
IdempotencyScope = Literal["window", "pending", "until_ack"]


def from_ms(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


class Now(NamedTuple):
    """One look at the clock, in ms since the Unix epoch: time that never jumps, and time as the system tells it."""

    steady: int
    wall: int


class Outgoing(msgspec.Struct, frozen=True):
    """A message to be enqueued; everything but the payload has a default.

    >>> Outgoing(b"a", priority=1).priority
    1
    """

    payload: bytes
    priority: int = 0
    key: str | None = None  # partition key: messages of one key lie in one partition
    delay: float | None = None  # seconds from now until it may be delivered
    deliver_at: datetime | None = None  # the same as a moment of wall time (with a time zone)
    headers: Mapping[str, str] | None = None
    ttl: float | None = None  # seconds after falling due at which it expires if nobody has taken it
    max_retries: int | None = None  # None = the topic's max_retries_default
    idempotency_key: str | None = None
    idempotency_scope: IdempotencyScope | None = None  # None = "window"
    seq: int | None = None  # this message's number in its producer's epoch
    fairness_key: str | None = None  # who takes turns with others, on topics with fairness="keys"; also places it


class Enqueued(msgspec.Struct, frozen=True):
    """The answer to an enqueue. `error` is only set in a batch that is not atomic."""

    id: int
    duplicate: bool = False
    error: Exception | None = None

    @property
    def message_id(self) -> str:
        return to_ulid(self.id)


class Delivered:
    """What can be read of a message, whether it was leased or is a row of a stream. The fields are its heirs'."""

    __slots__ = ()

    id: int
    payload: bytes
    _headers: dict[str, str] | None
    _enqueued_ms: int

    @property
    def headers(self) -> dict[str, str]:
        return self._headers or {}

    @property
    def message_id(self) -> str:
        return to_ulid(self.id)

    @property
    def enqueued_at(self) -> datetime:
        return from_ms(self._enqueued_ms)

    def json(self) -> Any:
        """The payload read as plain values, by its content-type header; JSON where it has none."""
        return self.decode(Any)

    def decode(self, kind: Any) -> Any:
        """The payload as a `kind`: a dataclass, a struct, a pydantic model, list[int], …"""
        return contents.decode(self.payload, self.headers.get(contents.CONTENT_TYPE), kind)


class Message(Delivered):
    """A leased message. Ack it when the work is done; nack, release or bury it otherwise."""

    __slots__ = (
        "__weakref__", "_broker", "_deadline_ms", "_enqueued_ms", "_headers", "attempts", "fairness_key", "id", "key",
        "partition", "payload", "priority", "token", "topic",
    )  # fmt: skip

    def __init__(
        self, broker: Broker, topic: str, partition: int, id: int, token: int, payload: bytes, priority: int,
        attempts: int, key: str | None, headers: dict[str, str] | None, enqueued_ms: int, deadline_ms: int,
        fairness_key: str | None = None,
    ) -> None:  # fmt: skip
        self._broker = broker
        self.topic = topic
        self.partition = partition
        self.id = id
        self.token = token
        self.payload = payload
        self.priority = priority
        self.attempts = attempts
        self.key = key
        self._headers = headers
        self._enqueued_ms = enqueued_ms
        self._deadline_ms = deadline_ms
        self.fairness_key = fairness_key

    @property
    def deadline(self) -> datetime:
        """When the lease ends unless it is extended."""
        return from_ms(self._deadline_ms)

    async def ack(self) -> None:
        await self._broker.ack(self)

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


class Popped(NamedTuple):
    """What one pop leased, by field and best first: for those who pass messages on without looking at each."""

    ids: list[int]
    tokens: list[int]
    priorities: list[int]
    payloads: list[bytes]
    attempts: list[int]
    enqueued_ms: list[int]
    deadline_ms: list[int]
    partitions: list[int]
    keys: list[str | None] | None = None  # None: no message has one
    fairness_keys: list[str | None] | None = None
    headers: list[dict[str, str] | None] | None = None

    def without(self, rows: Sequence[int]) -> Popped:
        gone = set(rows)
        columns: Any = [c and [v for i, v in enumerate(c) if i not in gone] for c in self]
        return Popped(*columns)


class LeaseRef(NamedTuple):
    """All that acting on a lease needs; for those who carry leases over a wire."""

    topic: str
    id: int
    token: int


class MessageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one message: `get`, `peek` and `dlq_list` answer with it."""

    id: int
    topic: str
    partition: int
    state: State
    priority: int | None = None
    attempts: int = 0  # deliveries so far
    due_at: datetime | None = None  # when it is or was to be delivered
    enqueued_at: datetime | None = None
    expires_at: datetime | None = None
    deadline: datetime | None = None  # of its lease
    holder: str | None = None
    reason: str | None = None  # of its last failure, or of its end
    ended_at: datetime | None = None  # when it went, or died
    payload: bytes | None = None
    key: str | None = None
    headers: dict[str, str] = {}
    fairness_key: str | None = None

    @property
    def message_id(self) -> str:
        return to_ulid(self.id)


class DlqFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters; what is not given matches all."""

    reason: str | None = None  # part of the reason, without regard to case
    priority_min: int | None = None
    priority_max: int | None = None
    died_after: datetime | None = None
    died_before: datetime | None = None
    key: str | None = None


class DepthBucket(msgspec.Struct, frozen=True):
    """Ready messages of a range of priorities; of effective priorities on an aging topic."""

    low: int
    high: int  # both ends are within
    count: int


class DueBucket(msgspec.Struct, frozen=True):
    """Delayed messages that fall due within so many seconds, but not within those of the bucket before."""

    within: float | None  # 0 = due already and about to fire; None = later than the bucket before
    count: int


class PartitionStats(msgspec.Struct, frozen=True, kw_only=True):
    partition: int
    ready: int
    delayed: int
    leased: int
    dead: int
    offset: int  # the next row's
    throttled: str | None = None  # why it is left out of pops ("" = nobody said); None = it is not
    leased_total: int = 0  # messages that pops took from here since this process opened the topic
    updates_total: int = 0  # times that its head was read again
    prepared: int = 0  # in parts of batches that are not decided yet
    oldest_ready_age: float | None = None  # as in TopicStats
    blocked: int = 0  # of the ready ones, those set aside because their fairness key has all the leases it may
    lease_ends_in: float | None = None  # as in TopicStats


class SpineStats(msgspec.Struct, frozen=True, kw_only=True):
    """How the next message is chosen over the partitions."""

    strategy: str
    k: int  # a pop may return any of the k best
    bound: int | None  # the rank that no pop exceeds as the topic is served now; None = the strategy gives none
    partitions: int
    available: int  # partitions that are not throttled
    candidates: int  # of these, how many have something to give
    updates_total: int  # heads read, since this process opened the topic, as are all totals
    selections_total: int  # times that the best were chosen
    refusals_total: int  # selections that found nothing to give, though something was ready


class LatencyHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took each time, counted by bucket since this process opened the topic."""

    bounds_ms: list[float]  # upper ends of the buckets
    counts: list[int]  # one more than there are bounds: the last is for all that took longer
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
    commits_total: int
    journal_bytes: int  # on disk
    journal_segments: int
    journal_bytes_written_total: int
    memory_bytes: int  # of heaps, timers and dedup
    clock_jumps_total: int
    reloads_total: int
    corrupt_records_total: int
    spine: SpineStats
    # Seconds since the oldest ready message was enqueued, even if it was delayed at first; None = none is ready. It may
    # be a message that has gone: one of 4096 neighbours in order, or one cancelled or expired and not yet swept.
    oldest_ready_age: float | None = None
    # By rising priority: 1, 2-4, 5-9, 10-19, … on both sides of 0; empty ones are left out. Exact, unless messages were
    # cancelled, rescheduled or expired and not yet swept: then shares are estimated, and their sum is right.
    depth_by_priority: list[DepthBucket] = []
    # Due already, within 1 s, 10 s, 1 min, 10 min, 1 h, 6 h, 1 day, 7 days, 30 days, later. As exact as the depths.
    due_histogram: list[DueBucket] = []
    # Seconds until the first of the leases ends, if it is not extended or acked before; None = nothing is leased.
    lease_ends_in: float | None = None
    # "enqueue" and "pop" (calls, without waiting for a message to be there), "commit" (units, until durable), "late"
    # (how late the engine looked at what time brings about), "fired" (delayed messages, from due to ready).
    latencies: dict[str, LatencyHistogram] = {}


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared batch, undecided or lately committed."""

    batch_id: str
    state: Literal["undecided", "committed"]
    parts: dict[str, dict[str, int]]  # part -> topic -> messages; of a committed batch those named, without topics
    messages: int  # prepared so far, or made visible by the commit
    since: datetime  # its first part was prepared, or it was committed


class SinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The last commit of a sink: of it, and of all versions below, a repeat changes nothing."""

    name: str
    version: int
    batch_id: str
    messages: int  # that it made visible
    topics: list[str]
    committed_at: datetime


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    incarnation: int
    config: TopicConfig


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


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    offset: int
    row_count: int
    columns: dict[str, Any]  # arrays of row_count, or one value that holds for all rows
    payloads: list[bytes] | None = None  # of messages that this event brings; batch_prepared brings many in one row
