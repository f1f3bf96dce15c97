"""Inspection: why the queue does what it does. Nothing here changes a message, except to end a lease by force."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from heapline.contract.call import Access, Command, Count, Page, Repeat, Right, call
from heapline.contract.errors import BadRequest
from heapline.contract.fields import Cursor, Instant, Key, Label, MessageId, Reason, Topic
from heapline.contract.ids import to_ulid
from heapline.contract.message import MessageInfo, repr_with_ulid

EXPLAINED_MAX = 100
LEASES_MAX = 1000
PageLimit = Annotated[int, Meta(ge=1, le=LEASES_MAX)]
HoldKind = Literal["paused", "in_flight", "rate", "throttled", "fairness", "freshness"]


class DeliveryHold(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason why messages that are ready are not handed out now."""

    kind: HoldKind
    count: int  # messages that it may hold back
    text: str
    until: datetime | None = None  # when time alone ends it


class ExplainedMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message's place in line and what it follows from."""

    message: MessageInfo  # without payload and headers
    text: str  # one sentence
    line: int | None = None  # 1 = the next; None: it is not in line, or strategy and limits leave its place open
    age: float = 0.0  # seconds since it was enqueued
    effective_priority: float | None = None  # on a topic with aging: the priority after `age`
    turns_ahead: int | None = None  # on a topic with fairness keys: turns of its priority before its own


class Explanation(Struct, frozen=True, kw_only=True):
    topic: str
    ready: int
    items: list[ExplainedMessage]  # best first
    holds: list[DeliveryHold] = []


@call(id=0xB0, rpc="Explain", http="GET /v1/heaps/{topic}/explain", needs=Right.CONSUME, feature="explain")
class Explain(Command[Explanation]):
    """Explain what would be popped next, best first, or why one message waits. Nothing is leased or changed."""

    topic: Topic
    limit: Annotated[int, Meta(ge=1, le=EXPLAINED_MAX)] = 10
    message_id: MessageId | None = None


