"""The timing wheel: find due rows in order, at a cost that does not grow with the number of waiting rows.

To its user it is a list of (due, key, id, position) sorted by due time and id; rows are taken from its front.
`timer_layout` explains why it is cheap; this module has the calls. The wheel does not know the clock, the meaning of a
key or a position, or whether a row is still needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest
from heapline.core.events import I64
from heapline.core.wheel.timer_chunks import (
    DUE,
    I64_MAX,
    ID,
    POSITION,
    Chunk,
    Mint,
    Sizes,
    Timers,
    as_timers,
    sort_rows,
    stack,
)
from heapline.core.wheel.timer_layout import TimerLayout
from heapline.core.wheel.timer_piles import NO_ROWS

__all__ = ["Chunk", "Timers", "TimingWheel"]

TICK_MS_MIN, TICK_MS_MAX = 10, 1000


class TimingWheel:
    def __init__(self, now: int, tick_ms: int = 100, *, _sizes: Sizes | None = None) -> None:
        if not TICK_MS_MIN <= tick_ms <= TICK_MS_MAX:
            raise BadRequest(f"a tick of {tick_ms} ms: give one from {TICK_MS_MIN} to {TICK_MS_MAX} ms")
        self.tick_ms = tick_ms
        self._mint = Mint(_sizes or Sizes())
        self._layout = TimerLayout(self._mint, tick_ms, now // tick_ms + 1)
        self._now = now
        self.count = 0
        #: The earliest due time of all rows; None if it must be computed.
        self._first: int | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, including consumed rows that are not freed yet."""
        if not self.count:
            return 0
        arrays = (chunk.rows if chunk.rows.base is None else chunk.rows.base for chunk in self._layout.loose())
        loose = sum({id(array): array.nbytes for array in arrays}.values())
        return loose + sum(pile.tally()[1] for _, _, pile in self._layout.slots())

    def insert(self, dues: I64, keys: I64, ids: I64, positions: I64) -> None:
        """Add rows, in any order; rows due in the past sort first as usual. The columns are copied."""
        rows = stack(dues, keys, ids, positions)
        count, most = rows.shape[1], self._mint.sizes.chunk_rows
        for begin in range(0, count, most):
            self._add(sort_rows(rows if count <= most else rows[:, begin : begin + most]))

    def insert_one(self, due: int, key: int, id: int, position: int) -> None:
        self._add(np.array(((due,), (key,), (id,), (position,)), np.int64))

    def _add(self, rows: I64) -> None:
        first = rows.item(DUE, 0)
        if not self.count:
            self._first = first
        elif self._first is not None:
            self._first = min(self._first, first)
        self.count += rows.shape[1]
        self._layout.place(rows)

    def next_wake(self) -> int | None:
        """Return when `due` may next return a row: at a full tick or, if rows are already due, at their time."""
        if not self.count:
            return None
        if self._first is None:
            self._first = self._layout.first()
        first = self._first
        return first if first <= self._now else -(-first // self.tick_ms) * self.tick_ms

    def due(self, now: int, limit: int) -> Timers:
        """Return the first rows due at `now`, at most `limit`, in (due, id) order. They stay until taken."""
        self._now = now
        tick = now // self.tick_ms + 1
        if tick > self._layout.tick:
            self._layout.advance(tick)
        else:
            self._layout.go_back(tick)
        return self._layout.front.peek(limit, min(now, I64_MAX))

    def count_until(self, bounds: list[int]) -> list[int]:
        """Return how many rows are due up to the first bound, then up to each next bound, and last, how many later.

        Slots between two bounds are not searched, so the cost grows with the slots.
        """
        counts, chunks = [0] * (len(bounds) + 1), list(self._layout.loose())
        for first, last, pile in self._layout.slots():
            bucket = bisect_left(bounds, first)
            if bucket == len(bounds) or last <= bounds[bucket]:
                counts[bucket] += pile.tally()[0]
            else:
                chunks += pile
        for chunk in chunks:
            low, high, at = bisect_left(bounds, chunk.first), bisect_left(bounds, chunk.last), chunk.start
            ends = chunk.rows[DUE].searchsorted(bounds[low:high], "right").tolist() if low < high else ()
            for bucket, end in enumerate(ends, low):
                counts[bucket] += end - at
                at = end
            counts[high] += chunk.rows.shape[1] - at
        return counts

    def take(self, n: int) -> Timers:
        """Remove and return the first n rows in (due, id) order, regardless of time; all if there are fewer."""
        wanted = n = max(0, min(n, self.count))
        parts, stride, front = [], 0, self._layout.front
        while wanted:
            if not front.count:
                # Strides double, so that taking many rows from a sparse wheel does not advance tick by tick.
                self._layout.advance(self._layout.first() // self.tick_ms + 1 + stride)
                stride = 2 * stride + 1
            rows = front.take(wanted)
            wanted -= rows.shape[1]
            parts.append(rows)
        self.count -= n
        self._first = None
        if len(parts) == 1:
            return as_timers(parts[0])
        return as_timers(np.concatenate(parts, axis=1) if parts else NO_ROWS)

    def maintain(self, budget: int = 65536) -> bool:
        """Do about `budget` rows of work that later calls would have to do; True if more is left."""
        return self._layout.work_ahead(budget)

    # -- by id and in bulk: rare, and linear in the rows held

    def find(self, id: int) -> tuple[int, int, int, int] | None:
        """Return (due, key, id, position) of the first row in order with this id."""
        found: list[tuple[int, int, int]] = []
        for chunk in self._layout:
            live = chunk.live()
            at = np.flatnonzero(live[ID] == id)
            found.extend((due, position, key) for due, key, _, position in live.take(at, axis=1).T.tolist())
        if not found:
            return None
        due, position, key = min(found)
        return due, key, id, position

    def replace_positions(self, ids_sorted: I64, positions: I64, keep: int = 0) -> int:
        """Replace the positions of the rows with these ids, except the bits in `keep`; return how many changed."""
        replaced = 0

        def change(rows: I64) -> I64:
            nonlocal replaced
            at, hits = _matches(rows[ID], ids_sorted)
            if not hits.any():
                return rows
            replaced += int(np.count_nonzero(hits))
            rows = rows.copy()
            rows[POSITION, hits] = (positions[at[hits]] & ~keep) | (rows[POSITION, hits] & keep)
            return sort_rows(rows)

        self._layout.rewrite(change)
        return replaced

    def discard(self, ids_sorted: I64) -> int:
        """Drop the rows with these ids and return their number."""
        return self.keep(lambda timers: ~_matches(timers.ids, ids_sorted)[1])

    def keep(self, predicate: Callable[[Timers], npt.NDArray[np.bool_]]) -> int:
        """Drop the rows for which the predicate is False and return their number."""
        dropped = 0

        def change(rows: I64) -> I64:
            nonlocal dropped
            wanted = predicate(as_timers(rows))
            if wanted.all():
                return rows
            kept = rows.compress(wanted, axis=1)
            dropped += rows.shape[1] - kept.shape[1]
            return kept

        self._layout.rewrite(change)
        self.count -= dropped
        self._first = None
        return dropped

    def clear(self) -> list[Timers]:
        """Remove all rows and return them, unordered."""
        held = [as_timers(chunk.live()) for chunk in self._layout]
        self._layout = TimerLayout(self._mint, self.tick_ms, self._layout.tick)
        self.count, self._first = 0, None
        return held

    # -- snapshots

    def chunks(self) -> list[Chunk]:
        """Return all rows as chunks with frozen cursors: later changes to the wheel do not affect them."""
        return [Chunk(chunk.serial, chunk.rows, chunk.start) for chunk in self._layout]

    @property
    def next_serial(self) -> int:
        """The serial of the next chunk. A snapshot that keeps it prevents reuse of serials after a restart."""
        return self._mint.next_serial

    @classmethod
    def from_chunks(
        cls, now: int, tick_ms: int, chunks: Iterable[Chunk], *, next_serial: int = 0, _sizes: Sizes | None = None
    ) -> TimingWheel:
        """Create a wheel of these rows. Chunks keep their serials until the wheel rewrites them."""
        wheel = cls(now, tick_ms, _sizes=_sizes)
        given = [Chunk(chunk.serial, chunk.rows, chunk.start) for chunk in chunks if chunk.count]
        wheel._mint.next_serial = max(next_serial, *(chunk.serial + 1 for chunk in given), 0)
        wheel.count = sum(chunk.count for chunk in given)
        wheel._layout.restore(given)
        return wheel


def _matches(ids: I64, ids_sorted: I64) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return, for each id, where it would be in `ids_sorted`, and whether it is there."""
    if not len(ids_sorted):
        return np.zeros(len(ids), np.intp), np.zeros(len(ids), np.bool_)
    at = np.minimum(ids_sorted.searchsorted(ids), len(ids_sorted) - 1)
    return at, ids_sorted[at] == ids
