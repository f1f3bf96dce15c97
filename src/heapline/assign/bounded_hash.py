"""A consistent hash with bounded load and few moves: the arithmetic behind `WeightedConsistentHashStrategy`.

All data is in columns: partitions and workers are numbers; a partition has a hash, a weight, and a holder or -1.

Theory of operation. A worker's *share* is the load that each worker would carry if weight could be split anywhere.
Loads should be between (2 − bound) × share and bound × share. A *giant* is a partition that exceeds the upper bound
alone. It gets a worker of its own, and the share of the other workers is computed from the remaining weight, so one
giant does not make the other bounds meaningless. A worker below the lower bound is *underloaded*: it is filled up to
that bound, or up to the share if it carries nothing.

1. Held partitions stay, except for those that are *shed*: by workers above the bound, and, if partitions without a
   holder do not suffice for the underloaded workers, by the fullest workers, all cut to one level.
2. Underloaded workers get the partitions without a holder, then the shed ones; each goes to the first such worker
   clockwise.
3. Shed partitions that no underloaded worker took return to their worker if it has room.
4. The rest goes to the first worker clockwise that has room, or else to the least loaded one.

So a join moves about one share, all of it to the new worker, and a leave moves only the leaver's partitions. If nothing
is held, step 4 alone is a consistent hash with bounded load; then the same steps fill the workers that got little.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float64]

#: Tolerance for sums of floats that may reach a limit exactly.
TOLERANCE = 1 + 1e-9
#: Total weight of all zero-weight partitions relative to the others.
ZEROS_SHARE = 0.001
#: Partitions not placed after this many steps are too heavy for the remaining workers.
IDLE_STEPS_MAX = 4
#: Few, heavy partitions may take several rounds; each round improves on the last, and most cases need only one.
ROUNDS_MAX = 5


def assign_holders(
    hashes: Hashes, weights: Weights, holders: Indexes, ring: Ring, worker_count: int, bound: float
) -> Indexes:
    """Return the new holder of each partition."""
    weights, bound = without_zeros(weights), bound / (1 + ZEROS_SHARE)
    # Everything below works on partitions in this order: heaviest first, then by hash. This makes the result
    # independent of the input order, and lets light partitions fill the gaps that heavy ones leave.
    order = np.lexsort((hashes, -weights))
    hashes, weights, now = hashes[order], weights[order], holders[order]
    if not (now >= 0).any():
        now = Placement(hashes, weights, now, ring, worker_count, bound).place_all()
    for _ in range(ROUNDS_MAX):
        placement = Placement(hashes, weights, now, ring, worker_count, bound)
        before, now = now, placement.rebalance()
        if placement.outside(now) == 0 or np.array_equal(before, now):
            break
    result = np.empty_like(holders)
    result[order] = now
    return result


class Placement:
    """Partitions, heaviest first, and the workers' loads while partitions are placed."""

    def __init__(
        self, hashes: Hashes, weights: Weights, holders: Indexes, ring: Ring, worker_count: int, bound: float
    ) -> None:
        self.hashes, self.weights, self.holders = hashes, weights, holders
        self.ring, self.worker_count = ring, worker_count
        self.bounds = bounds_of(weights, worker_count, bound)
        self.result: Indexes = np.full(len(weights), -1, dtype=np.int64)
        self.loads: Weights = np.zeros(worker_count)
        self.open: Flags = np.ones(worker_count, dtype=np.bool_)  # False = holds a giant and takes nothing else

    # -- complete plans ------------------------------------------------------------------------------------------------

    def place_all(self) -> Indexes:
        """Place all partitions when none is held: a consistent hash with bounded load."""
        self._place_giants()
        self._walk(self._pending(), self._limits(self.open))
        self._give_to_least_loaded(self._pending())
        return self.result

    def rebalance(self) -> Indexes:
        """Return new holders that move as little as the bounds allow."""
        self._place_giants()
        pending = self._pending()
        held = self.holders[pending]
        stays = (held >= 0) & self.open[held]
        unheld, kept = pending[~stays], pending[stays]
        self._give(kept, self.holders[kept])
        underloaded = self.open & (self.loads < self.bounds.low / TOLERANCE)
        wanted = np.where(self.loads > 0, self.bounds.low, self.bounds.share)
        missing = float((wanted - self.loads)[underloaded].sum() - self.weights[unheld].sum())
        shed = self._shed(kept, self._level(missing, self.loads[self.open & ~underloaded]))
        for candidates in (unheld, shed):
            self._walk(candidates, self._limits(underloaded), wanted)
        back = shed[self.result[shed] < 0]
        high = self._limits(self.open)
        self._offer(back, self.holders[back], high, high)
        self._walk(self._pending(), high)
        self._give_to_least_loaded(self._pending())
        self._fill_empty_workers()
        return self.result if self._is_better() else self.holders

    # -- steps -----------------------------------------------------------------------------------------------------

    def _place_giants(self) -> None:
        giants = self.bounds.giants
        held = self.holders[giants]
        # If one worker holds two giants, the heavier stays.
        first = np.zeros(len(giants), dtype=np.bool_)
        first[np.unique(held, return_index=True)[1]] = True
        stays = first & (held >= 0)
        self._give_giants(giants[stays], held[stays])
        is_held = self.holders >= 0
        idle = np.bincount(self.holders[is_held], minlength=self.worker_count) == 0
        # Prefer workers that hold nothing: they have nothing to give up.
        for candidates in (idle, np.ones(self.worker_count, dtype=np.bool_)):
            while len(left := giants[self.result[giants] < 0]) and (candidates & self.open).any():
                wanted, _ = self.ring.first_open(self.hashes[left], candidates & self.open)
                _, at = np.unique(wanted, return_index=True)
                self._give_giants(left[at], wanted[at])

    def _give_giants(self, items: Indexes, workers: Indexes) -> None:
        self._give(items, workers)
        self.open[workers] = False

    def _level(self, missing: float, loads: Weights) -> float:
        """Return the load to which the fullest workers are cut so that together they release `missing`."""
        fullest = np.sort(loads)[::-1]
        if missing <= 0 or not len(fullest):
            return np.inf
        counts = np.arange(1, len(fullest) + 1)
        levels = (np.cumsum(fullest) - missing) / counts
        # With one more worker included, the level would be above that worker's load.
        enough = levels >= np.append(fullest[1:], -np.inf)
        return float(levels[np.argmax(enough)])

    def _shed(self, kept: Indexes, level: float) -> Indexes:
        """Take partitions from workers above the bound or the level.

        Those away from their place on the ring go first.
        """
        limit = min(level, self.bounds.high) * TOLERANCE
        over = self.loads > limit
        kept = kept[over[self.result[kept]]]
        if not len(kept):
            return kept
        workers, hashes = self.result[kept], self.hashes[kept]
        away = self.ring.first_open(hashes, self.open)[0] != workers
        # A partition heavier than the excess would take too much along, so it goes last, lightest first.
        heavy = self.weights[kept] > (self.loads[workers] - limit) + self.weights[-1]
        order = np.lexsort((np.where(heavy, kept.astype(np.uint64), hashes), away & ~heavy, ~heavy, workers))
        kept, workers, sums = kept[order], workers[order], sums_within(workers[order], self.weights[kept[order]])
        # Each worker sheds up to one partition too much; what the underloaded workers do not take returns. A worker
        # that holds little else keeps its largest partition, or it would become underloaded itself.
        most = self.weights[kept] > self.loads[workers] / 2
        shed = np.sort(kept[(sums > limit) & ~(most & (sums <= self.bounds.high * TOLERANCE))])
        np.subtract.at(self.loads, self.result[shed], self.weights[shed])
        self.result[shed] = -1
        return shed

    def _walk(self, items: Indexes, limits: Weights, wanted: Weights | None = None) -> None:
        """Offer each partition to the first worker clockwise that has room; all advance one step at a time."""
        wanted = limits if wanted is None else wanted
        cursors = self.hashes[items]
        idle = 0
        while len(items) and idle < IDLE_STEPS_MAX:
            # The last one is the lightest: a worker without room for it has room for none.
            lightest = self.weights[items[-1]]
            is_open = has_room(self.loads + lightest, lightest, limits, wanted)
            if not is_open.any():
                return
            workers, points = self.ring.first_open(cursors, is_open)
            refused = self._offer(items, workers, limits, wanted)
            idle = idle + 1 if refused.all() else 0
            items, cursors = items[refused], points[refused] + np.uint64(1)

    def _offer(self, items: Indexes, workers: Indexes, limits: Weights, wanted: Weights) -> Flags:
        """Give each partition to its worker while there is room. Return which were refused."""
        order = np.argsort(workers, kind="stable")
        at, weights = workers[order], self.weights[items[order]]
        # A partition that does not fit alone must not block those after it.
        alone = has_room(self.loads[at] + weights, weights, limits[at], wanted[at])
        order, at, weights = order[alone], at[alone], weights[alone]
        together = self.loads[at] + sums_within(at, weights)
        taken = order[has_room(together, weights, limits[at], wanted[at])]
        self._give(items[taken], workers[taken])
        refused = np.ones(len(items), dtype=np.bool_)
        refused[taken] = False
        return refused

    def _give_to_least_loaded(self, items: Indexes) -> None:
        """Place partitions for which no worker has room within the bound.

        The least loaded worker takes a partition, unless the load of its holder is not much higher.
        """
        heap = [(float(self.loads[worker]), int(worker)) for worker in np.flatnonzero(self.open)]
        heapq.heapify(heap)
        slack = self.bounds.high - self.bounds.share
        for item in items:
            holder = self.holders[item]
            while heap[0][0] < self.loads[heap[0][1]]:  # the load has grown since this heap entry was made
                heapq.heapreplace(heap, (float(self.loads[heap[0][1]]), heap[0][1]))
            least, worker = heap[0]
            if holder >= 0 and self.open[holder] and self.loads[holder] <= least + slack:
                worker = int(holder)
            self.result[item] = worker
            self.loads[worker] += self.weights[item]

    def _fill_empty_workers(self) -> None:
        """If there are enough partitions, leave no worker without one, whatever the weights."""
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

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _give(self, items: Indexes, workers: Indexes) -> None:
        self.result[items] = workers
        self.loads += np.bincount(workers, self.weights[items], self.worker_count)

    def _pending(self) -> Indexes:
        return np.flatnonzero(self.result < 0)

    def _limits(self, is_included: Flags) -> Weights:
        return np.where(is_included, self.bounds.high, -1.0)

    def _is_better(self) -> bool:
        """Return whether the result is worth its moves.

        It must assign unheld partitions, fill empty workers, or improve the bounds.
        """
        if (self.holders < 0).any():
            return True
        counts = np.bincount(self.holders, minlength=self.worker_count)
        if (counts == 0).any() and (counts > 1).any():
            return True
        return self.outside(self.result) < self.outside(self.holders) / TOLERANCE

    def outside(self, holders: Indexes) -> float:
        """Return the total load outside the bounds. A giant's worker should hold the giant and nothing else."""
        loads = np.bincount(holders, self.weights, self.worker_count)
        limits = np.full(self.worker_count, self.bounds.high)
        np.maximum.at(limits, holders[self.bounds.giants], self.weights[self.bounds.giants])
        return float(np.maximum(loads - limits, 0).sum() + np.maximum(self.bounds.low - loads, 0).sum())


