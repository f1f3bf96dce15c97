"""Rows that a group finished ahead of its committed offset, stored as disjoint ranges of offsets.

Offsets of stream rows are sparse because other journal rows are between them. A range [start, end) therefore means that
every stream row in it is done, and its count is the number of those rows. Adjacent ranges are joined. In-order acks
leave no ranges. This module does not know which rows exist or which are in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.core.events import I64

_NONE: I64 = np.zeros(0, dtype=np.int64)


class DoneRanges:
    def __init__(self, starts: I64 = _NONE, ends: I64 = _NONE, counts: I64 = _NONE) -> None:
        self.starts, self.ends, self.counts = starts, ends, counts
        self.rows = int(counts.sum())

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, starts: I64, ends: I64, counts: I64) -> None:
        """Add ranges. `counts` are the newly done rows; the rows of absorbed ranges are added to them."""
        if not len(starts):
            return
        starts = np.concatenate((self.starts, starts))
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.concatenate((self.ends, ends))[order]
        counts = np.concatenate((self.counts, counts))[order]
        reach = np.maximum.accumulate(ends)
        first = np.flatnonzero(np.concatenate(([True], starts[1:] > reach[:-1])))
        last = np.concatenate((first[1:] - 1, [len(starts) - 1]))
        self.starts, self.ends, self.counts = starts[first], reach[last], np.add.reduceat(counts, first)
        self.rows = int(self.counts.sum())

    def rows_below(self, offset: int) -> int:
        """Return the row count of the ranges that end at or before `offset`."""
        return int(self.counts[: np.searchsorted(self.ends, offset, side="right")].sum()) if len(self.ends) else 0

    def cut(self, offset: int) -> int:
        """Drop the ranges that end at or before `offset` and return their row count. No range may span `offset`."""
        if not len(self.ends):
            return 0
        drop = int(np.searchsorted(self.ends, offset, side="right"))
        rows = int(self.counts[:drop].sum())
        self.starts, self.ends, self.counts = self.starts[drop:], self.ends[drop:], self.counts[drop:]
        self.rows -= rows
        return rows

    def contains(self, offsets: I64) -> npt.NDArray[np.bool_]:
        if not len(self.starts):
            return np.zeros(len(offsets), dtype=np.bool_)
        at = np.searchsorted(self.starts, offsets, side="right") - 1
        return (at >= 0) & (offsets < self.ends[at])

    def end_at(self, offset: int) -> int:
        """Return the end of the range that contains `offset`, or `offset` itself if no range does."""
        at = int(np.searchsorted(self.starts, offset, side="right")) - 1
        return max(offset, int(self.ends[at])) if at >= 0 else offset

    def to_state(self) -> list[Any]:
        return [self.starts.tobytes(), self.ends.tobytes(), self.counts.tobytes()]

    @classmethod
    def from_state(cls, state: list[Any]) -> DoneRanges:
        return cls(*(np.frombuffer(column, dtype=np.int64) for column in state))
