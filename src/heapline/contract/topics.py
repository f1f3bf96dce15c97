"""Topics: create, change, list and delete them; pause, purge, throttle; their statistics."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from heapline.contract.call import Access, Command, Count, Page, Repeat, Right, call
from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest
from heapline.contract.fields import PAGE_MAX, Cursor, Instant, Natural, Partition, Reason, ShortName, Topic
from heapline.contract.message import TopicInfo, TopicStats

ADMIN = Right.ADMIN


def _settings_of(kind: type[msgspec.Struct], name: str) -> Any:
    """A struct of the same fields, all of which may be left out."""
    fields = [(f.name, f.type | UnsetType, UNSET) for f in msgspec.structs.fields(kind)]
    made = msgspec.defstruct(
        name, fields, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, module=__name__
    )
    made.__doc__ = f"The fields of {kind.__name__} that are given."
    return made


#: Settings of a topic as a caller gives them. Omitted ones have their default, or keep their value.
TopicSettings = _settings_of(TopicConfig, "TopicSettings")


def given(settings: Any) -> dict[str, Any]:
    """Return the settings that a caller passed."""
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not UNSET}


@call(id=0x01, rpc="MakeHeap", http="POST /v1/heaps", needs=ADMIN, audit=(), status=201)
class CreateTopic(Command[TopicInfo]):
    """Create a topic. Creating it again with equal settings changes nothing; with other settings raises TopicExists."""

    topic: Topic
    config: TopicSettings = TopicSettings()  # type: ignore[valid-type]


@call(id=0x02, rpc="UpdateHeapConfig", http="PATCH /v1/heaps/{topic}", needs=ADMIN, audit=())
class UpdateTopic(Command[TopicInfo]):
    """Change settings of a topic. Settings that are not given keep their value."""

    topic: Topic
    config: TopicSettings = TopicSettings()  # type: ignore[valid-type]


@call(
    id=0x03, rpc="DeleteHeap", http="DELETE /v1/heaps/{topic}", needs=ADMIN, repeat=Repeat.ONCE, destroys=True, audit=()
)
class DeleteTopic(Command[None]):
    """Delete a topic with all its messages."""

    topic: Topic


@call(id=0x08, rpc="ListHeaps", http="GET /v1/heaps", rows=Access(None, "name"), route="all", merge="pages")
class ListTopics(Command[Page[TopicInfo]]):
    """List the topics on which the caller has any right, by name."""

    cursor: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1000


@call(id=0x09, rpc="GetHeap", http="GET /v1/heaps/{topic}", needs=(Access(None),))
class GetTopic(Command[TopicInfo]):
    """Return a topic's settings."""

    topic: Topic


@call(id=0x04, rpc="Stats", http="GET /v1/heaps/{topic}:stats", needs=Right.CONSUME)
class Stats(Command[TopicStats]):
    """Return the statistics of a topic."""

    topic: Topic


@call(id=0x0C, rpc="ListStats", http="GET /v1/stats", rows=Access(Right.CONSUME, "topic"), route="all", merge="pages")
class ListStats(Command[Page[TopicStats]]):
    """List the statistics of the topics that the caller may consume from, by name.

    A topic that is damaged or being reloaded is left out.
    """

    cursor: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


@call(id=0x05, rpc="Pause", http="POST /v1/heaps/{topic}:pause", needs=ADMIN, audit=("until",))
class PauseTopic(Command[None]):
    """Stop delivery, and only delivery, indefinitely or until a time."""

    topic: Topic
    until: Instant | None = None


@call(id=0x06, rpc="Resume", http="POST /v1/heaps/{topic}:resume", needs=ADMIN, audit=())
class ResumeTopic(Command[None]):
    """Start delivery again."""

    topic: Topic


@call(
    id=0x07, rpc="Purge", http="POST /v1/heaps/{topic}:purge", needs=ADMIN, repeat=Repeat.ONCE, destroys=True, audit=()
)
class Purge(Command[Count]):
    """Remove every message that is ready or delayed, and return how many. Leased messages stay.

    With `enqueued_before`, messages that were enqueued later stay too. A batch's were enqueued when it was prepared.
    """

    topic: Topic
    enqueued_before: Instant | None = None  # needs the feature "purge_count"


class WaitingCount(msgspec.Struct, frozen=True):
    count: int
    as_of: datetime  # by the topic's clock; messages enqueued since, or in this very millisecond, are not counted


@call(id=0x0D, rpc="PurgeCount", http="GET /v1/heaps/{topic}:purgeable", needs=Right.CONSUME, feature="purge_count")
class CountPurge(Command[WaitingCount]):
    """Count the messages that a purge would remove, before a purge of these.

    Give `as_of` as `enqueued_before` to that call. Messages that are enqueued meanwhile are then left alone. Older ones
    that start to wait meanwhile are purged too: of leases that ended, replayed dead letters and committed batches.
    """

    topic: Topic


@call(
    id=0x0A,
    rpc="SetPartitionThrottled",
    http="POST /v1/heaps/{topic}:throttle",
    needs=ADMIN,
    audit=("partition", "throttled"),
    feature="partitions",
)
class SetPartitionThrottled(Command[None]):
    """Leave a partition out of pops, or take it in again. Survives a restart; its messages wait."""

    topic: Topic
    partition: Partition
    throttled: bool
    reason: Reason | None = None


PROMISES_MAX = 50


@call(
    id=0x0E,
    rpc="RecordAudit",
    http="POST /v1/heaps/{topic}:audited",
    needs=ADMIN,
    audit=("lost", "doubled", "early"),
    feature="log",
)
class RecordAudit(Command[None]):
    """Keep the result of an audit with its topic, in place of the one before. Statistics show it (`log.audit`).

    The broker does not check the result: it is what the caller found. `heapline pipeline audit` calls this.
    """

    topic: Topic
    until: Instant  # the audit covers what happened before; not later than now
    messages: Natural = 0
    lost: Natural = 0
    doubled: Natural = 0
    early: Natural = 0
    refuted: list[ShortName] = msgspec.field(default_factory=list)
    topics: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1

    def validate(self) -> None:
        if len(self.refuted) > PROMISES_MAX:
            raise BadRequest(f"refuted must have at most {PROMISES_MAX} promises, got {len(self.refuted)}")


@call(id=0x0B, rpc="Snapshot", http="POST /v1/heaps/{topic}:snapshot", needs=ADMIN, audit=(), feature="log")
class Snapshot(Command[None]):
    """Write a snapshot now, so that the next start reads less of the journal."""

    topic: Topic
