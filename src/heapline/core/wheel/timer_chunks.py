"""Sorted chunks of timers, and how to find the first rows of many chunks.

A chunk is one int64 array of four rows (dues, keys, ids, positions), sorted by due time and id. It is never written
again; only its cursor moves. Everything in the timing wheel is such chunks, so a slot that becomes due needs no sort, a
snapshot needs no copy, and one operation, `draw`, serves both firing and merging. Rows equal in due and id (a stale row
and its message's current one) are ordered by position and key, so that "the first n rows" means the same rows however
they are spread over chunks. This module does not know slots, ticks or the current time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import I64

Key = tuple[int, int]

DUE, KEY, ID, POSITION = range(4)
I64_MAX = (1 << 63) - 1


class Timers(NamedTuple):
    """Rows as columns, in (due, id) order. The arrays are shared with the wheel and read-only."""

    dues: I64
    keys: I64
    ids: I64
    positions: I64


def as_timers(rows: I64) -> Timers:
    return Timers(rows[DUE], rows[KEY], rows[ID], rows[POSITION])


class Sizes(NamedTuple):
    """Size limits. The defaults suit production; tests lower them to reach every path with few rows."""

    slots: int = 60  # per level; each level's slot is as long as the complete level below
    fan_bits: int = 3  # 2**fan_bits chunks of similar size become one
    chunk_rows: int = 65_536  # a chunk of at least half this size is no longer merged with others of its slot
    head_rows: int = 4_096  # rows put in final order at a time when firing
    slice_rows: int = 4_096  # rows cascaded at a time


class Chunk:
    """Sorted rows with a serial. The rows before `start` are consumed; `first` is the due time at the cursor."""

    __slots__ = ("first", "rows", "serial", "start")

    def __init__(self, serial: int, rows: I64, start: int = 0) -> None:
        rows.setflags(write=False)
        self.serial = serial
        self.rows = rows
        self.start = start
        self.first: int = rows.item(DUE, start) if start < rows.shape[1] else I64_MAX

    @classmethod
    def of_columns(cls, serial: int, dues: I64, keys: I64, ids: I64, positions: I64, start: int = 0) -> Chunk:
        """Create a chunk from the columns of a snapshot."""
        return cls(serial, stack(dues, keys, ids, positions), start)

    def columns(self) -> Timers:
        """Return all rows, including consumed ones."""
        return as_timers(self.rows)

    @property
    def dues(self) -> I64:
        return self.columns().dues

    @property
    def keys(self) -> I64:
        return self.columns().keys

    @property
    def ids(self) -> I64:
        return self.columns().ids

    @property
    def positions(self) -> I64:
        return self.columns().positions

    @property
    def count(self) -> int:
        """The number of rows not yet consumed."""
        return int(self.rows.shape[1]) - self.start

    @property
    def last(self) -> int:
        return self.rows.item(DUE, -1)

    def live(self) -> I64:
        return self.rows[:, self.start :] if self.start else self.rows

    def timers(self) -> Timers:
        """Return the rows that are not consumed."""
        return as_timers(self.live())

    def key_at(self, depth: int) -> Key:
        """Return (due, id) of the row `depth` rows after the cursor."""
        at = self.start + depth
        return self.rows.item(DUE, at), self.rows.item(ID, at)

    def last_key(self) -> Key:
        return self.rows.item(DUE, -1), self.rows.item(ID, -1)

    def count_upto(self, bound: Key) -> int:
        """Return how many live rows are at or before (due, id)."""
        due, row_id = bound
        dues = self.rows[DUE]
        end = int(dues.searchsorted(due, "right"))
        if end > self.start and dues.item(end - 1) == due:
            begin = int(dues.searchsorted(due, "left"))
            end = begin + int(self.rows[ID, begin:end].searchsorted(row_id, "right"))
        return max(0, end - self.start)

    def pull(self, count: int) -> I64:
        """Consume the next `count` rows. The result is a view, or the array itself if that is all of it."""
        end = self.start + count
        pulled = self.rows if count == self.rows.shape[1] else self.rows[:, self.start : end]
        self.start = end
        self.first = self.rows.item(DUE, end) if end < self.rows.shape[1] else I64_MAX
        return pulled


class Mint:
    """Factory that creates and numbers the chunks of one wheel; a serial is never used twice."""

    __slots__ = ("fan", "next_serial", "sizes")

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.fan = 1 << sizes.fan_bits
        self.next_serial = 0

    def chunk(self, rows: I64) -> Chunk:
        """Create a chunk of sorted rows. A view is copied, so that a few rows do not keep a large array alive."""
        serial = self.next_serial
        self.next_serial = serial + 1
        return Chunk(serial, rows if rows.base is None else rows.copy())

    def cut(self, chunk: Chunk, reach: int) -> Chunk:
        """Split off the rows due at or before `reach`; at least one must be.

        More than a slice stays a view of the same array: the caller fires it soon, and a clock jump over millions of
        timers should not copy them all.
        """
        pulled = chunk.pull(int(chunk.rows[DUE].searchsorted(reach, "right")) - chunk.start)
        if pulled.shape[1] <= self.sizes.slice_rows:
            return self.chunk(pulled)
        serial = self.next_serial
        self.next_serial = serial + 1
        return Chunk(serial, pulled)

    def merge(self, chunks: Sequence[Chunk]) -> Chunk:
        return self.chunk(join([chunk.live() for chunk in chunks]))


def stack(dues: I64, keys: I64, ids: I64, positions: I64) -> I64:
    assert len(dues) == len(keys) == len(ids) == len(positions), "columns of one batch differ in length"
    rows = np.empty((4, len(dues)), np.int64)
    rows[DUE], rows[KEY], rows[ID], rows[POSITION] = dues, keys, ids, positions
    return rows


def join(parts: Sequence[I64]) -> I64:
    """Return the rows of sorted parts as one sorted array."""
    if len(parts) == 1:
        return parts[0]
    # numpy's stable sort finds runs and merges them: with eight it takes half the time; with many it is slower.
    return sort_rows(np.concatenate(parts, axis=1), "stable" if len(parts) <= 16 else "quicksort")


def in_order(rows: I64) -> bool:
    """Whether (due, id) strictly rises. Rows equal in both are not in order, because position and key decide."""
    dues, ids = rows[DUE], rows[ID]
    before, after = dues[:-1], dues[1:]
    if (before > after).any():
        return False
    return not ((before == after) & (ids[:-1] >= ids[1:])).any()


def sort_rows(rows: I64, kind: Literal["quicksort", "stable"] = "quicksort") -> I64:
    """Sort rows by (due, id, position, key); return the same array if it is in order.

    A lexsort is four times as expensive as a sort of the due times, so the ids are compared only where those are equal.
    """
    if rows.shape[1] < 2 or in_order(rows):
        return rows
    dues = rows[DUE]
    if (dues == dues.item(0)).all():
        rows = rows.take(rows[ID].argsort(kind=kind), axis=1)
        if in_order(rows):
            return rows
    else:
        rows = rows.take(dues.argsort(kind=kind), axis=1)
    tied = np.flatnonzero(rows[DUE, 1:] == rows[DUE, :-1])
    if tied.size:
        _settle_ties(rows, tied)
    return rows


def _settle_ties(rows: I64, tied: npt.NDArray[np.intp]) -> None:
    """Order rows of equal due time in place; `tied` are the indices of rows whose successor has the same due time."""
    marks = np.zeros(rows.shape[1], np.bool_)
    marks[tied] = marks[tied + 1] = True
    among = np.flatnonzero(marks)
    group = rows.take(among, axis=1)
    group = group.take(np.lexsort((group[ID], group[DUE])), axis=1)
    same = (group[ID, 1:] == group[ID, :-1]) & (group[DUE, 1:] == group[DUE, :-1])
    if same.any():
        group = group.take(np.lexsort((group[KEY], group[POSITION], group[ID], group[DUE])), axis=1)
    rows[:, among] = group


def draw(chunks: Sequence[Chunk], want: int, ceiling: Key | None = None) -> I64:
    """Pull the first rows over all chunks: `want` or slightly more, or as many as are at or before `ceiling`.

    The remaining rows are strictly after those drawn in (due, id). The result may be a view.
    """
    bound = ceiling if sum(chunk.count for chunk in chunks) <= 2 * want else _bound(chunks, want, ceiling)
    parts = []
    for chunk in chunks:
        count = chunk.count if bound is None else chunk.count_upto(bound)
        if count:
            parts.append(chunk.pull(count))
    return join(parts)


def _bound(chunks: Sequence[Chunk], want: int, ceiling: Key | None) -> Key | None:
    """Return a (due, id) with at least `want` rows at or before it, found by a few probes into each chunk.

    If j chunks hold `want / j` rows each at or before some key, that key is such a bound. One j suits rows spread
    evenly over all chunks, another suits rows in a few chunks; the lowest of these bounds is returned.
    """
    best = ceiling
    spread = 1
    while True:
        depth = -(-want // spread)
        keys = sorted(chunk.key_at(depth - 1) for chunk in chunks if chunk.count >= depth)
        if len(keys) >= spread and (best is None or keys[spread - 1] < best):
            best = keys[spread - 1]
        if spread >= len(chunks):
            return best
        spread = min(spread * 2, len(chunks))
