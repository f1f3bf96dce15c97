"""A lane: one sorted sequence of rows, held as a chain of immutable runs of bounded size.

Rows leave a lane at its head and arrive at its tail, so a run is freed as soon as it has been read. This module also
finds the lowest rows of several lanes, and the fewest lanes into which separate runs can be chained. `tiers` decides
which lanes exist and when they are merged.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from heapline.core.heap.runs import Bound, Rows, Run, count_below, count_upto


class Lane:
    """One sorted sequence of rows: a current run, read up to `at`, and the runs after it."""

    __slots__ = ("at", "end", "head", "later", "merging", "rows", "run", "share")

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.later: deque[Run] = deque()
        self.run: Run | None = None
        self.at = self.end = self.rows = 0  # in the current run; rows counts all runs
        self.head: Bound = (0, 0)  # of the first row; only valid while there are rows
        self.share = 0.0  # share of the last refill that came from this lane
        self.merging = False
        for run in runs:
            self.append(run)

    def append(self, run: Run) -> None:
        """Add a run. None of its rows may be below the last row of the lane."""
        self.rows += len(run.keys) - run.start
        if self.run is None:
            self._enter(run)
        else:
            self.later.append(run)

    def take(self, count: int) -> Rows:
        """Remove `count` rows from the current run, which must have that many left."""
        run, start, stop = self.run, self.at, self.at + count
        assert run is not None
        assert stop <= self.end
        self.rows -= count
        if stop < self.end:
            self.at = stop
            self.head = run.keys.item(stop), run.ids.item(stop)
        else:
            self._next()
        return Rows(run.keys[start:stop], run.ids[start:stop], run.positions[start:stop])

    def take_run(self) -> Run:
        """Remove the complete current run, cursor included, without touching its rows."""
        assert self.run is not None
        run = self.run._replace(start=self.at)
        self.rows -= self.end - self.at
        self._next()
        return run

    def take_last_run(self) -> Run:
        assert self.run is not None
        if not self.later:
            return self.take_run()
        run = self.later.pop()
        self.rows -= len(run.keys) - run.start
        return run

    def last_run_rows(self) -> int:
        if not self.later:
            return self.end - self.at
        return len(self.later[-1].keys) - self.later[-1].start

    def current(self, limit: int) -> Rows:
        """Return the next rows of the current run, at most `limit`, without removing them."""
        assert self.run is not None
        start, stop = self.at, min(self.at + limit, self.end)
        return Rows(self.run.keys[start:stop], self.run.ids[start:stop], self.run.positions[start:stop])

    def reset(self, runs: Iterable[Run]) -> None:
        """Replace the content with these runs, in order."""
        self.later.clear()
        self.run, self.at, self.end, self.rows = None, 0, 0, 0
        for run in runs:
            self.append(run)

    def count_below(self, bound: Bound) -> int:
        count = 0
        if self.rows and self.head < bound:
            for run in self.runs():
                below = count_below(run.rest(), bound)
                count += below
                if below < len(run.keys) - run.start:
                    break
        return count

    def runs(self) -> Iterator[Run]:
        if self.run is not None:
            yield self.run._replace(start=self.at)
            yield from self.later

    def _enter(self, run: Run) -> None:
        self.run, self.at, self.end = run, run.start, len(run.keys)
        self.head = run.keys.item(run.start), run.ids.item(run.start)

    def _next(self) -> None:
        if self.later:
            self._enter(self.later.popleft())
        else:
            self.run, self.at, self.end = None, 0, 0


def take_lowest(lanes: Sequence[Lane], blocks: Sequence[int]) -> tuple[list[Rows], list[int]]:
    """Remove the lowest rows of all lanes, at most blocks[i] of lane i; return the pieces and each lane's count.

    Every lane offers a block of its current run. The lowest end of a block that has rows after it bounds what may be
    taken. At least that block is taken completely, so there is always progress.
    """
    bound: Bound | None = None
    for lane, block in zip(lanes, blocks, strict=True):
        if (bound is None or lane.head < bound) and (lane.later or lane.at + block < lane.end):
            run, stop = lane.run, min(lane.at + block, lane.end) - 1
            assert run is not None
            end = run.keys.item(stop), run.ids.item(stop)
            if bound is None or end < bound:
                bound = end
    pieces, counts = [], []
    for lane, block in zip(lanes, blocks, strict=True):
        count = 0
        if bound is None:
            count = lane.end - lane.at
        elif lane.head <= bound:
            count = count_upto(lane.current(block), bound)
        if count:
            pieces.append(lane.take(count))
        counts.append(count)
    return pieces, counts


def chained(runs: Iterable[Run]) -> list[Lane]:
    """Return the fewest lanes that hold the given runs: each run follows one that ends at or below its first row."""
    ends: list[tuple[Bound, int, Lane]] = []
    for run in sorted(runs, key=_first):
        if ends and ends[0][0] <= _first(run):
            _, number, lane = heapq.heappop(ends)
        else:
            number, lane = len(ends), Lane()
        lane.append(run)
        heapq.heappush(ends, (run.last(), number, lane))
    return [lane for _, _, lane in ends]


def _first(run: Run) -> Bound:
    return run.keys.item(run.start), run.ids.item(run.start)
