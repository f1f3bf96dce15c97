"""Which segments must stay because a row of the stream that some group has not passed has its record there.

The record of a message that came without delay lies beside its row, so whoever keeps the rows from an offset on keeps
it too. A message that fired was recorded long before, perhaps in a segment that is dead but for it: a worker may pop
and ack it before a slow group comes to its place. Such segments are pinned from firing until every group has passed;
so the position in a fired row can be read for as long as a group may come to it, moved or not in the meantime.

Kept per run of some thousand rows, not per row: a segment may stay a little longer than needed, never shorter.
Which groups there are and how far they have come is passed in.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
_RUN_ROWS = 4096


class SegmentPins:
    def __init__(self) -> None:
        self._runs: deque[tuple[int, Counter[int]]] = deque()  # last offset, rows by segment
        self._rows: Counter[int] = Counter()

    def add(self, offsets: I64, segments: I64) -> None:
        """Stream rows that were just recorded, and where their records lie if that is not beside them."""
        if not len(offsets):
            return
        found, counts = np.unique(segments, return_counts=True)
        rows = Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        self._rows += rows
        if self._runs and self._runs[-1][1].total() < _RUN_ROWS:
            rows += self._runs.pop()[1]
        self._runs.append((int(offsets[-1]), rows))

    def passed(self, below: int) -> None:
        """No group needs rows below this offset any more (the partition's end, if no group holds anything)."""
        while self._runs and self._runs[0][0] < below:
            self._rows -= self._runs.popleft()[1]

    def pinned(self, segment: int) -> bool:
        return segment in self._rows

    def to_state(self) -> list[Any]:
        return [(last, list(rows.items())) for last, rows in self._runs]

    @classmethod
    def from_state(cls, state: list[Any]) -> SegmentPins:
        pins = cls()
        for last, rows in state:
            pins._runs.append((last, Counter(dict(rows))))
            pins._rows += pins._runs[-1][1]
        return pins
