"""The contract: what every broker can do, and nothing about how.

`heapline.open` gives one that lives in your process on a directory. Whatever else implements this behaves alike, which
one conformance suite checks. The words are those of docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from heapline.model import (
    BatchInfo,
    DlqFilter,
    Enqueued,
    IdempotencyScope,
    LeaseRef,
    LogFrame,
    Message,
    MessageInfo,
    Outgoing,
    SinkInfo,
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer

if TYPE_CHECKING:
    from heapline.schedules import ScheduleInfo
    from heapline.streams import (
        Fetched,
        GroupDeadLetter,
        GroupEvents,
        GroupInfo,
        GroupOffset,
        Offsets,
        Place,
        ReplayFilter,
        ReplayInfo,
        StreamBatch,
        StreamMessage,
    )  # fmt: skip

Held = Message | LeaseRef | Iterable[Message | LeaseRef]
MessageId = str | int


class Subscription(Protocol):
    """A member of a group: iterate for its rows, or their batches."""

    topic: str
    group: str
    member: str

    @property
    def partitions(self) -> list[int]:
        """That it reads now."""
        ...

    async def __aenter__(self) -> Subscription: ...

    async def __aexit__(self, *error: Any) -> None: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...

    async def ack(self, rows: Any) -> None:
        """Rows or batches, one or many, or {partition: offsets}."""
        ...

    async def nack(self, rows: Any, *, reason: str | None = None) -> None: ...

    async def close(self) -> None:
        """Leave: what is not acked goes to others."""
        ...


class GroupBroker(Protocol):
    """Topics read as streams, by consumer groups."""

    async def create_group(self, topic: str, group: str, *, start: Place = "earliest", **config: Any) -> GroupInfo:
        """Make a consumer group that begins at `start`. Again with an equal config is fine (it stays where it is); with
        another one raises GroupExists. `config` are the fields of GroupConfig."""
        ...

    async def get_group(self, topic: str, group: str) -> GroupInfo: ...

    async def list_groups(self, topic: str) -> list[GroupInfo]: ...

    async def delete_group(self, topic: str, group: str) -> None: ...

    async def group_offsets(self, topic: str, group: str) -> list[GroupOffset]: ...

    async def reset_offsets(
        self, topic: str, group: str, *, to: Place, partitions: Sequence[int] | None = None
    ) -> list[GroupOffset]:
        """Let a group go on from elsewhere. An observer group is moved on by the same call."""
        ...

    def subscribe(
        self, topic: str, *, group: str, member: str | None = None, credits: int = 1000, batches: bool = False,
        start: Place = "earliest", on_assigned: GroupEvents | None = None, on_revoked: GroupEvents | None = None,
        **config: Any,
    ) -> Subscription:  # fmt: skip
        """Read a topic as a member of a group, which is made if it is not there. Use it with `async with`, iterate.

        At most `credits` rows are out at a time: more come as they are acked. `member` None: a name of its own, that
        leaves the group when it is closed. Another subscription of the same member takes over from this one.
        """
        ...

    async def group_fetch(
        self, topic: str, group: str, member: str, *, session: str, max_messages: int = 1000,
        max_bytes: int = 2 << 20, wait: float = 0.0, start: Place = "earliest", config: Mapping[str, Any] | None = None,
    ) -> Fetched:  # fmt: skip
        """One step of a subscription: join if need be (the group is made if it is not there), give a sign of life, and
        take rows; waits up to `wait` seconds for the first, or for partitions to change hands."""
        ...

    async def group_ack(self, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        """These rows are done. Acks all it can, then raises DeliveryLost if some were not the member's any more."""
        ...

    async def group_nack(
        self, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None: ...

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        """What the member holds goes to others at once."""
        ...

    async def group_dead_list(self, topic: str, group: str, limit: int = 100) -> list[GroupDeadLetter]: ...

    async def group_dead_replay(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        """Deliver dead letters of a group to it once more, all or these; returns how many."""
        ...

    async def group_dead_delete(self, topic: str, group: str, offsets: Offsets | None = None) -> int: ...


class ReplayBroker(Protocol):
    """What was, again."""

    def replay(
        self, topic: str, *, start: Place = "earliest", end: Place | None = None,
        partitions: Sequence[int] | None = None, mode: str = "all", where: ReplayFilter | None = None,
        rate: float | None = None, checkpoint: str | None = None, batches: bool = False,
    ) -> AsyncIterator[StreamMessage | StreamBatch]:  # fmt: skip
        """The stream from `start` to `end` (what is durable when it begins), to whoever iterates. mode="fast": only the
        last state of each message, and only what is not gone. With `checkpoint`, a name, it goes on after a crash where
        it was: a few rows before that may come twice, none is missing."""
        ...

    async def start_replay(
        self, name: str, topic: str, *, into: str | None = None, start: Place = "earliest", end: Place | None = None,
        partitions: Sequence[int] | None = None, mode: str = "all", where: ReplayFilter | None = None,
        rate: float | None = None, priority: int | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, keep_due: bool = False,
    ) -> ReplayInfo:  # fmt: skip
        """Enqueue the stream's messages into a topic (the same, if none is given), each once, also over restarts."""
        ...

    async def get_replay(self, name: str) -> ReplayInfo: ...

    async def list_replays(self) -> list[ReplayInfo]: ...

    async def cancel_replay(self, name: str) -> ReplayInfo: ...


class ScheduleBroker(Protocol):
    """Messages that are enqueued by the calendar."""

    async def create_schedule(
        self, name: str, *, topic: str, payload: bytes = b"", cron: str | None = None,
        every: float | None = None, tz: str | None = None, **more: Any,
    ) -> ScheduleInfo:  # fmt: skip
        """Enqueue a message at each of these times, once each. Again under the same name changes the schedule. `more`:
        starts, ends, misfire, grace, makeup_max, and the message's priority, key, headers, ttl, max_retries,
        fairness_key."""
        ...

    async def get_schedule(self, name: str) -> ScheduleInfo: ...

    async def list_schedules(self) -> list[ScheduleInfo]: ...

    async def pause_schedule(self, name: str) -> ScheduleInfo: ...

    async def resume_schedule(self, name: str) -> ScheduleInfo: ...

    async def delete_schedule(self, name: str) -> None: ...


@runtime_checkable
class Broker(GroupBroker, ReplayBroker, ScheduleBroker, Protocol):
    # -- topics ----------------------------------------------------------------------------------------------------

    async def create_topic(self, topic: str, **config: Any) -> TopicInfo:
        """Make a topic. Again with an equal config is fine; with another one raises TopicExists."""
        ...

    async def update_topic(self, topic: str, **config: Any) -> TopicInfo: ...

    async def list_topics(self) -> list[TopicInfo]: ...

    async def delete_topic(self, topic: str) -> None: ...

    async def stats(self, topic: str) -> TopicStats: ...

    async def purge(self, topic: str) -> int:
        """Remove everything ready and delayed; returns how many. What is leased stays."""
        ...

    async def pause_topic(self, topic: str, until: datetime | None = None) -> None:
        """Stop delivery (only that), for good or until a moment."""
        ...

    async def resume_topic(self, topic: str) -> None: ...

    async def set_partition_throttled(
        self, topic: str, partition: int, throttled: bool, reason: str | None = None
    ) -> None:
        """Leave a partition out of pops, or no longer; survives a restart. Its messages wait, all else goes on."""
        ...

    async def snapshot(self, topic: str) -> None: ...

    # -- in --------------------------------------------------------------------------------------------------------

    async def enqueue(
        self, topic: str, payload: bytes, *, priority: int = 0, key: str | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, headers: Mapping[str, str] | None = None, ttl: float | None = None,
        max_retries: int | None = None, idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, seq: int | None = None,
        answered_below: int | None = None, fairness_key: str | None = None,
    ) -> Enqueued:  # fmt: skip
        """Answered when durable."""
        ...

    async def enqueue_batch(
        self, topic: str, messages: Sequence[Outgoing], *, atomic: bool = True, producer: Producer | None = None,
        producer_id: str | None = None, epoch: int | None = None, answered_below: int | None = None,
    ) -> list[Enqueued]:  # fmt: skip
        """All or none; with atomic=False each result carries its own error."""
        ...

    async def open_producer(self, topic: str, producer_id: str) -> int:
        """Begin a new epoch of a producer; older ones are fenced."""
        ...

    # -- prepared batches ------------------------------------------------------------------------------------------

    async def prepare_batch(
        self, batch_id: str, part: str, messages: Mapping[str, Sequence[Outgoing]] | Sequence[Outgoing], *,
        topic: str | None = None, producer_id: str | None = None, epoch: int | None = None,
        answered_below: int | None = None,
    ) -> dict[str, list[Enqueued]]:  # fmt: skip
        """Store one part of a batch, durable and invisible: messages by topic, or a list with `topic`.

        Repeating it with the same content gets the same ids; with other content, IdempotencyConflict.
        """
        ...

    async def commit_batch(
        self, batch_id: str, parts: Sequence[str], *, sink: str | None = None, version: int | None = None
    ) -> int:
        """Make exactly the named parts visible, all at once over all topics, and drop the others; returns how many
        messages. A part that is not prepared fails the whole commit (UnknownPart). Repeating it changes nothing.

        With a sink and a version it is one of a row of commits whose versions rise. The last version of a sink is
        remembered for ever: a commit of that or a lower one, whatever its batch and parts, changes nothing, drops what
        was prepared under its batch and returns what the first one did, or 0 if that is no longer known.
        """
        ...

    async def abort_batch(self, batch_id: str) -> int:
        """Drop all parts of a batch that was not committed; returns how many there were."""
        ...

    async def list_batches(self) -> list[BatchInfo]:
        """Batches that are not decided, and those committed of late."""
        ...

    async def list_sinks(self) -> list[SinkInfo]:
        """The sinks that batches were committed for, each with its last commit."""
        ...

    async def forget_sink(self, name: str) -> bool:
        """Forget which version of a sink was committed last, so that its versions may start again; whether there was
        such a sink. Whoever still repeats a commit of it doubles its messages."""
        ...

    # -- out -------------------------------------------------------------------------------------------------------

    async def pop(
        self, topic: str, max_messages: int = 1, *, visibility: float | None = None, wait: float = 0.0,
        holder: str | None = None, max_bytes: int = 2 << 20, request_id: str | None = None,
    ) -> list[Message]:  # fmt: skip
        """Lease the best messages that are due; waits up to `wait` seconds for the first one."""
        ...

    async def ack(self, messages: Held) -> None:
        """Done. Acks all it can, then raises LeaseLost if some were not held."""
        ...

    async def nack(self, messages: Held, *, backoff: float | None = None, reason: str | None = None) -> None: ...

    async def release(self, messages: Held) -> None: ...

    async def extend(self, messages: Held, seconds: float) -> None: ...

    async def bury(self, messages: Held, *, reason: str | None = None) -> None: ...

    # -- by id -----------------------------------------------------------------------------------------------------

    async def get(self, topic: str, message_id: MessageId) -> MessageInfo: ...

    async def peek(self, topic: str, limit: int = 10) -> list[MessageInfo]: ...

    async def cancel(self, topic: str, message_id: MessageId) -> None: ...

    async def reschedule(
        self, topic: str, message_id: MessageId, *, delay: float | None = None, deliver_at: datetime | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        """Change when or how urgently a waiting message is served; what is not given stays."""
        ...

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def dlq_list(self, topic: str, limit: int = 100, *, where: DlqFilter | None = None) -> list[MessageInfo]: ...

    async def dlq_replay(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None,
        rate: float | None = None,
    ) -> int:  # fmt: skip
        """Bring dead letters back with no attempts, at most `rate` a second; returns how many."""
        ...

    async def dlq_delete(
        self, topic: str, ids: Sequence[MessageId] | None = None, *, where: DlqFilter | None = None
    ) -> int: ...

    # -- the log ---------------------------------------------------------------------------------------------------

    async def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """{partition: (start, end)} of what can be read; end is what is durable."""
        ...

    def read_log(
        self, topic: str, partition: int = 0, start: int = 0, end: int | None = None
    ) -> AsyncIterator[LogFrame]: ...

    async def close(self) -> None: ...
