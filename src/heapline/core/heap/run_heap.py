"""RunHeap: an ordered multiset of rows (key, id, position), served in ascending (key, id) order.

Theory of operation. A row is in exactly one of three places:

    singles   rows pushed one by one: a small binary heap of tuples
    front     one sorted piece, read through a cursor; no row of the tiers is below its last row
    tiers     everything else, in sorted lanes (see `tiers`)

So the first row is the lower of the singles' and the front's first, a pop of many is a slice of the front, and a pop
of one takes a tuple from a block of the front. A push whose rows reach below the front's end is split there. When the
front runs out it is refilled with the lowest rows of all lanes.

`maintain` merges lanes in bounded slices. Correctness never depends on it; without it lanes accumulate and refills get
slower. The cost of every call is bounded by its own rows plus a constant, except calls that search by id or load a
snapshot.

Duplicate (key, id) rows are kept, in any order among themselves. This module does not know what rows mean: whether an
entry is stale, what a position points at, or which end of a priority scale comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count

import numpy as np

from heapline.core.heap.runs import (
    EMPTY,
    Column,
    Row,
    Rows,
    Run,
    check_runs,
    count_below,
    count_upto,
    cut,
    join_rows,
    merge_rows,
    rows_of,
    sort_rows,
    tuples_of,
    with_positions,
    without_ids,
)
from heapline.core.heap.tiers import Tiers, chained

__all__ = ["Rows", "Run", "RunHeap"]

#: Estimated size of a tuple of three ints and its slot in a list.
_SINGLE_BYTES = 168
#: Rows that `first` turns into tuples at a time. It may be called for a thousand partitions.
FEW_ROWS = 16


class RunHeap:
    """An ordered multiset of rows. The thresholds, all in rows, are for tests, which lower them to reach every path.

    front_rows    what a refill of the front aims at
    slice_rows    the longest run, and the longest slice of a merge
    small_rows    lanes below this are merged in the call that adds the last of fan_in
    fan_in        how many lanes of similar size make a merge; a power of two
    singles_rows  so many single rows become a run
    block_rows    what a pop of one turns into tuples at a time
    few_part      rows pushed into a front of this many times as many wait as singles: copying it would cost more
    """

    def __init__(
        self,
        *,
        front_rows: int = 4096,
        slice_rows: int = 32768,
        small_rows: int = 2048,
        fan_in: int = 8,
        singles_rows: int = 1024,
        block_rows: int = 256,
        few_part: int = 128,
    ) -> None:
        self._front_rows = front_rows
        self._singles_rows = singles_rows
        self._block_rows = block_rows
        self._few_part = few_part
        self._serials: Iterator[int] = count(1)
        self._tiers = Tiers(self._serials, run_rows=slice_rows, small_rows=small_rows, fan_in=fan_in)
        self._singles: list[Row] = []
        self._front = EMPTY
        self._front_serial = 0
        self._at = self._end = 0
        # Rows of the front from `_at` on as tuples, last first; empty until some are needed as tuples.
        self._block: list[Row] = []
        self._head: tuple[int, int] | None = None  # None: unknown
        self._work = 0

    def __len__(self) -> int:
        return len(self._singles) + self._end - self._at + self._tiers.rows

    # -- adding rows

    def push(self, keys: Column, ids: Column, positions: Column) -> None:
        """Add rows in any order. The arrays are copied."""
        size, have = len(keys), self._end - self._at
        if not size == len(ids) == len(positions):
            raise ValueError("keys, ids and positions must have the same length")
        if size == 1:
            self.push_one(keys.item(), ids.item(), positions.item())
        elif not self._tiers.rows and 0 < have <= min(self._front_rows - size, size * self._few_part):
            # A short queue is entirely in its front, and one sort covers both.
            self._work += size + have
            self._set_front(merge_rows([cut(self._front, self._at, self._end), Rows(keys, ids, positions)]))
        elif size:
            self._insert(sort_rows(keys, ids, positions), may_wait=True)

    def push_one(self, key: int, id: int, position: int) -> None:
        singles = self._singles
        heapq.heappush(singles, (key, id, position))
        self._head = None
        if len(singles) >= self._singles_rows:
            self._flush_singles()

    def _insert(self, rows: Rows, *, may_wait: bool) -> None:
        """Insert sorted rows. A few rows that belong into the front may wait among the singles."""
        size = len(rows.keys)
        self._work += size
        self._head = None
        if self._at == self._end:
            if self._tiers.rows or size > self._front_rows:
                self._tiers.add(rows)
            else:
                self._set_front(rows)
            return
        front, last = self._front, self._end - 1
        low = count_upto(rows, (front.keys.item(last), front.ids.item(last)))
        if low < size:
            self._tiers.add(cut(rows, low, size) if low else rows)
        if may_wait and low <= (self._end - self._at) // self._few_part:
            for row in tuples_of(cut(rows, 0, low)):
                self.push_one(*row)
        elif low:
            self._insert_in_front(cut(rows, 0, low))

    def _insert_in_front(self, rows: Rows) -> None:
        merged = merge_rows([cut(self._front, self._at, self._end), rows])
        size, keep = len(merged.keys), self._front_rows
        self._work += size
        if size > 2 * keep:
            self._tiers.add(cut(merged, keep, size))
            merged = cut(merged, 0, keep)
        self._set_front(merged)

    def _set_front(self, rows: Rows) -> None:
        self._front, self._front_serial = rows, next(self._serials)
        self._at, self._end = 0, len(rows.keys)
        self._block.clear()
        self._head = None

    def _flush_singles(self) -> None:
        if self._singles:
            rows = rows_of(self._singles)
            self._singles.clear()
            self._insert(rows, may_wait=False)

    # -- serving rows

    def head(self) -> tuple[int, int] | None:
        """Return (key, id) of the first row, or None if there is none."""
        head = self._head
        if head is None:
            if self._at == self._end and self._tiers.rows:
                self._set_front(self._tiers.take(self._front_rows))
            if self._at < self._end:
                head = self._front.keys.item(self._at), self._front.ids.item(self._at)
            if self._singles and (head is None or self._singles[0] < head):
                head = self._singles[0][:2]
            self._head = head
        return head

    def peek(self, n: int) -> Rows:
        """Return the first n rows, or all if fewer, without removing them. A following pop of n costs a slice."""
        self._fill(n)
        return cut(self._front, self._at, min(self._at + max(n, 0), self._end))

    def pop(self, n: int) -> Rows:
        """Remove and return the first n rows, or all if there are fewer."""
        rows = self.peek(n)
        self.skip(len(rows.keys))
        return rows

    def skip(self, n: int) -> None:
        """Remove the first n rows, which `peek` or `first` have returned since the last change."""
        self._at += n
        self._head = None
        if self._block:
            del self._block[-n or len(self._block) :]

    def first(self, n: int) -> list[Row]:
        """Return the first n rows, or all if fewer, as tuples and last first: for callers that need a few."""
        if self._singles or self._at + n > self._end:
            self._fill(n)
        block = self._block
        if len(block) < min(n, self._end - self._at):
            block = self._load_block(max(n, FEW_ROWS))
        return block[-n:]

    def pop_one(self) -> tuple[int, int, int] | None:
        """Remove and return the first row, (key, id, position), or None if there is none."""
        block, singles = self._block, self._singles
        if not block and (self._at < self._end or self._tiers.rows):
            block = self._load_block(self._block_rows)
        self._head = None
        if singles and (not block or singles[0] < block[-1]):
            return heapq.heappop(singles)
        if not block:
            return None
        self._at += 1
        return block.pop()

    def count_below(self, key: int, id: int) -> int:
        """Return how many rows are < (key, id)."""
        bound = (key, id)
        # A longer tuple with an equal prefix sorts after the shorter one, as required here.
        singles = sum([row < bound for row in self._singles])
        front = count_below(cut(self._front, self._at, self._end), bound)
        return singles + front + self._tiers.count_below(bound)

    def _fill(self, n: int) -> None:
        """Fill the front with the first n rows of the heap, or all rows if there are fewer."""
        if self._singles and n > 0:
            last = self._at + n - 1
            if last >= self._end or self._singles[0] < (self._front.keys.item(last), self._front.ids.item(last)):
                self._flush_singles()
        have = self._end - self._at
        if have >= n or not self._tiers.rows:
            return
        pieces = [cut(self._front, self._at, self._end)] if have else []
        self._work += have
        while have < n and self._tiers.rows:
            pieces.append(self._tiers.take(max(self._front_rows, n - have)))
            have += len(pieces[-1].keys)
        self._set_front(join_rows(pieces))

    def _load_block(self, rows: int) -> list[Row]:
        if self._at == self._end:
            self._set_front(self._tiers.take(self._front_rows))
        block = tuples_of(cut(self._front, self._at, min(self._at + rows, self._end)))
        block.reverse()
        self._block = block
        return block

    # -- by id: these read every row

    def find(self, id: int) -> tuple[int, int, int] | None:
        """Return (key, id, position) of one row with that id."""
        for row in self._singles:
            if row[1] == id:
                return row
        for run in self._array_runs():
            keys, ids, positions = run.rest()
            found = np.flatnonzero(ids == id)
            if len(found):
                place = int(found[0])
                return keys.item(place), id, positions.item(place)
        return None

    def replace_positions(self, ids_sorted: Column, positions: Column, keep: int = 0) -> int:
        """Replace the positions of rows with these ids (ascending), except the bits in `keep`; return the count."""
        return self._rewrite(ids_sorted, lambda rows: with_positions(rows, ids_sorted, positions, keep))

    def discard(self, ids_sorted: Column) -> int:
        """Drop the rows with these ids (ascending) and return their number."""
        return self._rewrite(ids_sorted, lambda rows: without_ids(rows, ids_sorted))

    def _rewrite(self, ids_sorted: Column, change: Callable[[Rows], tuple[Rows, int]]) -> int:
        """Replace each run by the result of `change`, with a new serial; unchanged runs stay."""
        changed_rows = 0

        def visit(run: Run) -> Run:
            nonlocal changed_rows
            rows, changed = change(run.rest())
            changed_rows += changed
            return Run(next(self._serials), *rows) if changed else run

        if len(ids_sorted):
            self._flush_singles()
            if self._at < self._end:
                self._set_front(visit(self._front_run()).rest())
            self._tiers.rewrite(visit)
            self._head = None
        return changed_rows

    # -- complete heap

    @property
    def is_settled(self) -> bool:
        """Whether `maintain` has nothing to do."""
        return self._tiers.is_settled

    def maintain(self, budget: int = 65536) -> bool:
        """Merge about `budget` rows; return whether more is left. It only affects speed."""
        return not self._tiers.is_settled and self._tiers.maintain(budget)

    def clear(self) -> list[Rows]:
        """Remove everything; return the rows as sorted pieces in any order."""
        left = [run.rest() for run in self.runs()]
        self._singles.clear()
        self._tiers.clear()
        self._set_front(EMPTY)
        return left

    def runs(self) -> list[Run]:
        """Return the content as immutable runs. They share the arrays, so the cost is per run, not per row.

        Singles become part of a run first, so that a run keeps its serial from one call to the next.
        """
        self._flush_singles()
        return list(self._array_runs())

    @classmethod
    def from_runs(cls, runs: Iterable[Run], **thresholds: int) -> RunHeap:
        """Create a heap with the content of these runs, sharing their arrays. Rows before a run's start are omitted."""
        runs = list(runs)
        check_runs(runs)
        heap = cls(**thresholds)
        heap._serials = heap._tiers.serials = count(max((run.serial for run in runs), default=0) + 1)
        for lane in chained(run for run in runs if run.start < len(run.keys)):
            heap._tiers.add_lane(lane)
        return heap

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, including consumed rows not yet freed; singles are estimated."""
        arrays = sum(run.keys.nbytes + run.ids.nbytes + run.positions.nbytes for run in self._array_runs())
        return arrays + len(self._singles) * _SINGLE_BYTES

    @property
    def work(self) -> int:
        """Rows sorted, merged or copied so far: the unit in which pauses are bounded."""
        return self._work + self._tiers.work

    @property
    def lane_count(self) -> int:
        """The number of sorted sequences that a refill reads; `maintain` keeps it small."""
        return len(self._tiers.lanes)

    @property
    def merge_count(self) -> int:
        """The number of merges in progress."""
        return len(self._tiers.merges)

    def _array_runs(self) -> Iterator[Run]:
        if self._at < self._end:
            yield self._front_run()
        yield from self._tiers.runs()

    def _front_run(self) -> Run:
        return Run(self._front_serial, *self._front, self._at)
