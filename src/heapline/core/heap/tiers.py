"""Lanes of sorted runs, merged tier by tier in bounded slices.

Theory of operation. A *lane* is one sorted sequence of rows, held as a chain of immutable runs of bounded size. Rows
leave a lane at its head and arrive at its tail, so a run is freed as soon as it has been read.

A *merge* takes a few lanes of similar size and, slice by slice, moves their lowest rows to the
tail of an output lane. Rows are moved, never duplicated: at any time each row is in exactly one lane, so readers,
snapshots and further pushes need not know that a merge is pending. The output stays sorted because the rows left in the
inputs are never below the moved ones, and readers only shorten lanes at their heads. A merge needs no extra space
beyond a slice, because inputs free their runs as they are used up.

Lanes are ranked by the rows they have left; `fan_in` idle lanes of one rank are merged. So a maintained set has
O(fan_in * log rows) lanes. Small lanes are merged immediately when added, all others only in `maintain`.

This module does not know the front buffer, single rows, or what rows mean.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from heapline.core.heap.runs import Bound, Rows, Run, copied, count_below, count_upto, cut, join_rows, merge_rows


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


#: The minimum number of rows that a lane offers to a refill, whatever its previous share was.
_BLOCK_ROWS_MIN = 16
#: Cost of moving a complete run without touching its rows, in rows of work.
_MOVE_COST = 64


class Merge:
    """A pending merge: moves rows from the heads of its inputs to the tail of its output."""

    __slots__ = ("inputs", "output", "rank", "run_rows", "serials")

    def __init__(self, inputs: list[Lane], rank: int, serials: Iterator[int], run_rows: int) -> None:
        self.inputs, self.output, self.rank = inputs, Lane(), rank
        self.serials, self.run_rows = serials, run_rows
        self.output.merging = True
        self.output.share = sum(lane.share for lane in inputs)
        for lane in inputs:
            lane.merging = True

    def step(self, rows: int) -> int:
        """Move about `rows` rows, or one complete run; return the work done. Without inputs left, it is done."""
        self.inputs = lanes = [lane for lane in self.inputs if lane.rows]
        if not lanes:
            return 0
        lowest = min(lanes, key=lambda lane: lane.head)
        assert lowest.run is not None
        end = lowest.run.last()
        if all(end <= lane.head for lane in lanes if lane is not lowest):
            # Nothing overlaps this run, the usual case where keys only rise. It moves unchanged, with its serial.
            return _MOVE_COST + self._append(lowest.take_run())
        block = max(1, min(rows, self.run_rows) // len(lanes))
        pieces, _ = take_lowest(lanes, [block] * len(lanes))
        merged = merge_rows(pieces)
        return len(merged.keys) + self._append(Run(next(self.serials), *merged))

    def _append(self, run: Run) -> int:
        """Add a run to the output, joined with last runs no longer than it, so that runs stay few and long."""
        output, size = self.output, len(run.keys) - run.start
        pieces = [run.rest()]
        while 0 < (last := output.last_run_rows()) <= min(size, self.run_rows - size):
            pieces.append(output.take_last_run().rest())
            size += last
        if len(pieces) == 1:
            output.append(run)
            return 0
        pieces.reverse()
        output.append(Run(next(self.serials), *join_rows(pieces)))
        return size


class Tiers:
    """All lanes of a heap and the merges pending between them."""

    def __init__(self, serials: Iterator[int], *, run_rows: int, small_rows: int, fan_in: int) -> None:
        self.lanes: list[Lane] = []
        self.merges: list[Merge] = []
        self.rows = 0
        self.work = 0  # rows sorted, merged or copied so far, which tests can bound instead of time
        self.serials = serials
        self._run_rows = run_rows
        self._small_rows = small_rows
        self._fan_in = fan_in
        self._rank_bits = fan_in.bit_length() - 1
        self._small_count = 0  # small lanes added since the last merge of small lanes
        self.is_settled = True  # no merge was due at the last check, and nothing changed since

    def add(self, rows: Rows) -> None:
        """Add a lane of sorted rows."""
        count, step = len(rows.keys), self._run_rows
        if count <= step:
            lane = Lane((Run(next(self.serials), *rows),))
        else:
            # Copies, so that each run can be freed separately.
            pieces = (cut(rows, start, start + step) for start in range(0, count, step))
            lane = Lane(Run(next(self.serials), *copied(piece)) for piece in pieces)
        self.add_lane(lane)

    def add_lane(self, lane: Lane) -> None:
        self.rows += lane.rows
        lane.share = lane.rows / self.rows
        self.lanes.append(lane)
        if lane.rows >= self._small_rows:
            self.is_settled = False
            return
        self._small_count += 1
        if self._small_count >= self._fan_in:
            self._merge_small()

    def take(self, want: int) -> Rows:
        """Remove and return the lowest rows: about `want`, at least one if there are any."""
        lanes = self.lanes
        if self.rows <= want:
            blocks = [lane.rows for lane in lanes]
        else:
            # A lane offers its expected share, judged by the last refill, and a quarter more.
            scale = 1.25 * want / max(1.0, sum([lane.share for lane in lanes]))
            blocks = [int(lane.share * scale) + _BLOCK_ROWS_MIN for lane in lanes]
        pieces, counts = take_lowest(lanes, blocks)
        taken = sum(counts)
        # A short take says little about the lanes that it omitted, so it may only raise what they offer.
        short = taken * 4 < want
        for lane, count in zip(lanes, counts, strict=True):
            lane.share = max(lane.share, count / taken) if short else count / taken
        self.rows -= taken
        self.work += taken
        self._drop_empty()
        return merge_rows(pieces)

    def maintain(self, budget: int) -> bool:
        """Merge about `budget` rows; return whether more is left to do."""
        # Slices come out shorter than requested, and very short ones are not worth their fixed cost.
        enough = budget // 8
        while (merge := self._next_merge()) is not None:
            if budget <= enough:
                return True
            held = merge.output.rows > 0
            work = merge.step(budget)
            budget -= work
            self.work += work
            if not held and merge.output.rows:
                # Before its inputs, because its rows are older than those of most lanes after it: see merge_rows.
                self.lanes.insert(self.lanes.index(merge.inputs[0]), merge.output)
            if not any(lane.rows for lane in merge.inputs):
                merge.output.merging = False
                self.merges.remove(merge)
                self.is_settled = False
            self._drop_empty()
        return False

    def count_below(self, bound: Bound) -> int:
        return sum(lane.count_below(bound) for lane in self.lanes)

    def rewrite(self, change: Callable[[Run], Run]) -> None:
        """Replace every run by change(run), which may drop rows but must keep their order."""
        for lane in self.lanes:
            changed = [change(run) for run in lane.runs()]
            lane.reset(run for run in changed if run.start < len(run.keys))
        self.rows = sum(lane.rows for lane in self.lanes)
        self._drop_empty()
        self.is_settled = False

    def clear(self) -> None:
        self.lanes, self.merges, self.rows, self._small_count, self.is_settled = [], [], 0, 0, True

    def runs(self) -> Iterator[Run]:
        for lane in self.lanes:
            yield from lane.runs()

    def _next_merge(self) -> Merge | None:
        """Return the pending merge of the lowest rank; start one if a lower rank is due. Short merges go first."""
        if not self.is_settled:
            self._begin_merge()
        return min(self.merges, key=lambda merge: merge.rank, default=None)

    def _begin_merge(self) -> None:
        by_rank: dict[int, list[Lane]] = {}
        for lane in self.lanes:
            if not lane.merging:
                by_rank.setdefault(self._rank(lane.rows), []).append(lane)
        lowest_pending = min((merge.rank for merge in self.merges), default=64)
        due = [rank for rank, lanes in by_rank.items() if len(lanes) >= self._fan_in and rank < lowest_pending]
        if due:
            lanes = by_rank[min(due)][: 2 * self._fan_in]
            self.merges.append(Merge(lanes, min(due), self.serials, self._run_rows))
        self.is_settled = not self.merges

    def _rank(self, rows: int) -> int:
        bits = self._rank_bits
        return ((rows // self._small_rows).bit_length() + bits - 1) // bits

    def _merge_small(self) -> None:
        """Merge the small lanes now: at most 2 * fan_in of them, so at most 2 * fan_in * small_rows rows."""
        self._small_count = 0
        small = [lane for lane in self.lanes if lane.rows < self._small_rows and not lane.merging]
        if len(small) < self._fan_in:
            return
        small = small[-2 * self._fan_in :]
        pieces = [run.rest() for lane in small for run in lane.runs()]
        merged = merge_rows(pieces)
        self.work += len(merged.keys)
        dropped = set(map(id, small))
        self.lanes = [lane for lane in self.lanes if id(lane) not in dropped]
        lane = Lane((Run(next(self.serials), *merged),))
        lane.share = sum(each.share for each in small)
        self.lanes.append(lane)
        self.is_settled = False

    def _drop_empty(self) -> None:
        if any(not lane.rows for lane in self.lanes):
            self.lanes = [lane for lane in self.lanes if lane.rows]
