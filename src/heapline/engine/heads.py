"""The spine of a topic whose partitions are all in this process: the head of each, and from them the best of all.

Here a publication is a memory write: what changed a partition marks it, and its head is read again before the next
selection. So every head is true whenever one is looked at, and the order over all partitions is exact; the bound in
force is 1 whatever `k` allows. (core/spine.py is the protocol for partitions that are reached by calls.)

A selection must not look at all of every partition. Two observations keep it small. If `want` heads are no worse than
T, then so are the `want` best messages: partitions whose head is worse than T are not looked at. And of the others only
about as many rows are looked at as each is likely to give; a partition that gives all of them is looked into deeper.

The *limit* of a partition's lease is the best message that any other partition kept: nothing leased is worse than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import EMPTY, I64
from heapline.core.heap import Rows
from heapline.core.partition import Partition

NOTHING = (1 << 63) - 1  # the key of a partition that has nothing to give; a message may have it, so `_full` decides
DEPTH_MIN = 8


class Selection(NamedTuple):
    """Messages in the order in which they are handed out, and where each lies."""

    owners: list[int]  # numbers of the partitions that give, in no order
    rows: list[Rows]  # what was looked at of each, in its own order: a lease takes the first so many
    owner: npt.NDArray[np.intp]  # of each message: whose it is, as an index of `owners`
    ids: I64
    positions: I64


class Heads:
    def __init__(self, partitions: list[Partition], changed: set[int]) -> None:
        """`changed` is filled by those who change partitions, and emptied here."""
        self._partitions = partitions
        self._changed = changed
        self._keys = np.empty(0, dtype=np.int64)
        self._ids = np.empty(0, dtype=np.int64)
        self._full = np.empty(0, dtype=np.bool_)  # it has something to give
        self.updates: list[int] = []  # of each partition: how often its head was read
        self.taken: list[int] = []  # of each partition: messages that were leased from it
        self.selections = 0
        self.refusals = 0
        self.fit()

    def fit(self) -> None:
        """Take in partitions that were added, and look at all again."""
        count = len(self._partitions)
        self._keys = np.full(count, NOTHING, dtype=np.int64)
        self._ids = np.zeros(count, dtype=np.int64)
        self._full = np.zeros(count, dtype=np.bool_)
        self.updates += [0] * (count - len(self.updates))
        self.taken += [0] * (count - len(self.taken))
        self._changed.update(range(count))

    def refresh(self) -> None:
        """Read again the heads of partitions that changed."""
        if len(self._keys) != len(self._partitions):
            self.fit()
        for number in self._changed:
            partition = self._partitions[number]
            head = partition.head() if partition.ready and partition.throttled is None else None
            self._full[number] = head is not None
            self._keys[number], self._ids[number] = (NOTHING, 0) if head is None else head
            self.updates[number] += 1
        self._changed.clear()

    @property
    def candidates(self) -> int:
        return int(self._full.sum())

    def numbers(self) -> list[int]:
        """Partitions that have something to give."""
        numbers: list[int] = np.flatnonzero(self._full).tolist()
        return numbers

    # -- the best --------------------------------------------------------------------------------------------------

    def best(self, want: int) -> Selection:
        """The `want` best messages of all, best first; fewer if there are fewer."""
        self.selections += 1
        owners = self._owners(want)
        if not owners:
            self.refusals += any(p.ready for p in self._partitions)
        if len(owners) == 1:
            rows = self._partitions[owners[0]].eligible(want)
            return Selection(owners, [rows], np.zeros(len(rows.ids), dtype=np.intp), rows.ids, rows.positions)
        depth = min(want, 2 * want // len(owners) + DEPTH_MIN) if owners else 0
        found = [self._partitions[number].eligible(depth) for number in owners]
        depths = [depth] * len(owners)
        while True:
            owner, order, ids, positions = _merge(found, want)
            given = np.bincount(owner, minlength=len(owners)).tolist()
            short = [i for i, count in enumerate(given) if count == depths[i] < want]
            if not short:
                return Selection(owners, found, owner, ids[order], positions[order])
            for i in short:
                depths[i] = min(want, 4 * depths[i])
                found[i] = self._partitions[owners[i]].eligible(depths[i])

    def _owners(self, want: int) -> list[int]:
        """Partitions that may hold any of the `want` best."""
        full = np.flatnonzero(self._full)
        if len(full) > want:
            keys = self._keys[full]
            bound = keys.min() if want == 1 else np.partition(keys, want - 1)[want - 1]
            full = full[keys <= bound]
        numbers: list[int] = full.tolist()
        if want == 1 and len(numbers) > 1:  # several with one key: the id decides
            return [min(numbers, key=self._ids.item)]
        return numbers

    # -- limits ----------------------------------------------------------------------------------------------------

    def limits(self, selection: Selection, given: Sequence[int]) -> list[int | None]:
        """For each owner: the key of the best message that the others keep once each has given so many."""
        first: list[tuple[int, int]] = []  # (key of what it keeps, owner)
        for i, (number, rows, count) in enumerate(zip(selection.owners, selection.rows, given, strict=True)):
            if count < len(rows.ids):
                first.append((rows.keys.item(count), i))
            elif len(self._partitions[number].heap) > count:
                after = self._partitions[number].eligible(count + 1)
                if count < len(after.ids):
                    first.append((after.keys.item(count), i))
        rest = self._full.copy()
        rest[selection.owners] = False
        if rest.any():
            first.append((int(self._keys[rest].min()), -1))
        first.sort()
        limits: list[int | None] = []
        for i in range(len(selection.owners)):
            limits.append(next((key for key, owner in first if owner != i), None))
        return limits


def _merge(found: list[Rows], want: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], I64, I64]:
    """(owner of each of the best, their order, all ids, all positions)"""
    if not found:
        nothing = np.zeros(0, dtype=np.intp)
        return nothing, nothing, EMPTY, EMPTY
    keys, ids, positions = (np.concatenate(columns) for columns in zip(*found, strict=True))
    owner = np.repeat(np.arange(len(found)), [len(rows.ids) for rows in found])
    order = np.lexsort((ids, keys))[:want]
    return owner[order], order, ids, positions