class HeldLease(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lease without its token, which only its holder knows."""

    id: int
    partition: int
    holder: str | None = None
    since: datetime
    deadline: datetime
    attempts: int = 0  # deliveries, with this one
    id_suffix: int = 0  # of the topic

    @property
    def message_id(self) -> str:
        return to_ulid(self.id, self.id_suffix)

    __repr__ = repr_with_ulid


@call(id=0xB1, rpc="ListLeases", http="GET /v1/heaps/{topic}/leases", needs=Right.CONSUME, feature="leases")
class ListLeases(Command[Page[HeldLease]]):
    """List the leases of a topic, the oldest first: who holds which message, since when and until when."""

    topic: Topic
    holder: Label | None = None
    cursor: Cursor | None = None
    limit: PageLimit = 100


@call(
    id=0xB2,
    rpc="EndLeases",
    http="POST /v1/heaps/{topic}/leases:end",
    needs=Right.ADMIN,
    repeat=Repeat.ONCE,  # the message may have another holder by then
    audit=("ids", "reason"),
    feature="leases",
)
class EndLeases(Command[Count]):
    """Take messages from their holders, as a nack with the topic's backoff does, and return how many.

    With `granted_until`, leave a lease that was granted later: its holder is not the one that the caller saw.
    """

    topic: Topic
    ids: list[MessageId]
    granted_until: Instant | None = None
    reason: Reason | None = None

    def validate(self) -> None:
        if not 1 <= len(self.ids) <= LEASES_MAX:
            raise BadRequest(f"ids must have 1 to {LEASES_MAX} messages, got {len(self.ids)}")


class WorkerInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One holder of leases on one topic, or one that had some in the last hour."""

    topic: str
    holder: str
    leases: int = 0
    waiting: int = 0  # its pops that wait for a message now
    rate: float = 0.0  # messages leased per second, over about a minute
    last_lease_at: datetime | None = None  # None: not since this process opened the topic


@call(
    id=0xB3,
    rpc="ListWorkers",
    http="GET /v1/workers",
    rows=Access(Right.CONSUME, "topic"),
    route="all",
    merge="pages",
    feature="leases",
)
class ListWorkers(Command[Page[WorkerInfo]]):
    """List who takes messages from the topics that the caller may consume from, by topic and name."""

    cursor: Cursor | None = None
    limit: PageLimit = 100


class TopicSeries(Struct, frozen=True, kw_only=True):
    """Depths and rates over time, oldest first, one item per point in every list.

    Points are added only when something changes: where some are missing, depths are as in the point before, and nothing
    was done.
    """

    topic: str  # "" for all topics together
    interval: int  # seconds between samples; 0: this broker keeps none (the setting `series`)
    times: list[int]  # Unix time, in seconds
    seconds: list[int]  # what a point stands for: 10, then 60 and 600 with age
    ready: list[int]
    delayed: list[int]
    leased: list[int]
    dead: list[int]
    enqueued: list[int]  # these three: since the point before
    done: list[int]
    failed: list[int]  # nacked, timed out or dead
    oldest_wait: list[int]  # seconds since the oldest ready message was enqueued; 0: none was ready


@call(
    id=0xB4,
    rpc="StatsSeries",
    http="GET /v1/series",
    needs=Right.CONSUME,
    route="all",
    merge="series",
    feature="series",
)
class StatsSeries(Command[TopicSeries]):
    """Return depths and rates of the last 24 hours, of one topic or of all together."""

    topic: Topic | None = None
    since: Instant | None = None


class MessageEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a message. Its kind is that of the log; "due" says when a delay ended."""

    kind: str
    at: datetime
    offset: int | None = None
    attempts: int | None = None  # of a lease: number of the delivery
    holder: str | None = None
    deadline: datetime | None = None
    due_at: datetime | None = None
    priority: int | None = None
    reason: str | None = None
    group: str | None = None
    batch: str | None = None


class MessageLife(Struct, frozen=True, kw_only=True):
    """A message's life, oldest event first, as far as the journal has it."""

    items: list[MessageEvent]
    is_complete: bool  # begins with the enqueue; False: the journal's older part was reclaimed
    known_since: datetime | None = None  # where the journal was read from
    read_until: datetime
    cursor: str | None = None  # there may be more; absent at the end of the log or of the message's life


@call(id=0xB5, rpc="MessageHistory", http="GET /v1/heaps/{topic}/history", needs=Right.CONSUME, feature="history")
class MessageHistory(Command[MessageLife]):
    """Return what happened to one message, from the journal. Each call reads a bounded part of it."""

    topic: Topic
    message_id: MessageId
    limit: PageLimit = 100
    cursor: Cursor | None = None


SearchText = Annotated[str, Meta(min_length=1, max_length=1024)]


class FoundMessage(Struct, frozen=True, kw_only=True):
    message: MessageInfo  # without payload and headers
    where: str  # "key", "fairness_key", "payload", or "header" and its name
    excerpt: str  # the text around the match


class SearchResult(Struct, frozen=True, kw_only=True):
    """Matches in a part of a topic's messages, and how much of them was read so far."""

    items: list[FoundMessage]
    read: int  # messages read by this call and the ones before
    total: int  # messages in the topic now
    cursor: str | None = None  # absent: all were read


@call(id=0xB6, rpc="SearchMessages", http="GET /v1/heaps/{topic}/search", needs=Right.CONSUME, feature="search")
class SearchMessages(Command[SearchResult]):
    """Search the messages in a topic for text in payload, key or headers, ignoring case.

    Each call reads a bounded number of messages, from the oldest record on, and may find none; continue with the
    cursor.
    """

    topic: Topic
    text: SearchText | None = None
    key: Key | None = None
    header: SearchText | None = None
    state: Literal["ready", "delayed", "leased", "dead"] | None = None
    limit: PageLimit = 50
    cursor: Cursor | None = None

    def validate(self) -> None:
        if self.text is None and self.key is None and self.header is None:
            raise BadRequest("nothing to search for; give text, key (the whole key) or header (NAME=VALUE, or a name)")


class DueSpan(Struct, frozen=True, omit_defaults=True):
    """Delayed messages that become due within `seconds` from `at`."""

    at: datetime
    seconds: int
    count: int
    is_herd: bool = False  # many more than around it


class DueHistogram(Struct, frozen=True, kw_only=True):
    topic: str
    overdue: int  # about to fire
    hour: list[DueSpan]  # the next hour, minute by minute
    day: list[DueSpan]  # the next day, in half hours
    later: int


@call(id=0xB7, rpc="DueTimes", http="GET /v1/heaps/{topic}/due", needs=Right.CONSUME, feature="due_times")
class GetDueTimes(Command[DueHistogram]):
    """Return when delayed messages become due: over the next hour and the next day."""

    topic: Topic
