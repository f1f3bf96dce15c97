"""Rows delivered to a group: first deliveries in flight, and rows whose delivery has failed.

`Deliveries` holds first deliveries as one chunk per delivered batch. A chunk refers to the row columns that all groups
share. It owns only its deadlines and, once acks arrive out of order, a mask of the rows still in flight. A chunk that
is acked completely costs only its removal. First deliveries go out in offset order, so the chunks and their rows are
sorted. Nothing in it is durable: after a crash these rows are read again.

`FailedRows` holds columns sorted by offset. A row is kept from its first failure until it is acked, given up or reset,
even while it is in flight again, because its failure count must survive a crash. Only `deadlines` is not durable: 0
while the row waits, else when the delivery ends. `back` marks replayed dead letters. The group passed their offsets in
the stream earlier, so they hold the message but not the committed offset. This module makes no decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from heapline.core.events import I64, Mask

_NONE: I64 = np.zeros(0, dtype=np.int64)
_GATHER_ROWS = 256  # smaller deliveries share a chunk, which keeps the number of chunks low
_CHUNKS_MAX = 4  # above this, chunks with out-of-order acks are joined
FAR = (1 << 63) - 1


class Columns(NamedTuple):
    """Rows of the stream."""

    offsets: I64
    ids: I64
    positions: I64

    def only(self, which: Mask | I64 | slice) -> Columns:
        return Columns(self.offsets[which], self.ids[which], self.positions[which])


def join_columns(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return Columns(*(np.concatenate(column) for column in zip(*parts, strict=True))) if parts else NO_COLUMNS


NO_COLUMNS = Columns(_NONE, _NONE, _NONE)


class _Chunk:
    __slots__ = ("deadlines", "first", "last", "left", "out", "rows", "wake")

    def __init__(self, rows: Columns, deadlines: I64, out: Mask | None = None) -> None:
        self.rows, self.deadlines, self.out = rows, deadlines, out
        self.first, self.last = int(rows.offsets[0]), int(rows.offsets[-1])
        self.left = len(rows.offsets) if out is None else int(np.count_nonzero(out))
        self.wake = int(deadlines.min())  # lower bound of the deadlines still in flight

    def mask(self) -> Mask:
        """Return the mask of rows in flight. The caller may change it."""
        if self.out is None:
            self.out = np.ones(len(self.rows.offsets), dtype=np.bool_)
        return self.out

    def find(self, offsets: I64) -> tuple[I64, Mask]:
        """Return the row of each offset (or where it would be), and which offsets are present and still in flight."""
        count = len(offsets)
        low = int(np.searchsorted(self.rows.offsets, offsets[0])) if count else 0
        if np.array_equal(self.rows.offsets[low : low + count], offsets):  # consecutive rows, as in-order acks are
            hits = np.ones(count, dtype=np.bool_) if self.out is None else self.out[low : low + count].copy()
            return np.arange(low, low + count), hits
        at = np.searchsorted(self.rows.offsets, offsets)
        np.minimum(at, len(self.rows.offsets) - 1, out=at)
        hit = self.rows.offsets[at] == offsets
        return at, hit if self.out is None else hit & self.out[at]

    def end(self, which: I64 | slice | Mask) -> None:
        mask = self.mask()
        mask[which] = False
        self.left = int(np.count_nonzero(mask))

    def lowest(self) -> int:
        return self.first if self.out is None else int(self.rows.offsets[int(np.argmax(self.out))])

    def offsets(self) -> I64:
        return self.rows.offsets if self.out is None else self.rows.offsets[self.out]


def _joined(chunks: list[_Chunk]) -> _Chunk:
    """Join the rows in flight of several chunks. Out-of-order acks touch every chunk, so keep chunks few."""
    if len(chunks) == 1:
        return chunks[0]
    masks = [chunk.mask() for chunk in chunks]
    rows = join_columns([chunk.rows.only(mask) for chunk, mask in zip(chunks, masks, strict=True)])
    deadlines = [chunk.deadlines[mask] for chunk, mask in zip(chunks, masks, strict=True)]
    return _Chunk(rows, np.concatenate(deadlines), np.ones(len(rows.offsets), dtype=np.bool_))


class Deliveries:
    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self.rows = 0

    def __len__(self) -> int:
        return self.rows

    def add(self, rows: Columns, deadline: int) -> None:
        """Add delivered rows. Their offsets are above all that were delivered before."""
        if not len(rows.offsets):
            return
        deadlines = np.full(len(rows.offsets), deadline, dtype=np.int64)
        self.rows += len(deadlines)
        if self._chunks and len(deadlines) < _GATHER_ROWS and len(self._chunks[-1].deadlines) < _GATHER_ROWS:
            last = self._chunks.pop()
            out = None if last.out is None else np.concatenate((last.out, np.ones(len(deadlines), dtype=np.bool_)))
            rows, deadlines = join_columns([last.rows, rows]), np.concatenate((last.deadlines, deadlines))
            self._chunks.append(_Chunk(rows, deadlines, out))
        else:
            self._chunks.append(_Chunk(rows, deadlines))

    def _overlapping(self, first: int, last: int) -> list[_Chunk]:
        low = max(0, bisect_right(self._chunks, first, key=lambda chunk: chunk.first) - 1)
        high = bisect_right(self._chunks, last, key=lambda chunk: chunk.first)
        return self._chunks[low:high]

    def held(self, offsets: I64) -> Mask:
        """Return which of these sorted offsets are in flight."""
        found = np.zeros(len(offsets), dtype=np.bool_)
        if len(offsets):
            for chunk in self._overlapping(int(offsets[0]), int(offsets[-1])):
                low, high = np.searchsorted(offsets, (chunk.first, chunk.last + 1))
                found[low:high] = chunk.find(offsets[low:high])[1]
        return found

    def columns(self, offsets: I64) -> Columns:
        """Return the rows of sorted offsets that are in flight."""
        parts = []
        if len(offsets):
            for chunk in self._overlapping(int(offsets[0]), int(offsets[-1])):
                low, high = np.searchsorted(offsets, (chunk.first, chunk.last + 1))
                at, hit = chunk.find(offsets[low:high])
                parts.append(chunk.rows.only(at[hit]))
        return join_columns(parts)

    def first_without(self, offsets: I64) -> int:
        """Return the lowest offset that would remain in flight if these sorted ones ended; FAR if none would."""
        for chunk in self._chunks:
            low, high = np.searchsorted(offsets, (chunk.first, chunk.last + 1))
            if low == high:
                return chunk.lowest()
            at, hit = chunk.find(offsets[low:high])
            if np.count_nonzero(hit) < chunk.left:
                out = chunk.mask().copy()
                out[at[hit]] = False
                return int(chunk.rows.offsets[int(np.argmax(out))])
        return FAR

    def offsets(self) -> I64:
        """Return all offsets in flight, sorted."""
        return np.concatenate([chunk.offsets() for chunk in self._chunks]) if self._chunks else _NONE

    def end(self, offsets: I64) -> None:
        if len(offsets):
            for chunk in self._overlapping(int(offsets[0]), int(offsets[-1])):
                low, high = np.searchsorted(offsets, (chunk.first, chunk.last + 1))
                at, hit = chunk.find(offsets[low:high])
                chunk.end(at[hit])
            self._sweep()

    def end_below(self, offset: int) -> None:
        whole = 0
        while whole < len(self._chunks) and self._chunks[whole].last < offset:
            self.rows -= self._chunks[whole].left
            whole += 1
        del self._chunks[:whole]
        if self._chunks and self._chunks[0].first < offset:
            self._chunks[0].end(slice(0, int(np.searchsorted(self._chunks[0].rows.offsets, offset))))
            self._sweep()

    def end_ranges(self, starts: I64, ends: I64) -> None:
        if not len(starts):
            return
        for chunk in self._overlapping(int(starts[0]), int(ends[-1])):
            low = int(np.searchsorted(ends, chunk.first, side="right"))
            high = int(np.searchsorted(starts, chunk.last, side="right"))
            if low < high:
                chunk.end(_inside(chunk.rows.offsets, starts[low:high], ends[low:high]))
        self._sweep()

    def _sweep(self) -> None:
        self._chunks = [chunk for chunk in self._chunks if chunk.left]
        self.rows = sum(chunk.left for chunk in self._chunks)
        if len(self._chunks) > _CHUNKS_MAX:
            runs = groupby(self._chunks, key=lambda chunk: chunk.out is not None)
            self._chunks = [chunk for partly, run in runs for chunk in ([_joined(list(run))] if partly else run)]

    def next_deadline(self, now: int) -> int:
        for chunk in self._chunks:
            if chunk.wake <= now:  # may belong to a delivery that already ended
                chunk.wake = int(chunk.deadlines[chunk.mask()].min())
        return min((chunk.wake for chunk in self._chunks), default=FAR)

    def last_deadline(self) -> int:
        return max((int(chunk.deadlines.max()) for chunk in self._chunks), default=0)

    def overdue(self, now: int, limit: int) -> I64:
        """Return the offsets of deliveries that were not acked in time, lowest first, at most `limit`."""
        found: list[I64] = []
        for chunk in self._chunks:
            if chunk.wake > now or limit <= 0:
                continue
            out = np.ones(len(chunk.deadlines), dtype=np.bool_) if chunk.out is None else chunk.out
            late = chunk.rows.offsets[out & (chunk.deadlines <= now)][:limit]
            found.append(late)
            limit -= len(late)
        return np.concatenate(found) if found else _NONE

    def replace_positions(self, ids: I64, positions: I64) -> None:
        """Update the positions of moved records; `ids` are sorted. The shared columns are not changed."""
        for chunk in self._chunks:
            fresh = replaced(chunk.rows.ids, chunk.rows.positions, ids, positions)
            chunk.rows = chunk.rows._replace(positions=fresh)

    def clear(self) -> None:
        self._chunks, self.rows = [], 0


def _inside(offsets: I64, starts: I64, ends: I64) -> Mask:
    """Return which of the sorted offsets are in one of the disjoint ranges. There are fewer ranges than offsets."""
    edges = np.zeros(len(offsets) + 1, dtype=np.int8)
    np.add.at(edges, np.searchsorted(offsets, starts), 1)
    np.subtract.at(edges, np.searchsorted(offsets, ends), 1)
    return np.cumsum(edges[:-1], dtype=np.int8) > 0


def replaced(row_ids: I64, row_positions: I64, ids: I64, positions: I64) -> I64:
    """Return the row positions with those of the sorted `ids` replaced; the same array if no id matches."""
    if not len(ids) or not len(row_ids):
        return row_positions
    at = np.minimum(np.searchsorted(ids, row_ids), len(ids) - 1)
    return np.where(ids[at] == row_ids, positions[at], row_positions)


_DURABLE = ("offsets", "ids", "positions", "failures", "dues", "back")
_COLUMNS = (*_DURABLE, "deadlines")


class FailedRows:
    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        self.offsets: I64 = none
        self.ids: I64 = none
        self.positions: I64 = none
        self.failures: I64 = none
        self.dues: I64 = none
        self.back: I64 = none  # 1 = a replayed dead letter
        self.deadlines: I64 = none

    def __len__(self) -> int:
        return len(self.offsets)

    def put(self, rows: Columns, failures: I64, dues: I64, back: bool = False) -> None:
        """Add rows that now wait. A row that is already present keeps its `back` mark."""
        known = self.find(rows.offsets)
        flags = np.full(len(dues), int(back), dtype=np.int64)
        if len(self.offsets):
            flags = np.where(known >= 0, self.back[known], flags)
            self.drop(rows.offsets)
        fresh = (*rows, failures, dues, flags, np.zeros(len(dues), dtype=np.int64))
        order = np.argsort(np.concatenate((self.offsets, rows.offsets)), kind="stable")
        for name, column in zip(_COLUMNS, fresh, strict=True):
            setattr(self, name, np.concatenate((getattr(self, name), column))[order])

    def find(self, offsets: I64) -> I64:
        """Return the row of each of these offsets; -1 = not present."""
        if not len(self.offsets):
            return np.full(len(offsets), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.offsets, offsets), len(self.offsets) - 1)
        found: I64 = np.where(self.offsets[at] == offsets, at, -1)
        return found

    def keep(self, which: Mask) -> None:
        if not which.all():
            for name in _COLUMNS:
                setattr(self, name, getattr(self, name)[which])

    def drop(self, offsets: I64) -> None:
        if len(self.offsets):
            at = self.find(offsets)
            which = np.ones(len(self.offsets), dtype=np.bool_)
            which[at[at >= 0]] = False
            self.keep(which)

    def columns(self, at: I64) -> Columns:
        return Columns(self.offsets[at], self.ids[at], self.positions[at])

    # -- deliveries ------------------------------------------------------------------------------------------------

    @property
    def out(self) -> int:
        return int(np.count_nonzero(self.deadlines)) if len(self.deadlines) else 0

    def due(self, now: int, limit: int) -> I64:
        """Return the rows that may be delivered again, longest due first, at most `limit`."""
        if not len(self.offsets):
            return self.offsets
        at: I64 = np.flatnonzero((self.deadlines == 0) & (self.dues <= now))
        return np.take(at, np.argsort(self.dues[at], kind="stable")[:limit])

    def hand_out(self, at: I64, deadline: int) -> None:
        self.deadlines[at] = deadline

    def rest(self) -> None:
        """Mark all rows as not in flight."""
        self.deadlines = np.zeros(len(self.offsets), dtype=np.int64)

    def overdue(self, now: int, limit: int) -> I64:
        late: Mask = (self.deadlines != 0) & (self.deadlines <= now)
        return np.compress(late, self.offsets)[:limit]

    def next_deadline(self, now: int) -> int:
        """Return when the first delivery ends or another row becomes due. Rows already due wait for credits."""
        if not len(self.offsets):
            return FAR
        later = np.where(self.dues > now, self.dues, FAR)
        return int(np.where(self.deadlines != 0, self.deadlines, later).min())

    # -- retained rows ---------------------------------------------------------------------------------------------

    def in_stream(self) -> I64:
        """Return the offsets of rows that hold back the committed offset."""
        return self.offsets[self.back == 0] if len(self.offsets) else self.offsets

    def replace_positions(self, ids: I64, positions: I64) -> None:
        self.positions = replaced(self.ids, self.positions, ids, positions)

    def to_state(self) -> list[Any]:
        return [getattr(self, name).tobytes() for name in _DURABLE]

    @classmethod
    def from_state(cls, state: list[Any]) -> FailedRows:
        table = cls()
        for name, column in zip(_DURABLE, state, strict=True):
            setattr(table, name, np.frombuffer(column, dtype=np.int64))
        table.rest()
        return table
