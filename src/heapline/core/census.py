"""A census of one partition: how deep it is by priority, what falls due when, and how long the oldest has waited.

Nothing is kept up to date for it. Runs of the heap are sorted by key and chunks of the wheels by due time, so whole
runs and chunks are counted by their ends, and only where one crosses a bound is it searched. The oldest id of a run is
looked for once, since runs never change, and remembered for every block of it. So a census costs by runs and chunks,
of which there are few, not by messages.

Entries that are left over (of messages cancelled or expired, until they are swept) cannot be told from good ones
without looking at each: counts are scaled down to the number of messages that are known to be there. Without
left-over entries every count is exact. This file knows neither the topic nor how a census is shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from heapline.core.events import I64
from heapline.core.heap import Run
from heapline.model import Now

if TYPE_CHECKING:
    from heapline.core.entries import Entries

#: Rows of a run that share one remembered oldest id: a block counts until its last row has gone.
BLOCK_ROWS = 4096

_SERIES = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]  # 1, 2, 5, 10, … 5·10^18
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
#: The lowest priority of each bucket: 1, 2–4, 5–9, 10–19, … on both sides of 0.
PRIORITY_LOWS: list[int] = [_LOWEST, *(1 - s for s in reversed(_SERIES[1:])), 0, *_SERIES]
PRIORITY_HIGHS: list[int] = [*(low - 1 for low in PRIORITY_LOWS[1:]), _HIGHEST]
#: Bounds of the due-time buckets, seconds from now; the last bucket is all that is later.
DUE_WITHIN = (0, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)


class Census:
    """Takes the census of one partition; it lives as long as the partition, for what it remembers of runs."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._oldest: dict[int, I64] = {}  # serial of a run -> for each block, the oldest id from there on

    def depths(self, cuts: I64) -> I64:
        """How many ready messages have keys below the first cut, from it to below the second, and so on."""
        bounds, counts = cuts.tolist(), [0] * (len(cuts) + 1)
        for run in (*self._entries.heap.runs(), *self._entries.parked.runs()):
            keys, at = run.keys, run.start
            low, high = bisect_right(bounds, keys.item(at)), bisect_right(bounds, keys.item(-1))
            ends = keys.searchsorted(cuts[low:high]).tolist() if low < high else ()
            for bucket, end in enumerate(ends, low):
                counts[bucket] += end - at
                at = end
            counts[high] += len(keys) - at
        return scaled(counts, self._entries.ready)

    def dues(self, now: Now) -> I64:
        """How many delayed messages are due within each of DUE_WITHIN, and how many later. Each counts once."""
        entries, counts = self._entries, [0] * (len(DUE_WITHIN) + 1)
        for wheel, time in ((entries.delays, now.steady), (entries.calendar, now.wall)):
            if len(wheel):
                more = wheel.count_until([time + within * 1000 for within in DUE_WITHIN])
                counts = [a + b for a, b in zip(counts, more, strict=True)]
        return scaled(counts, entries.delayed)

    def oldest_ready(self) -> int | None:
        """The oldest id among the ready ones, or among those that went last: to the block. None if none is ready."""
        if not self._entries.ready:
            return None
        remembered, oldest = {}, _HIGHEST
        for run in self._entries.heap.runs():
            blocks = self._oldest.get(run.serial)
            if blocks is None:
                blocks = _oldest_by_block(run)
            remembered[run.serial] = blocks
            oldest = min(oldest, blocks.item(run.start // BLOCK_ROWS))
        self._oldest = remembered
        for run in self._entries.parked.runs():  # those change, and are gathered anew
            oldest = min(oldest, int(run.ids[run.start :].min()))
        return oldest


def _oldest_by_block(run: Run) -> I64:
    lowest = np.minimum.reduceat(run.ids, np.arange(0, len(run.ids), BLOCK_ROWS))
    behind: I64 = np.minimum.accumulate(lowest[::-1])[::-1]
    return behind


def scaled(counts: Sequence[int], total: int) -> I64:
    """Counts in the same proportion whose sum is `total`."""
    known = sum(counts)
    if known == total or not known:
        return np.array(counts, dtype=np.int64)
    ends = [total * upto // known for upto in accumulate(counts)]
    return np.array([end - start for start, end in pairwise([0, *ends])], dtype=np.int64)
