"""Decode units of a journal into Arrow batches of a view: which rows are shown, and where their records are found.

The task that reads a unit decodes a row of it only if the row's offset is in the requested range. So ranges that are
split at any units yield every row exactly once.

*Prepared messages* are recorded before the row that makes them visible. Parts that were prepared within the same task
are cached until their batch is decided, up to CACHE_BYTES; for older parts the log is read again. *Moved* records are
copies of older ones that are written before a segment is deleted. They are not rows of `messages`, but a prepared
message may exist only there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from heapline.contract.errors import BadRequest
from heapline.core.events import AnyEvent, BatchAborted, BatchCommitted, BatchPrepared, Enqueued, Moved, decode_events
from heapline.journal.unit import Unit
from heapline.spark.arrow import I64
from heapline.spark.topic_log import Ranges
from heapline.spark.views.events import EventBatches
from heapline.spark.views.messages import MessageBatches, UnitRecords, in_order, own_records, records_of

CACHE_BYTES = 64 << 20


class Recorded(Protocol):
    """Finds the records of prepared messages that were recorded before the first unit of a task."""

    def prepared_units(self, partition: int, first_id: int, before: int) -> Iterable[Unit]:
        """Return units below number `before` that include all that recorded ids of the partition from `first_id` on."""

    def all_units(self) -> Iterable[Unit]:
        """Return all units of the log."""


class RecordsGone(BadRequest):
    """The records of messages were reclaimed, but not the row that made the messages visible."""

    def __init__(self, partition: int, count: int, batch_id: str) -> None:
        super().__init__(
            f"the records of {count} message(s) of batch {batch_id!r} in partition {partition} were reclaimed with the "
            "start of the journal; start at a later offset, or set failOnDataLoss=false to skip these messages"
        )


class Decoder:
    """Decodes the units of one task.

    If the record of a message is gone, the message is skipped in partitions that are `tolerant`; in others it is an
    error.
    """

    def __init__(
        self, ranges: Ranges, recorded: Recorded, tolerant: Collection[int], into: MessageBatches | EventBatches
    ) -> None:
        self._ranges, self._tolerant, self._into = ranges, tolerant, into
        self._prepared = PreparedParts(recorded)
        self._show: Callable[[Unit, int, AnyEvent, int, int, int], None]
        self._show = self._show_messages if isinstance(into, MessageBatches) else self._show_events

    def batches(self, units: Iterable[Unit]) -> Iterator[Any]:
        """Yield batches until all ranges have been read or the units end."""
        ends = {partition: end for partition, (start, end) in self._ranges.items() if start < end}
        for unit in units:
            for frame in unit.frames:
                start, end = self._ranges.get(frame.partition, (0, 0))
                if end <= frame.first_offset or frame.first_offset + frame.row_count <= start:
                    continue
                self._frame(unit, frame, start, end)
                if frame.first_offset + frame.row_count >= end:
                    ends.pop(frame.partition, None)
            if self._into.is_full:
                yield self._into.take()
            if not ends:
                break
        if self._into.count:
            yield self._into.take()

    def _frame(self, unit: Unit, frame: Any, start: int, end: int) -> None:
        offset = frame.first_offset
        for event in decode_events(frame.events, f"unit {unit.number}"):
            count = event.rows()
            low, high = max(start - offset, 0), min(end - offset, count)
            if isinstance(event, BatchPrepared):
                self._prepared.add(unit, frame.partition, event)
            if low < high:
                self._show(unit, frame.partition, event, offset, low, high)
            if isinstance(event, BatchCommitted | BatchAborted):
                self._prepared.drop(frame.partition, event)
            offset += count

    def _show_messages(self, unit: Unit, partition: int, event: AnyEvent, offset: int, low: int, high: int) -> None:
        assert isinstance(self._into, MessageBatches)
        if isinstance(event, Enqueued):
            self._into.add(records_of(unit, event).between(low, high), partition, offset + low, unit)
        elif isinstance(event, BatchCommitted) and len(event.ids):
            for first, records in self._committed(unit, partition, event, low, high):
                self._into.add(records, partition, offset + first, unit, event.batch_id)

    def _show_events(self, unit: Unit, partition: int, event: AnyEvent, offset: int, low: int, high: int) -> None:
        assert isinstance(self._into, EventBatches)
        records: list[UnitRecords] = []
        if isinstance(event, Enqueued | Moved):
            records = [records_of(unit, event).between(low, high)]
        elif isinstance(event, BatchPrepared):
            records = [records_of(unit, event)] if event.count else []
        elif isinstance(event, BatchCommitted) and len(event.ids):
            found = self._committed(unit, partition, event, low, high)
            # Records are added only if there is one for every row; otherwise they would not line up with the rows.
            if sum(len(r) for _, r in found) == high - low:
                records = [r for _, r in found]
        self._into.add(event, records, partition, offset, unit, low, high)

    def _committed(
        self, unit: Unit, partition: int, event: BatchCommitted, low: int, high: int
    ) -> list[tuple[int, UnitRecords]]:
        """Return (row of the event, records from there on) of the messages that a commit makes visible."""
        ids = event.ids[low:high]
        found = self._prepared.find(partition, event, ids, unit.number)
        pieces = in_order(found, ids)
        if pieces is not None:
            firsts = low + np.cumsum([0, *(len(piece) for piece in pieces)])
            return list(zip(firsts.tolist(), pieces, strict=False))
        there = np.concatenate([np.zeros(0, dtype=np.int64), *(records.ids for records in found)])
        kept = np.flatnonzero(np.isin(ids, there))
        if partition not in self._tolerant:
            raise RecordsGone(partition, len(ids) - len(kept), event.batch_id)
        # One by one: this only happens at the very start of a journal.
        return [(low + row, piece) for row in kept.tolist() for piece in in_order(found, ids[row : row + 1]) or ()]


class PreparedParts:
    """Prepared records that were read and not decided yet; finds others in the log."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._cached: dict[tuple[int, str, str], UnitRecords] = {}  # by partition, batch, part
        self._bytes = 0

    def add(self, unit: Unit, partition: int, event: BatchPrepared) -> None:
        if not event.count:
            return
        records = own_records(unit, event)
        self._cached[partition, event.batch_id, event.part] = records
        self._bytes += records.data.nbytes
        while self._bytes > CACHE_BYTES:  # the oldest can be read from the log again
            self._evict(next(iter(self._cached)))

    def _evict(self, key: tuple[int, str, str]) -> None:
        self._bytes -= self._cached.pop(key).data.nbytes

    def drop(self, partition: int, event: BatchCommitted | BatchAborted) -> None:
        if isinstance(event, BatchAborted) or not event.more:
            for key in [key for key in self._cached if key[:2] == (partition, event.batch_id)]:
                self._evict(key)

    def find(self, partition: int, event: BatchCommitted, ids: I64, before: int) -> list[UnitRecords]:
        """Return records that include those of the ids, as far as they exist."""
        keys = [(partition, event.batch_id, part) for part in event.parts]
        found = [self._cached[key] for key in keys if key in self._cached]
        missing = _missing(ids, found)
        if len(missing):
            units = self._recorded.prepared_units(partition, int(missing.min()), before)
            found += _search(units, partition, missing)
            missing = _missing(ids, found)
        if len(missing):
            found += _search(self._recorded.all_units(), partition, missing)
        return found


def _missing(ids: I64, found: list[UnitRecords]) -> I64:
    there = np.concatenate([np.zeros(0, dtype=np.int64), *(records.ids for records in found)])
    missing: I64 = ids[~np.isin(ids, there)]
    return missing


def _search(units: Iterable[Unit], partition: int, ids: I64) -> list[UnitRecords]:
    found: list[UnitRecords] = []
    for unit in units:
        for frame in unit.frames:
            if frame.partition != partition or frame.first_id < 0:
                continue
            for event in decode_events(frame.events, f"unit {unit.number}"):
                if isinstance(event, BatchPrepared | Moved) and event.count:
                    here = np.isin(records_of(unit, event).ids, ids)
                    if here.any():
                        found.append(own_records(unit, event).take(here))
                        ids = ids[~np.isin(ids, found[-1].ids)]
        if not len(ids):
            break
    return found
