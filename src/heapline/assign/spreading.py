"""Who gets what, with bounded load and few moves: the arithmetic under the weighted consistent hash.

Everything is columns: partitions and workers are numbers, a partition has a hash and a weight, and a holder or -1. It
knows nothing of names.

Theory of operation. bounds.py says what a worker's *share* is, between what bounds its load should be, and which
partitions are giants, each with a worker of its own. A worker below its lower bound is *hungry*: it gets as much as
brings it there, and a newcomer, who carries nothing, the whole share.

1. What is held stays, but for what is *shed*: by workers above the bound; and, if what lies around (partitions without
   holder) does not feed the hungry, by the fullest workers, all cut down to one level.
2. What lies around goes to the hungry, then what was shed; each to the first clockwise.
3. What was shed and found nobody hungry goes back where it was, if there is room.
4. The rest goes to the first worker clockwise that has room; if nobody has, to the one with the least load.

So after a join about one share moves, all of it to the newcomer; after a leave what the leaver held, and no more. With
no holders at all, step 4 alone is a consistent hash with bounded load; then the same steps feed those who got little.
"""

from __future__ import annotations

import heapq

import numpy as np

from heapline.assign.bounds import TOLERANCE, ZEROS_SHARE, Weights, bounds_of, without_zeros
from heapline.assign.ring import Flags, Hashes, Indexes, Ring

#: What nobody has taken after so many steps is too heavy for whoever is left.
IDLE_STEPS_MAX = 4
#: Few and heavy partitions may not fit at once; each round is better than the one before, and most need only one.
ROUNDS_MAX = 5


def spread(hashes: Hashes, weights: Weights, holders: Indexes, ring: Ring, worker_count: int, bound: float) -> Indexes:
    """The new holder of each partition."""
    weights, bound = without_zeros(weights), bound / (1 + ZEROS_SHARE)
    # Everything below works on partitions in this order: heaviest first, then by hash. It makes the answer the same
    # in whatever order they came, and lets the light ones fill what the heavy ones leave.
    order = np.lexsort((hashes, -weights))
    hashes, weights, now = hashes[order], weights[order], holders[order]
    if not (now >= 0).any():
        now = Crowd(hashes, weights, now, ring, worker_count, bound).placed_anew()
    for _ in range(ROUNDS_MAX):
        crowd = Crowd(hashes, weights, now, ring, worker_count, bound)
        before, now = now, crowd.rebalanced()
        if crowd.outside(now) == 0 or np.array_equal(before, now):
            break
    result = np.empty_like(holders)
    result[order] = now
    return result


