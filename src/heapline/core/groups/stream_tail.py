"""The last rows of a partition's stream, kept in memory: groups that keep up never read the journal.

Rows are copied into columns that only grow at their end. When these are full, the last rows move to new columns. So
rows that were returned are a view that never changes, and appending costs one copy of 24 bytes per row. A tail starts
at an offset and holds every stream row from there on. Rows are appended when they are decided, before they are durable.
A reader that answers immediately may read up to `durable_end`. A reader whose answer waits for durability, as the
runner's calls do, may read up to the partition's end.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from heapline.core.groups.deliveries import Columns
from heapline.core.groups.stream import StreamRows

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
