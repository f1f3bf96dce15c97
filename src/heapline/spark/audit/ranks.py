"""The rank of every lease: 1 plus the number of messages that were certainly better and available at its selection.

A message that was ready for some time is an interval of positions in the topic's order, from the event that made it
ready to the event that ended this. A *position* is (unit, step), where step is the spine sequence if the event has one.
Otherwise the event happened somewhere in its unit, and the benefit of the doubt applies: a message becomes ready at the
unit's end and stops being ready at its beginning. Sequences increase with units, so positions are totally ordered.
Leases with the same sequence are one selection, even if they are in two units: none of its messages counts against
another.

*Counting.* Only messages that are ready at a selection matter, so an interval becomes a range of selections. First, the
best ready message of each selection is computed with a tree of minima over the selections: a range is about twenty
nodes, and numpy fills and queries it level by level. If that is not better than what was leased, the rank is 1, which
is the usual case. For the others a wavelet matrix counts: sorted by selection, messages that become ready count +1 and
those that stop count −1. A rank is the sum over all earlier entries with a better key, for all leases together, with
one pass per bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
BEGIN, END = -1, 1 << 62  # steps before and after everything in a unit
NEVER = 1 << 62  # a unit
FEW = 32  # up to this many leases are counted one by one


class Intervals(NamedTuple):
    """Columns of equal length."""

    key: I64  # smaller is better
    id: I64
    from_unit: I64
    from_step: I64
    to_unit: I64
    to_step: I64
    judged: I64  # 1: it ended in a lease whose rank is needed
    offset: I64  # of that lease

    def take(self, which: Any) -> Intervals:
        return Intervals(*(column[which] for column in self))


class Exclusion(NamedTuple):
    """Units, including the last, in which a partition may have been excluded from pops."""

    partition: int
    first: int
    last: int


def exclude(intervals: Intervals, partitions: I64, exclusions: list[Exclusion]) -> Intervals:
    """Return the intervals without these exclusions. Leases are judged as before."""
    for exclusion in exclusions:
        ends_within = (intervals.to_unit == exclusion.first) & (intervals.to_step > BEGIN)
        hit = (partitions == exclusion.partition) & (intervals.from_unit <= exclusion.last)
        hit &= (intervals.to_unit > exclusion.first) | ends_within
        if not hit.any():
            continue
        early = intervals.take(hit & (intervals.from_unit < exclusion.first))
        count = len(early.id)
        early = early._replace(
            to_unit=np.full(count, exclusion.first), to_step=np.full(count, BEGIN), judged=np.zeros(count, np.int64)
        )
        late_unit, late_step = intervals.from_unit.copy(), intervals.from_step.copy()
        late_unit[hit], late_step[hit] = exclusion.last, END
        late = intervals._replace(from_unit=late_unit, from_step=late_step)
        intervals = Intervals(*(np.concatenate(pair) for pair in zip(late, early, strict=True)))
        partitions = np.concatenate((partitions, np.full(count, exclusion.partition)))
    return intervals


def ranks(intervals: Intervals, older_is_better: bool) -> tuple[I64, I64]:
    """Return the indexes of the judged intervals and their ranks."""
    judged = np.flatnonzero(intervals.judged)
    if not len(judged):
        return judged, judged
    selections = _Selections(intervals.to_step[judged], intervals.to_unit[judged])
    first = selections.index(intervals.from_unit, intervals.from_step)
    last = selections.index(intervals.to_unit, intervals.to_step)
    counted = np.flatnonzero(first < last)
    key, limit = _ordinals(intervals.key, intervals.id if older_is_better else None, counted, judged)
    at = selections.index(intervals.to_unit[judged], intervals.to_step[judged])
    found = np.ones(len(judged), dtype=np.int64)
    first, last = first[counted], last[counted]
    doubtful = np.flatnonzero(minima(first, last, key, selections.count)[at] < limit)
    if len(doubtful):
        found[doubtful] += _better(first, last, key, at[doubtful], limit[doubtful])
    return judged, found


class _Selections:
    """The positions in a topic's order at which messages were leased."""

    def __init__(self, seqs: I64, units: I64) -> None:
        order = np.lexsort((units, seqs))
        self._seqs, where = np.unique(seqs[order], return_index=True)
        self._units = np.maximum.accumulate(units[order][where])
        self.count = len(self._seqs)

    def index(self, units: I64, steps: I64) -> I64:
        """Return how many selections are before a position. The selection of a lease is not before its own position."""
        by_unit = np.searchsorted(self._units, units, side="right")
        by_seq = np.searchsorted(self._seqs, steps, side="left")
        return np.where(steps == BEGIN, np.searchsorted(self._units, units), np.where(steps == END, by_unit, by_seq))