def has_room(loads: Weights, last: Weights | float, limits: Weights, wanted: Weights) -> Flags:
    """Return whether loads are within limits and at most half of the last partition exceeds what is wanted."""
    return (loads <= limits * TOLERANCE) & (loads - last / 2 <= wanted * TOLERANCE)


def sums_within(groups: Indexes, weights: Weights) -> Weights:
    """Return running sums that restart with each group. Equal groups are adjacent."""
    sums = np.cumsum(weights)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    before = np.repeat(sums[starts] - weights[starts], np.diff(np.append(starts, len(groups))))
    result: Weights = sums - before
    return result


def hashes_of(names: Iterable[str]) -> Hashes:
    hash_of = xxhash.xxh3_64_intdigest
    return np.array([hash_of(name.encode()) for name in names], dtype=np.uint64)


class Ring:
    """A hash ring as two columns: the virtual nodes' positions and their owners.

    It finds the first open worker clockwise for many partitions at once. The caller says which workers are open.
    """

    def __init__(self, workers: Sequence[str], virtual_nodes: int) -> None:
        hash_of = xxhash.xxh3_64_intdigest
        # The number of a virtual node seeds its hash, so no string is built per node.
        numbers = range(1, virtual_nodes + 1)
        points = np.array([hash_of(name, n) for name in map(str.encode, workers) for n in numbers], dtype=np.uint64)
        order = np.argsort(points, kind="stable")
        self.points: Hashes = points[order]
        self.owners: Indexes = order // virtual_nodes

    def first_open(self, hashes: Hashes, is_open: Flags) -> tuple[Indexes, Hashes]:
        """Return the first open worker clockwise of each hash, and its position. At least one worker must be open."""
        points, owners = self.points, self.owners
        if not is_open.all():
            kept = is_open[owners]
            points, owners = points[kept], owners[kept]
        at = np.searchsorted(points, hashes)
        at[at == len(points)] = 0  # wrap around
        return owners[at], points[at]


