"""Statistics of one partition: depth by priority, delayed messages by due time, and the oldest waiting message.

No index is maintained for them. Runs of the heap are sorted by key and chunks of the wheels by due time. So complete
runs and chunks are counted by their ends, and only one that crosses a bound is searched. The oldest id of a run is
computed once, because runs never change, and remembered for each of its blocks. So the cost depends on the number of
runs and chunks, which is small, not on messages.

Stale entries (of cancelled or expired messages, until they are swept) cannot be distinguished from valid ones without
checking each. So counts are scaled down to the known number of messages. Without stale entries every count is exact.
This module does not know the topic or how the statistics are shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from heapline.core.entries import Entries
from heapline.core.events import I64
from heapline.core.heap.run_heap import Run
from heapline.core.now import Now

#: Rows of a run that share one remembered oldest id: a block counts until its last row is removed.
BLOCK_ROWS = 4096
#: What makes a number of messages due in one span a herd.
HERD_MIN, HERD_FACTOR = 100, 10

_SERIES = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]  # 1, 2, 5, 10, … 5·10^18
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
#: The lowest priority of each bucket: 1, 2–4, 5–9, 10–19, … on both sides of 0.
PRIORITY_LOWS: list[int] = [_LOWEST, *(1 - s for s in reversed(_SERIES[1:])), 0, *_SERIES]
PRIORITY_HIGHS: list[int] = [*(low - 1 for low in PRIORITY_LOWS[1:]), _HIGHEST]
#: Bounds of the due-time buckets, seconds from now; the last bucket holds everything later.
DUE_WITHIN = (0, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)


class Census:
    """Statistics of one partition. The object lives as long as the partition because it caches facts about runs."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._oldest: dict[int, I64] = {}  # serial of a run -> for each block, the oldest id from that block on

    def depths(self, cuts: I64) -> I64:
        """Return how many ready messages have keys below the first cut, from it to below the second, and so on."""
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

    def dues(self, now: Now, spans: Sequence[int] = DUE_WITHIN) -> I64:
        """Return how many delayed messages are due within each of these seconds, which ascend, and how many later.
        Each counts once."""
        entries, counts = self._entries, [0] * (len(spans) + 1)
        for wheel, time in ((entries.delays, now.steady), (entries.calendar, now.wall)):
            if len(wheel):
                more = wheel.count_until([time + within * 1000 for within in spans])
                counts = [a + b for a, b in zip(counts, more, strict=True)]
        return scaled(counts, entries.delayed)

    def oldest_ready(self) -> int | None:
        """Return the oldest ready id, or None if none is ready.

        It is exact to the block: the id may belong to a message recently removed from the same block.
        """
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
        for run in self._entries.parked.runs():  # these change, so they are read every time
            oldest = min(oldest, int(run.ids[run.start :].min()))
        return oldest


def herds(counts: Sequence[int]) -> list[bool]:
    """Return which of these counts stand out: at least HERD_MIN, and HERD_FACTOR times the mean of the others."""
    total = sum(counts)
    return [count >= HERD_MIN and count * (len(counts) - 1) >= HERD_FACTOR * (total - count) for count in counts]


def _oldest_by_block(run: Run) -> I64:
    lowest = np.minimum.reduceat(run.ids, np.arange(0, len(run.ids), BLOCK_ROWS))
    behind: I64 = np.minimum.accumulate(lowest[::-1])[::-1]
    return behind


def scaled(counts: Sequence[int], total: int) -> I64:
    """Scale counts in proportion so that their sum is `total`."""
    known = sum(counts)
    if known == total or not known:
        return np.array(counts, dtype=np.int64)
    ends = [total * upto // known for upto in accumulate(counts)]
    return np.array([end - start for start, end in pairwise([0, *ends])], dtype=np.int64)
