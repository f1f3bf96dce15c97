"""Sorted columns of queue rows: their format, their order, and how sorted pieces are merged.

A row is (key, id, position), three int64 columns; rows are ordered by (key, id) and nothing else. Everything here is a
function of its arguments: batches are sorted, sorted pieces are merged, bounds are searched. `tiers` and `run_heap`
decide which pieces exist and when they are merged.

Keys span all of int64, so nothing here negates or subtracts keys as signed numbers. Arrays that this module returns are
marked read-only: readers and snapshots share them with the heap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import CorruptionError

Column: TypeAlias = npt.NDArray[np.int64]
Bound: TypeAlias = tuple[int, int]
Row: TypeAlias = tuple[int, int, int]

_WORD = 1 << 63
#: Up to this many rows the stable sort costs no more than the default one.
_STABLE_ROWS_MAX = 1024


class Rows(NamedTuple):
    """Three columns of equal length. Slices of shared, read-only arrays: copy what you keep for long."""

    keys: Column
    ids: Column
    positions: Column


class Run(NamedTuple):
    """An immutable sorted run. Rows before `start` were consumed; `serial` never names other content."""

    serial: int
    keys: Column
    ids: Column
    positions: Column
    start: int = 0

    def rest(self) -> Rows:
        start = self.start
        return Rows(self.keys[start:], self.ids[start:], self.positions[start:])

    def last(self) -> Bound:
        return self.keys.item(-1), self.ids.item(-1)


def frozen(keys: Column, ids: Column, positions: Column) -> Rows:
    keys.setflags(write=False)
    ids.setflags(write=False)
    positions.setflags(write=False)
    return Rows(keys, ids, positions)


EMPTY = frozen(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def rows_of(tuples: list[Row]) -> Rows:
    """Convert tuples to sorted columns."""
    keys, ids, positions = np.array(sorted(tuples), dtype=np.int64).T.copy()
    return frozen(keys, ids, positions)


def tuples_of(rows: Rows) -> list[Row]:
    return list(zip(rows.keys.tolist(), rows.ids.tolist(), rows.positions.tolist(), strict=True))


def check_runs(runs: Sequence[Run]) -> None:
    """Check that decoded runs are valid heap content. Checksums only prove that a snapshot's bytes are as written."""
    if len({run.serial for run in runs}) < len(runs):
        raise CorruptionError("two runs of one heap have the same serial")
    for run in runs:
        if not len(run.keys) == len(run.ids) == len(run.positions):
            raise CorruptionError(f"the columns of heap run {run.serial} differ in length")
        if not 0 <= run.start <= len(run.keys):
            raise CorruptionError(f"heap run {run.serial} starts at {run.start} of {len(run.keys)} rows")
        if not is_sorted(run.keys, run.ids):
            raise CorruptionError(f"the rows of heap run {run.serial} are out of order")


def cut(rows: Rows, start: int, stop: int) -> Rows:
    return Rows(rows.keys[start:stop], rows.ids[start:stop], rows.positions[start:stop])


def copied(rows: Rows) -> Rows:
    return frozen(rows.keys.copy(), rows.ids.copy(), rows.positions.copy())


def is_sorted(keys: Column, ids: Column) -> bool:
    if not (keys[1:] >= keys[:-1]).all():
        return False
    return not _ties_inverted(keys, ids)


def sort_rows(keys: Column, ids: Column, positions: Column) -> Rows:
    """Return the rows of an unsorted batch in order, always as new arrays."""
    if is_sorted(keys, ids):
        return copied(Rows(keys, ids, positions))
    # On long input the default sort is twice as fast as the stable one, but it does not order ties.
    order = np.argsort(keys, kind="stable" if len(keys) <= _STABLE_ROWS_MAX else None)
    ordered_keys, ordered_ids = keys[order], ids[order]
    if _ties_inverted(ordered_keys, ordered_ids):
        order = _order_with_ties(keys, ids)
        ordered_keys, ordered_ids = keys[order], ids[order]
    return frozen(ordered_keys, ordered_ids, positions[order])