def minima(first: I64, last: I64, values: I64, count: int) -> I64:
    """Return, for each of `count` positions, the smallest value of the ranges [first, last) that contain it.

    A position that no range contains has a very large value.

    >>> minima(np.array([0, 1]), np.array([3, 2]), np.array([5, 2]), 4)[:3].tolist()
    [5, 2, 5]
    """
    size = 1 << max(count - 1, 1).bit_length()
    tree = np.full(2 * size, np.iinfo(np.int64).max)
    low, high = first + size, last + size
    while len(low):
        left, right = (low & 1) == 1, (high & 1) == 1
        np.minimum.at(tree, low[left], values[left])
        np.minimum.at(tree, high[right] - 1, values[right])
        low, high = (low + 1) >> 1, high >> 1
        going = low < high
        low, high, values = low[going], high[going], values[going]
    for start in (1 << level for level in range(1, size.bit_length())):
        below = tree[start : 2 * start]
        np.minimum(below, np.repeat(tree[start // 2 : start], 2), out=below)
    return tree[size : size + count]


def _better(first: I64, last: I64, key: I64, at: I64, limit: I64) -> I64:
    """Return how many ranges contain each position and have a smaller key than its limit."""
    if len(at) <= FEW:
        here = [(first <= place) & (place < last) & (key < most) for place, most in zip(at, limit, strict=True)]
        return np.array([np.count_nonzero(hits) for hits in here], dtype=np.int64)
    when = np.concatenate((first, last))
    order = np.argsort(when, kind="stable")
    weights = np.repeat(np.array([1, -1]), [len(first), len(last)])[order]
    places = np.searchsorted(when[order], at, side="right")
    return dominated(np.concatenate((key, key))[order], weights, places, limit)


def _ordinals(keys: I64, ids: I64 | None, points: I64, asked: I64) -> tuple[I64, I64]:
    """Return keys as small numbers in the same order. If ids are given, the older of two equal keys is better."""
    rows = np.concatenate((points, asked))
    order = np.lexsort((ids[rows], keys[rows])) if ids is not None else np.argsort(keys[rows], kind="stable")
    there = rows[order]
    new = np.diff(keys[there], prepend=keys[there[:1]]) != 0
    if ids is not None:
        new |= np.diff(ids[there], prepend=ids[there[:1]]) != 0
    numbers = np.empty(len(rows), dtype=np.int64)
    numbers[order] = np.cumsum(new)
    return numbers[: len(points)], numbers[len(points) :]


def dominated(values: I64, weights: I64, places: I64, limits: I64) -> I64:
    """Return, for each (place, limit), the sum of the weights of the values before that place and below the limit.

    >>> one = np.ones(4, dtype=np.int64)
    >>> dominated(np.array([3, 1, 2, 0]), one, np.array([2, 4, 4]), np.array([2, 2, 9])).tolist()
    [1, 2, 4]
    """
    total = np.zeros(len(places), dtype=np.int64)
    high = int(max(values.max(initial=0), limits.max(initial=0)))
    low_end, high_end = np.zeros(len(places), dtype=np.int64), places.astype(np.int64)
    for bit in range(high.bit_length() - 1, -1, -1):
        zero = (values >> bit) & 1 == 0
        count = np.concatenate(([0], np.cumsum(zero)))
        weight = np.concatenate(([0], np.cumsum(np.where(zero, weights, 0))))
        ones = (limits >> bit) & 1 == 1
        total += np.where(ones, weight[high_end] - weight[low_end], 0)
        zeros_total = count[-1]
        low_zero, high_zero = count[low_end], count[high_end]
        low_end = np.where(ones, zeros_total + low_end - low_zero, low_zero)
        high_end = np.where(ones, zeros_total + high_end - high_zero, high_zero)
        values = np.concatenate((values[zero], values[~zero]))
        weights = np.concatenate((weights[zero], weights[~zero]))
    return total