class Crowd:
    """Partitions, heaviest first, and the loads of workers while they are being given out."""

    def __init__(
        self, hashes: Hashes, weights: Weights, holders: Indexes, ring: Ring, worker_count: int, bound: float
    ) -> None:
        self.hashes, self.weights, self.holders, self.ring, self.worker_count = (
            hashes, weights, holders, ring, worker_count,
        )  # fmt: skip
        self.bounds = bounds_of(weights, worker_count, bound)
        self.result: Indexes = np.full(len(weights), -1, dtype=np.int64)
        self.loads: Weights = np.zeros(worker_count)
        self.open: Flags = np.ones(worker_count, dtype=np.bool_)  # False: has a giant, and takes nothing else

    # -- whole plans -----------------------------------------------------------------------------------------------

    def placed_anew(self) -> Indexes:
        """Nobody holds anything: the consistent hash with bounded load."""
        self._place_giants()
        self._walk(self._pending(), self._limits(self.open))
        self._to_the_least_loaded(self._pending())
        return self.result

    def rebalanced(self) -> Indexes:
        self._place_giants()
        pending = self._pending()
        held = self.holders[pending]
        stays = (held >= 0) & self.open[held]
        around, kept = pending[~stays], pending[stays]
        self._give(kept, self.holders[kept])
        hungry = self.open & (self.loads < self.bounds.low / TOLERANCE)
        wanted = np.where(self.loads > 0, self.bounds.low, self.bounds.share)
        missing = float((wanted - self.loads)[hungry].sum() - self.weights[around].sum())
        shed = self._shed(kept, self._level(missing, self.loads[self.open & ~hungry]))
        for candidates in (around, shed):
            self._walk(candidates, self._limits(hungry), wanted)
        back = shed[self.result[shed] < 0]
        high = self._limits(self.open)
        self._offer(back, self.holders[back], high, high)
        self._walk(self._pending(), high)
        self._to_the_least_loaded(self._pending())
        self._feed_the_empty()
        return self.result if self._is_better() else self.holders

    # -- steps -----------------------------------------------------------------------------------------------------

    def _place_giants(self) -> None:
        giants = self.bounds.giants
        held = self.holders[giants]
        # Of two that one worker holds the heavier stays.
        first = np.zeros(len(giants), dtype=np.bool_)
        first[np.unique(held, return_index=True)[1]] = True
        stays = first & (held >= 0)
        self._give_giants(giants[stays], held[stays])
        is_held = self.holders >= 0
        idle = np.bincount(self.holders[is_held], minlength=self.worker_count) == 0
        # A worker that has nothing loses nothing by it.
        for candidates in (idle, np.ones(self.worker_count, dtype=np.bool_)):
            while len(left := giants[self.result[giants] < 0]) and (candidates & self.open).any():
                wanted, _ = self.ring.first_open(self.hashes[left], candidates & self.open)
                _, at = np.unique(wanted, return_index=True)
                self._give_giants(left[at], wanted[at])

    def _give_giants(self, items: Indexes, workers: Indexes) -> None:
        self._give(items, workers)
        self.open[workers] = False

    def _level(self, missing: float, loads: Weights) -> float:
        """The load down to which the fullest are cut, so that together they give what is missing."""
        fullest = np.sort(loads)[::-1]
        if missing <= 0 or not len(fullest):
            return np.inf
        counts = np.arange(1, len(fullest) + 1)
        levels = (np.cumsum(fullest) - missing) / counts
        # With one more worker taking part the level would be above that worker's load.
        enough = levels >= np.append(fullest[1:], -np.inf)
        return float(levels[np.argmax(enough)])

    def _shed(self, kept: Indexes, level: float) -> Indexes:
        """Take from those above the bound or the level, first what is not at home on the ring."""
        limit = min(level, self.bounds.high) * TOLERANCE
        over = self.loads > limit
        kept = kept[over[self.result[kept]]]
        if not len(kept):
            return kept
        workers, hashes = self.result[kept], self.hashes[kept]
        away = self.ring.first_open(hashes, self.open)[0] != workers
        # What is heavier than what must go would take too much along, so it goes last, and of that the lightest first.
        heavy = self.weights[kept] > (self.loads[workers] - limit) + self.weights[-1]
        order = np.lexsort((np.where(heavy, kept.astype(np.uint64), hashes), away & ~heavy, ~heavy, workers))
        kept, workers, sums = kept[order], workers[order], sums_within(workers[order], self.weights[kept[order]])
        # Each gives up to one partition too much: what the hungry do not take goes back.
        # But whoever has little else keeps its largest one, or it would itself go hungry.
        most = self.weights[kept] > self.loads[workers] / 2
        shed = np.sort(kept[(sums > limit) & ~(most & (sums <= self.bounds.high * TOLERANCE))])
        np.subtract.at(self.loads, self.result[shed], self.weights[shed])
        self.result[shed] = -1
        return shed

    def _walk(self, items: Indexes, limits: Weights, wanted: Weights | None = None) -> None:
        """Each to the first worker clockwise that has room for it; all take a step at a time."""
        wanted = limits if wanted is None else wanted
        cursors = self.hashes[items]
        idle = 0
        while len(items) and idle < IDLE_STEPS_MAX:
            # The last one is the lightest: who has no room for it has none for any.
            lightest = self.weights[items[-1]]
            is_open = has_room(self.loads + lightest, lightest, limits, wanted)
            if not is_open.any():
                return
            workers, points = self.ring.first_open(cursors, is_open)
            refused = self._offer(items, workers, limits, wanted)
            idle = idle + 1 if refused.all() else 0
            items, cursors = items[refused], points[refused] + np.uint64(1)

    def _offer(self, items: Indexes, workers: Indexes, limits: Weights, wanted: Weights) -> Flags:
        """Give each to its worker while there is room; says which were refused."""
        order = np.argsort(workers, kind="stable")
        at, weights = workers[order], self.weights[items[order]]
        # One that would not fit alone must not stand in the way of those that come after it.
        alone = has_room(self.loads[at] + weights, weights, limits[at], wanted[at])
        order, at, weights = order[alone], at[alone], weights[alone]
        together = self.loads[at] + sums_within(at, weights)
        taken = order[has_room(together, weights, limits[at], wanted[at])]
        self._give(items[taken], workers[taken])
        refused = np.ones(len(items), dtype=np.bool_)
        refused[taken] = False
        return refused

    def _to_the_least_loaded(self, items: Indexes) -> None:
        """Nobody has room within the bound: the lightest load takes it, unless its holder's is not much above that."""
        heap = [(float(self.loads[worker]), int(worker)) for worker in np.flatnonzero(self.open)]
        heapq.heapify(heap)
        slack = self.bounds.high - self.bounds.share
        for item in items:
            holder = self.holders[item]
            while heap[0][0] < self.loads[heap[0][1]]:  # a holder's load has grown aside from the heap
                heapq.heapreplace(heap, (float(self.loads[heap[0][1]]), heap[0][1]))
            least, worker = heap[0]
            if holder >= 0 and self.open[holder] and self.loads[holder] <= least + slack:
                worker = int(holder)
            self.result[item] = worker
            self.loads[worker] += self.weights[item]

    def _feed_the_empty(self) -> None:
        """Where there are as many partitions as workers nobody goes without, however the weights fall."""
        counts = np.bincount(self.result, minlength=self.worker_count)
        for worker in np.flatnonzero(counts == 0):
            donors = np.flatnonzero(counts > 1)
            if not len(donors):
                return
            donor = donors[np.argmax(self.loads[donors])]
            item = np.flatnonzero(self.result == donor)[-1]
            self.loads[donor] -= self.weights[item]
            self.loads[worker] += self.weights[item]
            self.result[item] = worker
            counts[donor], counts[worker] = counts[donor] - 1, 1

    # -- what the steps rest on ------------------------------------------------------------------------------------

    def _give(self, items: Indexes, workers: Indexes) -> None:
        self.result[items] = workers
        self.loads += np.bincount(workers, self.weights[items], self.worker_count)

    def _pending(self) -> Indexes:
        return np.flatnonzero(self.result < 0)

    def _limits(self, who: Flags) -> Weights:
        return np.where(who, self.bounds.high, -1.0)

    def _is_better(self) -> bool:
        """If everything has a holder, it moves only where that brings loads into their bounds, or feeds the empty."""
        if (self.holders < 0).any():
            return True
        counts = np.bincount(self.holders, minlength=self.worker_count)
        if (counts == 0).any() and (counts > 1).any():
            return True
        return self.outside(self.result) < self.outside(self.holders) / TOLERANCE

    def outside(self, holders: Indexes) -> float:
        """How far loads are out of bounds, all together. A giant's worker should have the giant, and no more."""
        loads = np.bincount(holders, self.weights, self.worker_count)
        limits = np.full(self.worker_count, self.bounds.high)
        np.maximum.at(limits, holders[self.bounds.giants], self.weights[self.bounds.giants])
        return float(np.maximum(loads - limits, 0).sum() + np.maximum(self.bounds.low - loads, 0).sum())


def has_room(loads: Weights, last: Weights | float, limits: Weights, wanted: Weights) -> Flags:
    """Whether loads are within their limits, and at most half of what came last stands out over what is wanted."""
    return (loads <= limits * TOLERANCE) & (loads - last / 2 <= wanted * TOLERANCE)


def sums_within(groups: Indexes, weights: Weights) -> Weights:
    """Running sums that begin anew with each group; equal groups stand together."""
    sums = np.cumsum(weights)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    before = np.repeat(sums[starts] - weights[starts], np.diff(np.append(starts, len(groups))))
    result: Weights = sums - before
    return result
