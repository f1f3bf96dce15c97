"""Count the outstanding stream rows of a member, by batch as long as complete batches are settled.

Small fetches are kept in sets. A large batch is kept as its column, with a mask once part of it was settled. A row that
is redelivered while it is still counted here, because it timed out, may count twice in columns until the first delivery
is forgotten. This only makes a subscription request less. Used by one event loop.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
FEW = 64


class _Many:
    __slots__ = ("first", "last", "left", "offsets", "out", "until")

    def __init__(self, offsets: I64, until: float) -> None:
        self.offsets, self.until = offsets, until
        self.first, self.last = int(offsets[0]), int(offsets[-1])
        self.left = len(offsets)
        self.out: npt.NDArray[np.bool_] | None = None

    def end(self, offsets: I64) -> int:
        """Remove these rows and return how many of them were outstanding."""
        before = self.left
        if np.array_equal(offsets, self.offsets):
            self.left = 0
            return before
        at = np.searchsorted(self.offsets, offsets)
        np.minimum(at, len(self.offsets) - 1, out=at)
        if self.out is None:
            self.out = np.ones(len(self.offsets), dtype=np.bool_)
        self.out[at[self.offsets[at] == offsets]] = False
        self.left = int(np.count_nonzero(self.out))
        return before - self.left


class RowsOut:
    def __init__(self) -> None:
        self.rows = 0
        self._few: dict[int, set[int]] = {}
        self._few_ends: deque[tuple[float, int, list[int]]] = deque()
        self._many: dict[int, list[_Many]] = {}

    def add(self, partition: int, offsets: I64, until: float) -> None:
        """Add rows that the member holds until `until`. Redelivered rows are in the order in which they became due."""
        if len(offsets) >= FEW:
            if not (offsets[1:] > offsets[:-1]).all():
                offsets = np.sort(offsets)
            self._many.setdefault(partition, []).append(_Many(offsets, until))
            self.rows += len(offsets)
            return
        some, few = offsets.tolist(), self._few.setdefault(partition, set())
        before = len(few)
        few.update(some)
        self.rows += len(few) - before
        self._few_ends.append((until, partition, some))

    def end(self, partition: int, offsets: I64) -> None:
        """Remove rows that were settled or lost."""
        if not len(offsets):
            return
        if self._many.get(partition):
            if not (offsets[1:] >= offsets[:-1]).all():
                offsets = np.sort(offsets)
            for many in self._many[partition]:
                low, high = np.searchsorted(offsets, (many.first, many.last + 1))
                if low < high:
                    self.rows -= many.end(offsets[low:high])
            self._many[partition] = [many for many in self._many[partition] if many.left]
        if self._few.get(partition):
            self._drop(partition, offsets.tolist())
            while self._few_ends and self._few[self._few_ends[0][1]].isdisjoint(self._few_ends[0][2]):
                self._few_ends.popleft()

    def _drop(self, partition: int, offsets: list[int]) -> None:
        few = self._few[partition]
        before = len(few)
        few.difference_update(offsets)
        self.rows -= before - len(few)

    def forget(self, now: float) -> None:
        """Forget the rows that timed out; they will be redelivered."""
        while self._few_ends and self._few_ends[0][0] <= now:
            _, partition, offsets = self._few_ends.popleft()
            self._drop(partition, offsets)
        for partition, kept in self._many.items():
            self.rows -= sum(many.left for many in kept if many.until <= now)
            self._many[partition] = [many for many in kept if many.until > now]
