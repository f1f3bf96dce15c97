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
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import (
    AnyEvent,
    BatchCommitted,
    Enqueued,
    Fired,
    Rescheduled,
)
from heapline.core.groups.deliveries import NO_COLUMNS, Columns
from heapline.core.position import attempts_of

I64 = npt.NDArray[np.int64]
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

    Exact at the end and at the marks; for an offset in between, the caller reads on from the mark before it.
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

    def mark_before(self, offset: int) -> tuple[int, int]:
        """Return a mark at or before this offset and the number of stream rows below it; the first mark if none is."""
        at = max(0, bisect_right(self._offsets, offset) - 1)
        return self._offsets[at], self._counts[at]

    def mark_after(self, offset: int) -> tuple[int, int] | None:
        """Return the mark at or after this offset, or None if there is none yet. Rows before it may be reclaimed."""
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
