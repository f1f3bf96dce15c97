"""Sorted columns of idempotency keys: search one run, and merge two in slices.

A run holds hash (two 64-bit halves), message id, fingerprint and expiry, sorted by hash, each hash once: 36 bytes per
row. Runs never change. Both halves are compared, because collisions of the upper half alone can be made on purpose.
This module does not know time beyond the `now` that is passed in, nor which runs exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.dedup.verdict import U32
from heapline.core.events import I64

U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]


class Columns(NamedTuple):
    high: U64
    low: U64
    ids: I64
    prints: U32
    expires: I64

    def take(self, rows: slice | Rows | npt.NDArray[np.bool_]) -> Columns:
        return Columns._make(column[rows] for column in self)

    def to_state(self) -> list[bytes]:
        return [column.astype(dtype).tobytes() for column, dtype in zip(self._arrays(), _DTYPES, strict=True)]

    @classmethod
    def from_state(cls, parts: list[bytes]) -> Columns:
        """Decode columns from a snapshot. Raise ValueError if a length or the order is invalid."""
        rows = cls._make(
            np.frombuffer(part, dtype).astype(dtype.lstrip("<")) for part, dtype in zip(parts, _DTYPES, strict=True)
        )
        if len({len(column) for column in rows}) != 1:
            raise ValueError("the columns of a run differ in length")
        high, low = rows.high, rows.low
        if ((high[1:] < high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] <= low[:-1]))).any():
            raise ValueError("the hashes of a run do not ascend")
        return rows

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self


#: Dtype of each column, in memory and (little-endian) in a snapshot.
_DTYPES = ("<u8", "<u8", "<i8", "<u4", "<i8")


def halves(hashes: list[bytes]) -> tuple[U64, U64]:
    """Return the two 64-bit halves of 16-byte hashes."""
    both = np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2)
    return both[:, 0].astype(np.uint64), both[:, 1].astype(np.uint64)


def in_order(rows: Columns, now: int) -> Columns:
    """Sort rows by hash and drop expired ones; of two with one hash, keep the one that expires later."""
    fresh = rows.expires > now
    if not fresh.all():
        rows = rows.take(fresh)
    order = rows.high.argsort(kind="stable")
    high = rows.high[order]
    if not (high[1:] == high[:-1]).any():
        return Columns(high, rows.low[order], rows.ids[order], rows.prints[order], rows.expires[order])
    rows = rows.take(np.lexsort((rows.expires, rows.low, rows.high)))
    last = np.ones(len(rows.high), dtype=np.bool_)
    last[:-1] = (rows.high[1:] != rows.high[:-1]) | (rows.low[1:] != rows.low[:-1])
    return rows.take(last)


class KeyRun:
    __slots__ = ("expires_max", "rows")

    def __init__(self, rows: Columns) -> None:
        self.rows = rows
        self.expires_max = int(rows.expires.max(initial=0))

    def __len__(self) -> int:
        return len(self.rows.high)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.rows)

    def find(self, high: U64, low: U64) -> tuple[Rows, Rows]:
        """Return which of the hashes (sorted by `high`) are present, and at which rows."""
        ours = self.rows.high
        index = ours.searchsorted(high)
        np.minimum(index, len(ours) - 1, out=index)
        hits = np.flatnonzero(ours[index] == high)
        if not len(hits):
            return hits, hits
        at = index[hits]
        while True:  # equal upper halves by chance are nearly impossible: usually one pass
            after = np.minimum(at + 1, len(ours) - 1)
            behind = (self.rows.low[at] < low[hits]) & (after > at) & (ours[after] == high[hits])
            if not behind.any():
                break
            at = np.where(behind, after, at)
        same = self.rows.low[at] == low[hits]
        return hits[same], at[same]

    def find_one(self, high: np.uint64, low: int) -> int:
        """Return the row of one hash, or -1."""
        ours, at = self.rows.high, int(self.rows.high.searchsorted(high))
        while at < len(ours) and ours.item(at) == high:
            if self.rows.low.item(at) == low:
                return at
            at += 1
        return -1

    def expired_share(self, now: int) -> float:
        """Return the share of expired rows, from a sample of about a thousand."""
        sample = self.rows.expires[:: max(1, len(self) // 1024)]
        return float((sample <= now).mean())


class Merge:
    """A merge of two runs, one slice of the hash space at a time, while both still serve.

    With one run it only drops the expired rows.
    """

    __slots__ = ("_filled", "_from", "_out", "sources")

    def __init__(self, *sources: KeyRun) -> None:
        self.sources = sources
        self._from = [0] * len(sources)
        total = sum(len(run) for run in sources)
        self._out = Columns._make(np.empty(total, dtype=dtype.lstrip("<")) for dtype in _DTYPES)
        self._filled = 0

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._out)

    def advance(self, budget: int, now: int) -> KeyRun | None:
        """Merge about `budget` more rows of each source; return the merged run once done."""
        ends = self._slice_ends(budget)
        parts = [
            run.rows.take(slice(start, end)) for run, start, end in zip(self.sources, self._from, ends, strict=True)
        ]
        merged = in_order(Columns._make(np.concatenate(columns) for columns in zip(*parts, strict=True)), now)
        start, self._filled = self._filled, self._filled + len(merged.high)
        for out, column in zip(self._out._arrays(), merged._arrays(), strict=True):
            out[start : self._filled] = column
        self._from = ends
        if any(end < len(run) for end, run in zip(ends, self.sources, strict=True)):
            return None
        rows = self._out.take(slice(0, self._filled))
        if self._filled < len(self._out.high):  # a view would keep the dropped rows in memory
            rows = Columns._make(column.copy() for column in rows)
        return KeyRun(rows)

    def finish(self, now: int) -> KeyRun:
        merged = None
        while merged is None:
            merged = self.advance(len(self._out.high), now)
        return merged

    def _slice_ends(self, budget: int) -> list[int]:
        """Return the end rows of the next slice: at the same hash in all sources, so that equal hashes meet."""
        while True:
            stops = [start + budget for start in self._from]
            bounds = [run.rows.high[stop] for run, stop in zip(self.sources, stops, strict=True) if stop < len(run)]
            if not bounds:
                return [len(run) for run in self.sources]
            bound = min(bounds)
            ends = [int(run.rows.high.searchsorted(bound)) for run in self.sources]
            if ends != self._from:
                return ends
            budget *= 2  # a budget full of equal upper halves: take them all
