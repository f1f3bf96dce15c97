"""The contract: what every broker can do, and nothing about how.

`heapline.open` gives one that lives in your process on a directory. Whatever else implements this behaves alike, which
one conformance suite checks. The words are those of docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

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
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer

Held = Message | LeaseRef | Iterable[Message | LeaseRef]
MessageId = str | int


@runtime_checkable
class Broker(Protocol):
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

    async def commit_batch(self, batch_id: str, parts: Sequence[str]) -> int:
        """Make exactly the named parts visible, all at once over all topics, and drop the others; returns how many
        messages. A part that is not prepared fails the whole commit (UnknownPart). Repeating it changes nothing."""
        ...

    async def abort_batch(self, batch_id: str) -> int:
        """Drop all parts of a batch that was not committed; returns how many there were."""
        ...

    async def list_batches(self) -> list[BatchInfo]:
        """Batches that are not decided, and those committed of late."""
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