@dataclass(slots=True)
class Bounds:
    """The load bounds for given weights and number of workers."""

    share: float
    low: float
    high: float
    giants: Indexes  # heaviest first


def bounds_of(weights: Weights, worker_count: int, bound: float) -> Bounds:
    """Compute the bounds. `weights` are sorted, heaviest first."""
    # Summed from the lightest, so that a giant does not swallow the small weights in rounding.
    left = np.cumsum(weights[::-1])[::-1]
    workers, giants = worker_count, 0
    while giants < len(weights) and workers > 1 and weights[giants] * workers > bound * left[giants] * TOLERANCE:
        workers, giants = workers - 1, giants + 1
    rest = weights[giants:]
    share = float(left[giants]) / workers if len(rest) else 0.0
    low, high = (2 - bound) * share, bound * share
    if len(rest) and rest[0] == rest[-1]:
        # Equal weights cannot be split, so the whole numbers next to the share are within the bounds.
        unit = float(rest[0])
        whole = share / unit
        low, high = min(low, floor(whole * TOLERANCE) * unit), max(high, ceil(whole / TOLERANCE) * unit)
    return Bounds(share, low, high, np.arange(giants))


def without_zeros(weights: Weights) -> Weights:
    """Give zero-weight partitions a tiny weight, so that they are spread evenly, too.

    Together they count a thousandth of the others.
    """
    zero = weights == 0
    if not zero.any():
        return weights
    if zero.all():
        return np.ones_like(weights)
    lightest, ratio = weights[~zero].min(), (len(zero) - zero.sum()) / zero.sum()
    return np.where(zero, lightest * min(1.0, ZEROS_SHARE * ratio), weights)