def merge_rows(pieces: Sequence[Rows]) -> Rows:
    """Merge several pieces, fast if they are sorted. Equal keys cost least when pieces with older ids come first."""
    if len(pieces) == 1:
        return pieces[0]
    all_keys = np.concatenate([piece.keys for piece in pieces])
    all_ids = np.concatenate([piece.ids for piece in pieces])
    # The stable sort detects the sorted pieces and merges them: a fifth of the cost of a full sort.
    order = np.argsort(all_keys, kind="stable")
    keys, ids = all_keys[order], all_ids[order]
    if _ties_inverted(keys, ids):
        order = _order_with_ties(all_keys, all_ids)
        keys, ids = all_keys[order], all_ids[order]
    return frozen(keys, ids, np.concatenate([piece.positions for piece in pieces])[order])


def join_rows(pieces: Sequence[Rows]) -> Rows:
    """Concatenate pieces that already follow each other in order."""
    if len(pieces) == 1:
        return pieces[0]
    keys, ids, positions = zip(*pieces, strict=True)
    return frozen(np.concatenate(keys), np.concatenate(ids), np.concatenate(positions))


def count_below(rows: Rows, bound: Bound) -> int:
    """Return how many of the sorted rows are < bound."""
    return _count(rows.keys, rows.ids, bound, "left")


def count_upto(rows: Rows, bound: Bound) -> int:
    """Return how many of the sorted rows are <= bound."""
    return _count(rows.keys, rows.ids, bound, "right")


def with_positions(rows: Rows, ids_sorted: Column, positions: Column, keep: int) -> tuple[Rows, int]:
    """Return the rows with new positions for these ids, except the bits in `keep`, and how many changed."""
    found, places = _matches(ids_sorted, rows.ids)
    new = (positions[places] & ~keep) | (rows.positions & keep)
    return frozen(rows.keys, rows.ids, np.where(found, new, rows.positions)), int(np.count_nonzero(found))


def without_ids(rows: Rows, ids_sorted: Column) -> tuple[Rows, int]:
    """Return the rows without those of these ids, and how many were dropped."""
    found, _ = _matches(ids_sorted, rows.ids)
    kept = ~found
    return frozen(rows.keys[kept], rows.ids[kept], rows.positions[kept]), int(np.count_nonzero(found))


def _matches(ids_sorted: Column, ids: Column) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Return which ids are among the sorted ones, and where."""
    places = np.minimum(np.searchsorted(ids_sorted, ids), len(ids_sorted) - 1)
    return ids_sorted[places] == ids, places


def _count(keys: Column, ids: Column, bound: Bound, side: Literal["left", "right"]) -> int:
    key, row_id = bound
    stop = int(keys.searchsorted(key, "right"))
    if not stop or keys.item(stop - 1) != key:
        return stop
    start = int(keys[:stop].searchsorted(key, "left"))
    return start + int(ids[start:stop].searchsorted(row_id, side))


def _ties_inverted(keys: Column, ids: Column) -> bool:
    """Whether rows already ordered by key have equal keys with descending ids."""
    tied = keys[1:] == keys[:-1]
    if not tied.any():
        return False
    return bool((tied & (ids[1:] < ids[:-1])).any())


def _order_with_ties(keys: Column, ids: Column) -> npt.NDArray[np.intp]:
    """Return the order by (key, id). If both spans fit into 63 bits together, they are sorted as one number."""
    key_low, id_low = int(keys.min()), int(ids.min())
    key_span, id_span = int(keys.max()) - key_low + 1, int(ids.max()) - id_low + 1
    if key_span * id_span < _WORD:
        # Both differences are below 2**63 here, so neither subtraction overflows.
        return np.argsort((keys - key_low) * id_span + (ids - id_low), kind="stable")
    return np.lexsort((ids, keys))
