"""From units of a journal to Arrow batches of a view: which rows are shown, and where their records are found.

A row of the log is read by whoever is given its unit, and only if its offset lies in the range asked for; so ranges
that are cut into pieces at any units give every row once.

*Prepared messages* are recorded before the row that makes them visible. What was prepared in the same piece is kept
until its batch is decided, up to KEPT_BYTES; for what lies further back the log is asked again. *Moved* records are
copies of older ones, made before a segment goes: in `messages` they are no rows, but a prepared message may by then be
found only there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from heapline.core.events import (
    AnyEvent,
    BatchAborted,
    BatchCommitted,
    BatchPrepared,
    Enqueued,
    Moved,
    decode_events,
)
from heapline.errors import BadRequest
from heapline.journal.unit import Unit
from heapline.spark.buffers import I64
from heapline.spark.events import EventBatches
from heapline.spark.messages import MessageBatches
from heapline.spark.records import Records, in_order, own_records, records_of

KEPT_BYTES = 64 << 20
Ranges = Mapping[int, tuple[int, int]]  # partition -> [start, end)


class Recorded(Protocol):
    """Who finds the records of prepared messages that were recorded before a piece began."""

    def prepared_units(self, partition: int, first_id: int, before: int) -> Iterable[Unit]:
        """Units below number `before` among which those are that recorded ids of the partition from `first_id` on."""

    def all_units(self) -> Iterable[Unit]:
        """All that the log has."""


class RecordsGone(BadRequest):
    """Messages whose records were reclaimed, though the row that made them visible was not."""

    def __init__(self, partition: int, count: int, batch_id: str) -> None:
        super().__init__(
            f"the records of {count} message(s) of batch {batch_id!r} in partition {partition} were prepared below the "
            "start of the journal and are gone: start at a later offset, or set failOnDataLoss=false to go on without"
        )


class Decoder:
    """Decodes one piece. `tolerant`: partitions of which messages are left out whose records are gone; of others that
    is an error."""

    def __init__(
        self, ranges: Ranges, recorded: Recorded, tolerant: Collection[int], into: MessageBatches | EventBatches
    ) -> None:
        self._ranges, self._tolerant, self._into = ranges, tolerant, into
        self._prepared = PreparedParts(recorded)
        self._show: Callable[[Unit, int, AnyEvent, int, int, int], None]
        self._show = self._show_messages if isinstance(into, MessageBatches) else self._show_events

    def batches(self, units: Iterable[Unit]) -> Iterator[Any]:
        """Ends when all ranges have been read, or when the units end."""
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
                self._prepared.keep(unit, frame.partition, event)
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
        records: list[Records] = []
        if isinstance(event, Enqueued | Moved):
            records = [records_of(unit, event).between(low, high)]
        elif isinstance(event, BatchPrepared):
            records = [records_of(unit, event)] if event.count else []
        elif isinstance(event, BatchCommitted) and len(event.ids):
            found = self._committed(unit, partition, event, low, high)
            # What is known of each message goes beside its row only if it is known of all: rows must not shift.
            if sum(len(r) for _, r in found) == high - low:
                records = [r for _, r in found]
        self._into.add(event, records, partition, offset, unit, low, high)

    def _committed(
        self, unit: Unit, partition: int, event: BatchCommitted, low: int, high: int
    ) -> list[tuple[int, Records]]:
        """(row of the event, records from there on) of the messages that a commit shows."""
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
        # One by one: this happens at the very start of a journal, and only there.
        return [(low + row, piece) for row in kept.tolist() for piece in in_order(found, ids[row : row + 1]) or ()]


class PreparedParts:
    """Prepared records that were seen and not yet decided, and the way to those that were not seen."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._kept: dict[tuple[int, str, str], Records] = {}  # by partition, batch, part
        self._bytes = 0

    def keep(self, unit: Unit, partition: int, event: BatchPrepared) -> None:
        if not event.count:
            return
        records = own_records(unit, event)
        self._kept[partition, event.batch_id, event.part] = records
        self._bytes += records.data.nbytes
        while self._bytes > KEPT_BYTES:  # the oldest is found again, should anybody ask
            self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[int, str, str]) -> None:
        self._bytes -= self._kept.pop(key).data.nbytes

    def drop(self, partition: int, event: BatchCommitted | BatchAborted) -> None:
        if isinstance(event, BatchAborted) or not event.more:
            for key in [key for key in self._kept if key[:2] == (partition, event.batch_id)]:
                self._forget(key)

    def find(self, partition: int, event: BatchCommitted, ids: I64, before: int) -> list[Records]:
        """Records among which those of the ids are, as far as they are anywhere."""
        keys = [(partition, event.batch_id, part) for part in event.parts]
        found = [self._kept[key] for key in keys if key in self._kept]
        missing = _missing(ids, found)
        if len(missing):
            units = self._recorded.prepared_units(partition, int(missing.min()), before)
            found += _search(units, partition, missing)
            missing = _missing(ids, found)
        if len(missing):
            found += _search(self._recorded.all_units(), partition, missing)
        return found


def _missing(ids: I64, found: list[Records]) -> I64:
    there = np.concatenate([np.zeros(0, dtype=np.int64), *(records.ids for records in found)])
    missing: I64 = ids[~np.isin(ids, there)]
    return missing


def _search(units: Iterable[Unit], partition: int, ids: I64) -> list[Records]:
    found: list[Records] = []
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
