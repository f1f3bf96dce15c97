"""Pages: the stream rows of one partition over a range of its durable log, with the contents of their records.

A page ends where its scan ended, even if it found no row, so that readers make progress. It scans complete units. The
record of most rows is beside them, in the same unit, whose checksum was just verified. The record of a row that fired,
was rescheduled or came with a prepared batch is elsewhere and is read by its position. A record that is corrupt or no
longer exists is listed in `bad`: its row counts, but must not be delivered.

All groups share the columns, so nothing may modify them. Payloads are copied together once, so that a page uses memory
for its rows and not for the reads that it came from. Blocking: use it in I/O threads. This module does not know which
pages are cached, or which group gets which rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest
from heapline.contract.stream import Payloads, Settles, StreamBatch
from heapline.core.events import EMPTY, AnyEvent, Enqueued, decode_events
from heapline.core.groups.deliveries import Columns, join_columns
from heapline.core.groups.stream import STREAM_KINDS, StreamRows, stream_of
from heapline.core.record import FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY, ROW, PositionLayout, size_bound, size_class
from heapline.engine.delivery import split_small
from heapline.journal.reader import LogReader, Place
from heapline.journal.records import BadRecord, Records
from heapline.journal.unit import Unit

I64 = npt.NDArray[np.int64]
Load = Callable[[I64], Records]
PAGE_ROWS = 32768
PAGE_BYTES = 8 << 20  # of payloads; about as much as one disk read
_SMALL = FLAG_KEY | FLAG_HEADERS | FLAG_FAIRNESS


class Page(NamedTuple):
    """All stream rows of a partition in [start, end)."""

    partition: int
    start: int
    end: int
    rows: Columns
    priorities: I64
    enqueued_ms: I64
    payloads: Payloads
    keys: list[str | None] | None  # None if no row has a key
    headers: list[dict[str, str] | None] | None
    fairness_keys: list[str | None] | None
    bad: dict[int, BadRecord]  # by index: rows whose record cannot be read
    first: int  # where the log started at the time of the read, if that is above the requested offset; else `start`
    place: Place | None  # of the unit after the page, to continue reading

    def __len__(self) -> int:
        return len(self.rows.offsets)

    @property
    def nbytes(self) -> int:
        return len(self.payloads.data) + 64 * len(self) * (1 if self.keys is None and self.headers is None else 8)

    def stream_rows(self) -> StreamRows:
        return StreamRows(self.rows, self.start, self.end)

    def batch(self, settles: Settles | None, topic: str, id_suffix: int, at: I64 | slice, attempts: I64) -> StreamBatch:
        """Return the rows at `at` as a batch to deliver."""
        payloads = Payloads(self.payloads.data, self.payloads.starts[at], self.payloads.ends[at])
        return StreamBatch(
            settles,
            topic,
            self.partition,
            self.rows.offsets[at],
            self.rows.ids[at],
            payloads,
            self.priorities[at],
            attempts,
            self.enqueued_ms[at],
            _pick(self.keys, at),
            _pick(self.headers, at),
            _pick(self.fairness_keys, at),
            id_suffix=id_suffix,
        )


def _pick(column: Any, at: I64 | slice) -> Any:
    if column is None:
        return None
    return column[at] if isinstance(at, slice) else [column[i] for i in at.tolist()]


def pick_rows(batch: StreamBatch, at: I64 | slice) -> StreamBatch:
    """Return the rows of a batch at these indexes."""
    return StreamBatch(
        batch._settles,
        batch.topic,
        batch.partition,
        batch.offsets[at],
        batch.ids[at],
        _pick(batch.payloads, at),
        batch.priorities[at],
        batch.attempts[at],
        batch.enqueued_ms[at],
        _pick(batch.keys, at),
        _pick(batch.headers, at),
        _pick(batch.fairness_keys, at),
        id_suffix=batch.id_suffix,
    )


def read_page(
    reader: LogReader,
    layout: PositionLayout,
    load: Load,
    partition: int,
    start: int,
    *,
    place: Place | None = None,
    rows_max: int = PAGE_ROWS,
    bytes_max: int = PAGE_BYTES,
    end: int | None = None,
    durable_only: bool = True,
) -> Page:
    """Return the stream rows from `start` on, until `rows_max`, `bytes_max` or `end` is passed or the durable log ends.

    `load` reads records by position (`Journal.load`). `place` is that of the previous page, which ended at `start`.
    """
    builder = PageBuilder(reader, layout, load, partition, start)
    try:
        builder.scan(place, rows_max, bytes_max, end, durable_only)
    except BadRequest:
        if place is None:
            raise
        builder = PageBuilder(reader, layout, load, partition, start)  # reclaimed: find where the log starts now
        builder.scan(None, rows_max, bytes_max, end, durable_only)
    return builder.page()


class _Part:
    """Rows that were added together. `rows` is None until their records have been read."""

    __slots__ = ("columns", "rows", "smalls", "starts")

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.rows: Any = None
        self.starts: I64 = EMPTY
        self.smalls: Sequence[bytes] | None = None


class PageBuilder:
    """Collects the rows of one page; `add_records` also accepts rows that do not come from a unit."""

    def __init__(
        self, reader: LogReader | None, layout: PositionLayout, load: Load, partition: int, start: int
    ) -> None:
        self._reader, self._layout, self._load = reader, layout, load
        self._partition, self._asked = partition, start
        self.start: int | None = None
        self.first = start
        self.end = start
        self.place: Place | None = None
        self._parts: list[_Part] = []
        self._pieces: list[Any] = []  # bytes that contain the payloads
        self._bytes = 0  # total size of `_pieces`
        self._bytes_elsewhere = 0  # upper bound
        self._count = 0
        self._bad: dict[int, BadRecord] = {}  # by offset

    # -- scanning --------------------------------------------------------------------------------------------------

    def scan(self, place: Place | None, rows_max: int, bytes_max: int, end: int | None, durable_only: bool) -> None:
        assert self._reader is not None
        if place is None:
            place = self._reader.locate(self._partition, offset=self._asked)
        if place is None:
            return
        self.place = place
        for unit in self._reader.read_units(place=place, durable_only=durable_only):
            self._scan_unit(unit)
            self.place = (unit.segment, unit.end)
            nbytes = self._bytes + self._bytes_elsewhere
            if self._count >= rows_max or nbytes >= bytes_max or (end is not None and self.end >= end):
                return

    def _scan_unit(self, unit: Unit) -> None:
        for frame in unit.frames:
            if frame.partition != self._partition or frame.first_offset + frame.row_count <= self._asked:
                continue
            if self.start is None:
                self.start = min(frame.first_offset, self._asked)
                self.first = frame.first_offset
            offset = frame.first_offset
            for event in decode_events(frame.events, f"unit {unit.number}"):
                if type(event) in STREAM_KINDS:
                    self._add(unit, event, offset)
                offset += event.rows()
            self.end = offset

    def _add(self, unit: Unit, event: AnyEvent, offset: int) -> None:
        if isinstance(event, Enqueued):
            self._add_enqueued(unit, event, offset)
        else:
            columns = stream_of(event, offset)
            if len(columns.offsets):
                self._append(_Part(columns))
                self._bytes_elsewhere += int(size_bound(columns.positions).sum())

    def _add_enqueued(self, unit: Unit, event: Enqueued, offset: int) -> None:
        ref = unit.blocks[event.block]
        rows = unit.rows(ref)[event.start : event.start + event.count]
        at = ref.offset + np.arange(event.start, event.start + event.count) * ROW.itemsize
        sizes = rows["payload_len"].astype(np.int64) + rows["small_len"]
        positions = self._layout.pack(unit.segment, unit.offset + at, size_class(sizes))
        columns = stream_of(event, offset, rows, positions)
        if not len(columns.offsets):
            return
        if len(columns.offsets) < event.count:
            chosen = columns.offsets - offset
            rows, at = rows[chosen], at[chosen]
        starts = at + rows["payload_at"]
        low, high = int(starts.min()), int((starts + rows["payload_len"]).max())
        part = _Part(columns)
        if (rows["flags"] & _SMALL).any():
            small_at, lengths = (at + rows["small_at"]).tolist(), rows["small_len"].tolist()
            part.smalls = [bytes(unit.data[a : a + n]) for a, n in zip(small_at, lengths, strict=True)]
        self._fill(part, rows, unit.data[low:high], starts - low)
        self._append(part)

    # -- gathering -------------------------------------------------------------------------------------------------

    def add_records(self, columns: Columns, records: Records) -> None:
        """Add rows whose records were read by position."""
        part = _Part(columns)
        self._fill_from(part, records)
        self._append(part)

    def _append(self, part: _Part) -> None:
        self._parts.append(part)
        self._count += len(part.columns.offsets)

    def _fill(self, part: _Part, rows: Any, data: Any, starts: I64) -> None:
        part.rows, part.starts = rows, starts + self._bytes
        self._pieces.append(data)
        self._bytes += len(data)

    def _fill_from(self, part: _Part, records: Records) -> None:
        columns = part.columns
        for index, bad in records.bad.items():
            self._bad[int(columns.offsets[index])] = bad
        for index in np.flatnonzero(records.rows["id"] != columns.ids).tolist():
            if index not in records.bad:  # must never be delivered under this row
                detail = "another message's record is at its position"
                self._bad[int(columns.offsets[index])] = BadRecord(int(columns.ids[index]), "", 0, detail)
        if (records.rows["flags"] & _SMALL).any():
            part.smalls = records.smalls
        lengths = np.fromiter(map(len, records.payloads), np.int64, len(records.payloads))
        self._fill(part, records.rows, b"".join(records.payloads), np.cumsum(lengths) - lengths)

    def _load_elsewhere(self) -> None:
        """Load all records that are not beside their rows in one call, so that neighbors are read together."""
        parts = [part for part in self._parts if part.rows is None]
        if parts:
            records = self._load(np.concatenate([part.columns.positions for part in parts]))
            start = 0
            for part in parts:
                count = len(part.columns.offsets)
                self._fill_from(part, cut_records(records, start, start + count))
                start += count

    # -- the page --------------------------------------------------------------------------------------------------

    def page(self) -> Page:
        self._load_elsewhere()
        parts = self._parts
        rows = np.concatenate([part.rows for part in parts]) if parts else np.zeros(0, ROW)
        starts = np.concatenate([part.starts for part in parts]) if parts else EMPTY
        columns = join_columns([part.columns for part in parts])
        bad = {int(np.searchsorted(columns.offsets, offset)): fact for offset, fact in self._bad.items()}
        start = self._asked if self.start is None else self.start
        return Page(
            self._partition,
            start,
            max(self.end, start),
            columns,
            rows["priority"].astype(np.int64),
            rows["enqueued_at"].astype(np.int64),
            Payloads(memoryview(b"".join(self._pieces)), starts, starts + rows["payload_len"]),
            *self._small_columns(rows),
            bad,
            self.first,
            self.place,
        )

    def _small_columns(self, rows: Any) -> tuple[Any, Any, Any]:
        """Return keys, headers and fairness keys, each None if no row has one."""
        used = int(np.bitwise_or.reduce(rows["flags"])) if len(rows) else 0
        if not used & _SMALL:
            return None, None, None
        columns = rows["key_len"].tolist(), rows["fairness_len"].tolist(), rows["flags"].tolist()
        smalls = [small for part in self._parts for small in part.smalls or [b""] * len(part.columns.offsets)]
        split = [split_small(*small) for small in zip(smalls, *columns, strict=True)]
        keys, fairness_keys, headers = map(list, zip(*split, strict=True))
        return (
            keys if used & FLAG_KEY else None,
            headers if used & FLAG_HEADERS else None,
            fairness_keys if used & FLAG_FAIRNESS else None,
        )


def cut_records(records: Records, start: int, end: int) -> Records:
    bad = {index - start: fact for index, fact in records.bad.items() if start <= index < end}
    return Records(records.rows[start:end], records.payloads[start:end], records.smalls[start:end], bad)
