"""From the results of commands to the objects that people hold: messages, ids, rows of a stream, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any

from heapline.contract.columns import pack, unpack
from heapline.contract.errors import HeaplineError
from heapline.contract.groups import FetchedRows, PartitionBatch, StreamRows
from heapline.contract.leases import Leased, LeasedMessages
from heapline.contract.message import Enqueued, Message
from heapline.contract.messages import EnqueuedBatch, RowError
from heapline.contract.stream import Fetched, StreamBatch

if TYPE_CHECKING:
    from heapline.contract.broker import Broker


def enqueued(batch: EnqueuedBatch) -> list[Enqueued]:
    ids = unpack(batch.ids)
    if batch.duplicates is None:
        results = [Enqueued(id, id_suffix=batch.id_suffix) for id in ids]
    else:
        duplicates = zip(ids, bytes(batch.duplicates), strict=True)
        results = [Enqueued(id, bool(d), id_suffix=batch.id_suffix) for id, d in duplicates]
    for e in batch.errors or ():
        results[e.row] = Enqueued(0, error=e.error)
    return results


def pack_enqueued(results: Sequence[Enqueued], id_suffix: int) -> EnqueuedBatch:
    """The way back: the results of single messages as columns."""
    errors = []
    for i, r in enumerate(results):
        if r.error is not None:
            assert isinstance(r.error, HeaplineError)
            errors.append(RowError(i, r.error))
    duplicates = [r.duplicate for r in results]
    return EnqueuedBatch(
        pack([r.id for r in results]),
        memoryview(bytes(duplicates)) if any(duplicates) else None,
        errors or None,
        id_suffix,
    )


def messages_of(broker: Broker, leased: Leased, kind: type[Message] = Message) -> list[Message]:
    """The leased messages as objects that act through `broker`."""
    m = leased.messages
    if m is None:
        return []
    if len(m.payloads) == 1:  # a pop of one message: no columns to walk
        return [_only(broker, leased, m, kind)]
    ids = unpack(m.ids)
    rows = zip(
        repeat(broker, len(ids)),
        repeat(leased.topic),
        repeat(0) if m.partitions is None else unpack(m.partitions, "H"),
        ids,
        unpack(m.tokens),
        m.payloads,
        unpack(m.priorities),
        bytes(m.attempts),
        m.keys or repeat(None),
        m.headers or repeat(None),
        unpack(m.enqueued_ms),
        unpack(m.deadline_ms),
        m.fairness_keys or repeat(None),
        repeat(leased.id_suffix),
        strict=False,
    )
    return list(starmap(kind, rows))


def _only(broker: Broker, leased: Leased, m: LeasedMessages, kind: type[Message]) -> Message:
    return kind(
        broker,
        leased.topic,
        0 if m.partitions is None else int.from_bytes(m.partitions, "little"),
        int.from_bytes(m.ids, "little"),
        int.from_bytes(m.tokens, "little"),
        m.payloads[0],
        int.from_bytes(m.priorities, "little", signed=True),
        m.attempts[0],
        m.keys[0] if m.keys else None,
        m.headers[0] if m.headers else None,
        int.from_bytes(m.enqueued_ms, "little"),
        int.from_bytes(m.deadline_ms, "little"),
        m.fairness_keys[0] if m.fairness_keys else None,
        leased.id_suffix,
    )


def fetched(rows: FetchedRows) -> Fetched:
    return Fetched(step_batches(rows.topic, rows.batches, rows.id_suffix), rows.partitions, rows.generation)


def step_batches(topic: str, batches: Sequence[PartitionBatch], id_suffix: int) -> list[StreamBatch]:
    """Rows as batches whose columns are arrays over the same memory."""
    import numpy as np

    def column(packed: Any) -> Any:
        return np.frombuffer(packed, dtype="<i8")

    return [
        StreamBatch(
            None,
            topic,
            batch.partition,
            column(batch.rows.offsets),
            column(batch.rows.ids),
            batch.rows.payloads,
            column(batch.rows.priorities),
            np.frombuffer(batch.rows.attempts, dtype=np.uint8).astype(np.int64),
            column(batch.rows.enqueued_ms),
            batch.rows.keys,
            batch.rows.headers,
            batch.rows.fairness_keys,
            id_suffix=id_suffix,
        )
        for batch in batches
    ]


def pack_batch(batch: StreamBatch) -> PartitionBatch:
    """The way back, without copying a column. Payloads may stay in one buffer until they are sent."""
    import numpy as np

    def packed(column: Any) -> memoryview:
        return memoryview(np.ascontiguousarray(column).data).cast("B")

    rows = StreamRows(
        packed(batch.offsets),
        packed(batch.ids),
        batch.payloads,  # type: ignore[arg-type]
        packed(batch.priorities),
        packed(batch.attempts.astype(np.uint8)),
        packed(batch.enqueued_ms),
        batch.keys,  # type: ignore[arg-type]
        batch.fairness_keys,  # type: ignore[arg-type]
        batch.headers,  # type: ignore[arg-type]
    )
    return PartitionBatch(batch.partition, rows)
