"""Which rows of a partition's journal make up its stream, and how many there are below an offset.

A message takes its place in the stream once, when it first falls due; the place is the offset of the row that made it
ready. It is told from the event alone, so that whoever reads the journal later sees the same stream:

    enqueued, batch_committed   rows without a delay
    fired                       rows with no attempts that are not marked as having had their place; one with attempts
                                is a worker's retry
    rescheduled                 the same, of rows that were delayed and are ready at once now
    all others                  none

`replayed` is none: a dead letter of the work queue was in the stream when it first fell due, and what an operator does
for workers is no affair of groups. Nor are released, nacked and expired leases. What is cancelled or purged before it
fires never has a row. A topic without streams records `fired_count`, which does not tell which: it can have no groups.

A dead letter that is replayed with a delay, and a ready message that is rescheduled to later, wait with no attempts
though they have had their place. The partition knows which (`Entries.shown`) and marks them when they fire.
Journals from before there were groups do not: there such messages stand in the stream twice, and what prepared batches
brought stands nowhere, since those commits do not tell where the records lie.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.deliveries import NO_COLUMNS, Columns
from heapline.core.events import (
    AnyEvent,
    BatchPlaced,
    Enqueued,
    Fired,
    FiredAgain,
    FiredInTurn,
    FiredInTurnAgain,
    Rescheduled,
    RescheduledAgain,
)
from heapline.core.position import attempts_of

I64 = npt.NDArray[np.int64]
MARK_ROWS = 4096


class StreamRows(NamedTuple):
    """All stream rows of a partition in [start, end). All groups share the columns: nobody changes them."""

    rows: Columns
    start: int
    end: int


#: The kinds that can hold rows of the stream.
STREAM_KINDS = frozenset((Enqueued, BatchPlaced, Fired, FiredInTurn, FiredAgain, FiredInTurnAgain, Rescheduled))


def stream_of(event: AnyEvent, offset: int, rows: Any = None, positions: I64 | None = None) -> Columns:
    """The stream rows of an event whose first row is `offset`. `rows` and `positions` are the records that an enqueue
    brings."""
    if isinstance(event, Enqueued):
        if rows is None or positions is None:
            return NO_COLUMNS
        return _chosen(offset, rows["id"], positions, rows["due"] == 0)
    if isinstance(event, Fired | FiredInTurn):
        first = attempts_of(event.positions) == 0
        if isinstance(event, FiredAgain | FiredInTurnAgain):
            first &= np.frombuffer(event.again, dtype=np.uint8) == 0
        return _chosen(offset, event.ids, event.positions, first)
    if isinstance(event, BatchPlaced):
        return _chosen(offset, event.ids, event.positions, np.frombuffer(event.ready, dtype=np.uint8) == 1)
    if isinstance(event, Rescheduled) and not isinstance(event, RescheduledAgain):
        was_delayed = np.frombuffer(event.delayed, dtype=np.uint8) == 1
        first = was_delayed & (event.dues == 0) & (attempts_of(event.positions) == 0)
        return _chosen(offset, event.ids, event.positions, first)
    return NO_COLUMNS


def _chosen(offset: int, ids: Any, positions: I64, which: npt.NDArray[np.bool_]) -> Columns:
    if which.all():
        return Columns(np.arange(offset, offset + len(which)), np.ascontiguousarray(ids, dtype=np.int64), positions)
    at = np.flatnonzero(which)
    return Columns(offset + at, np.ascontiguousarray(ids[at], dtype=np.int64), positions[at])


class StreamCount:
    """How many stream rows a partition has had, with a mark every few thousand: what lag is counted from.

    Exact at the end and at the marks; for an offset between, whoever asks reads on from the mark before it.
    """

    def __init__(self, offset: int = 0) -> None:
        self.total = 0  # counted from `offset` on: lag is a difference, so it need not be the journal's beginning
        self._offsets: list[int] = [offset]
        self._counts: list[int] = [0]

    def add(self, offset: int, rows: int) -> None:
        """So many stream rows were just recorded, by an event whose first row is `offset`."""
        if not rows:
            return
        if self.total - self._counts[-1] >= MARK_ROWS:
            self._offsets.append(offset)
            self._counts.append(self.total)
        self.total += rows

    def mark_before(self, offset: int) -> tuple[int, int]:
        """(an offset at or before this one, the number of stream rows below it). Before the first mark: that one."""
        at = max(0, bisect_right(self._offsets, offset) - 1)
        return self._offsets[at], self._counts[at]

    def mark_after(self, offset: int) -> tuple[int, int] | None:
        """The same at or after this offset: what lies before it may have been reclaimed. None: there is none yet."""
        at = bisect_left(self._offsets, offset)
        return (self._offsets[at], self._counts[at]) if at < len(self._offsets) else None

    def forget_below(self, offset: int, known: tuple[int, int]) -> None:
        """The journal starts there now: nobody can read on from the marks below it. `known` is an offset from there on
        and its count, to count back from if no mark is left."""
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
