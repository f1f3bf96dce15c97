"""The stream of a partition: which journal rows belong to it, and how many there are below an offset.

A message enters the stream once, when it first becomes due. Its offset there is that of the row that made it ready.
This is decided from the event alone, so that every later reader of the journal sees the same stream:

    enqueued, batch_committed   rows without a delay
    fired                       rows with no attempts that are not marked `again`; a row with attempts is a retry
    rescheduled                 the same, for rows that were delayed and are now ready
    all others                  none

`replayed` adds none: a dead letter of the work queue entered the stream when it first became due, and replaying it for
workers does not concern groups. Nor do released, nacked and expired leases. A message that is cancelled or purged
before it fires never has a row. A topic without streams may record only how many messages fired; it has no groups.

A dead letter replayed with a delay, and a ready message rescheduled to later, wait with no attempts although they are
in the stream already. The partition remembers them (`Entries.shown`) and marks them `again` when they fire.

`StreamTail` keeps the last rows in memory, so that groups that keep up never read the journal. Rows are copied into
columns that only grow at their end. When these are full, the last rows move to new columns. So rows that were returned
are a view that never changes, and appending costs one copy of 24 bytes per row. A tail starts at an offset and holds
every stream row from there on. Rows are appended when they are decided, before they are durable. A reader that answers
immediately may read up to `durable_end`. A reader whose answer waits for durability, as the runner's calls do, may read
up to the partition's end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import (
    I64,
    AnyEvent,
    BatchCommitted,
    Enqueued,
    Fired,
    Rescheduled,
)
from heapline.core.groups.deliveries import NO_COLUMNS, Columns
from heapline.core.record import attempts_of

MARK_ROWS = 4096


class StreamRows(NamedTuple):
    """All stream rows of a partition in [start, end). All groups share the columns, which are never changed."""

    rows: Columns
    start: int
    end: int


#: Kinds of event that can have stream rows.
STREAM_KINDS = frozenset((Enqueued, BatchCommitted, Fired, Rescheduled))


def stream_of(event: AnyEvent, offset: int, rows: Any = None, positions: I64 | None = None) -> Columns:
    """Return the stream rows of an event whose first row is `offset`. An enqueue also needs its records."""
    if isinstance(event, Enqueued):
        if rows is None or positions is None:
            return NO_COLUMNS
        return _chosen(offset, rows["id"], positions, rows["due"] == 0)
    if isinstance(event, Fired):
        if event.positions is None:
            return NO_COLUMNS
        first = attempts_of(event.positions) == 0
        return _chosen(offset, event.ids, event.positions, _unless_again(first, event.again))
    if isinstance(event, BatchCommitted):
        if event.positions is None or event.ready is None:
            return NO_COLUMNS
        return _chosen(offset, event.ids, event.positions, np.frombuffer(event.ready, dtype=np.uint8) == 1)
    if isinstance(event, Rescheduled):
        was_delayed = np.frombuffer(event.delayed, dtype=np.uint8) == 1
        first = was_delayed & (event.dues == 0) & (attempts_of(event.positions) == 0)
        return _chosen(offset, event.ids, event.positions, _unless_again(first, event.again))
    return NO_COLUMNS


def _unless_again(first: npt.NDArray[np.bool_], again: bytes | None) -> npt.NDArray[np.bool_]:
    """Leave out the rows of messages that already have their offset in the stream."""
    return first if again is None else first & (np.frombuffer(again, dtype=np.uint8) == 0)


def _chosen(offset: int, ids: Any, positions: I64, which: npt.NDArray[np.bool_]) -> Columns:
    if which.all():
        return Columns(np.arange(offset, offset + len(which)), np.ascontiguousarray(ids, dtype=np.int64), positions)
    at = np.flatnonzero(which)
    return Columns(offset + at, np.ascontiguousarray(ids[at], dtype=np.int64), positions[at])


class StreamCount:
    """Count of a partition's stream rows, with a mark every few thousand. Lag is computed from it.

    Exact at the end and at the marks; for an offset in between, the caller counts back from the mark after it.
    """

    def __init__(self, offset: int = 0) -> None:
        self.total = 0  # counted from `offset` on; lag is a difference, so the start may be any offset
        self._offsets: list[int] = [offset]
        self._counts: list[int] = [0]

    def add(self, offset: int, rows: int) -> None:
        """Count stream rows of an event whose first row is `offset`."""
        if not rows:
            return
        if self.total - self._counts[-1] >= MARK_ROWS:
            self._offsets.append(offset)
            self._counts.append(self.total)
        self.total += rows

    def mark_after(self, offset: int) -> tuple[int, int] | None:
        """Return the mark at or after this offset and the number of stream rows below it, or None if there is none yet.

        Rows before the offset may be reclaimed, so the caller counts back from the mark.
        """
        at = bisect_left(self._offsets, offset)
        return (self._offsets[at], self._counts[at]) if at < len(self._offsets) else None

    def forget_below(self, offset: int, known: tuple[int, int]) -> None:
        """Drop the marks below the new start of the journal.

        `known` is an offset after it and the count there; it becomes the first mark if no other is left.
        """
        keep = bisect_left(self._offsets, offset)
        del self._offsets[:keep], self._counts[:keep]
        if not self._offsets:
            self._offsets, self._counts = [known[0]], [known[1]]

    def to_state(self) -> list[Any]:
        return [self.total, list(self._offsets), list(self._counts)]

    @classmethod
    def from_state(cls, state: list[Any]) -> StreamCount:
        count = cls()
        count.total, count._offsets, count._counts = state[0], list(state[1]), list(state[2])
        return count


_ROWS_AT_FIRST = 256


class StreamTail:
    def __init__(self, start: int, rows_max: int) -> None:
        self.start = start  # all rows of the stream from here on are held
        self._rows_max = rows_max
        self._columns = _new_columns(_ROWS_AT_FIRST)
        self._count = 0
        self._ends: deque[tuple[int, int]] = deque()  # (unit, the partition's end in it), of units not yet durable
        self._durable_end = start

    def append(self, rows: Columns) -> None:
        """Append rows that were just recorded."""
        more = len(rows.offsets)
        if self._count + more > len(self._columns.offsets):
            self._renew(more)
        end = self._count + more
        for column, new in zip(self._columns, rows, strict=True):
            column[self._count : end] = new
        self._count = end

    def _renew(self, more: int) -> None:
        """Allocate new columns with the last rows of the old: at most `_rows_max`, including the `more` new ones."""
        keep = min(self._count, max(0, self._rows_max - more))
        if keep < self._count:
            self.start = int(self._columns.offsets[self._count - keep - 1]) + 1
        columns = _new_columns(max(_ROWS_AT_FIRST, 2 * (keep + more)))
        for old, new in zip(self._columns, columns, strict=True):
            new[:keep] = old[self._count - keep : self._count]
        self._columns, self._count = columns, keep

    def read(self, start: int, rows_max: int, end: int) -> StreamRows | None:
        """Return the first `rows_max` rows of [start, end), or None if they begin before the tail."""
        if start < self.start:
            return None
        offsets = self._columns.offsets[: self._count]
        first, behind = np.searchsorted(offsets, (start, end)).tolist()
        last = min(behind, first + rows_max)
        reached = end if last == behind else int(offsets[last])
        return StreamRows(self._columns.only(slice(first, last)), start, max(start, reached))

    def sealed(self, unit: int, end: int, durable_unit: int = 0) -> None:
        """Record that the partition's rows up to `end` are in units up to `unit`.

        Only the last durable unit is remembered, even if the stream has no reader.
        """
        self.durable_end(durable_unit)
        self._ends.append((unit, end))

    def durable_end(self, durable_unit: int) -> int:
        """Return the offset below which every row of the tail is durable."""
        while self._ends and self._ends[0][0] <= durable_unit:
            self._durable_end = self._ends.popleft()[1]
        return self._durable_end


def _new_columns(rows: int) -> Columns:
    return Columns(*(np.empty(rows, dtype=np.int64) for _ in range(3)))
