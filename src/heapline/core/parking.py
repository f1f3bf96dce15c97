"""Where messages of blocked keys wait, so that nobody meets them again and again in the heap: one small heap a key.

A key is blocked while it has as many leases as it may. Whoever looks for the best messages takes those of blocked keys
off the partition's heap and parks them here; when a lease of the key ends, its best come back. Parked messages
count as ready. What is parked follows from everything else: it is no event, and it is never needed for a right answer
that a message *is* parked, only that it is *not*: with f free slots, the heap must hold the key's f best entries or
all of them (core/entries.py keeps that true).

This file does not know which entries are stale, nor when a key is blocked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from heapline.core.heap import RunHeap
from heapline.core.runs import EMPTY, Column, Rows, Run


class Parking:
    """The parked entries of one partition."""

    def __init__(self) -> None:
        self.by_key: dict[int, RunHeap] = {}  # by the hash of the fairness key
        self.rows = 0

    def park(self, rows: Rows, hashes: Column) -> list[int]:
        """Take these entries in; returns the keys that had none here before."""
        new: list[int] = []
        order = np.argsort(hashes, kind="stable")
        keys, starts = np.unique(hashes[order], return_index=True)
        for key, part in zip(keys.tolist(), np.split(order, starts[1:]), strict=True):
            heap = self.by_key.get(key)
            if heap is None:
                heap = self.by_key[key] = RunHeap()
                new.append(key)
            heap.push(rows.keys[part], rows.ids[part], rows.positions[part])
            heap.maintain(4 * len(part))
        self.rows += len(rows.ids)
        return new

    def take(self, key: int, count: int) -> Rows:
        """The first entries of a key, at most so many."""
        heap = self.by_key.get(key)
        if heap is None:
            return EMPTY
        rows = heap.pop(count)
        self.rows -= len(rows.ids)
        if not len(heap):
            del self.by_key[key]
        return rows

    def clear(self) -> tuple[list[Rows], list[int]]:
        """Empty the place; what was left in sorted pieces, and the keys of it."""
        keys = list(self.by_key)
        left = [piece for heap in self.by_key.values() for piece in heap.clear()]
        self.by_key.clear()
        self.rows = 0
        return left, keys

    def find(self, key: int, id: int) -> tuple[int, int, int] | None:
        heap = self.by_key.get(key)
        return None if heap is None else heap.find(id)

    def runs(self, keys: Iterable[int] | None = None) -> Iterator[Run]:
        """The entries of these keys, or all, as immutable runs. Serials are unique only within a key."""
        for key in self.by_key if keys is None else keys:
            heap = self.by_key.get(key)
            if heap is not None:
                yield from heap.runs()

    def replace_positions(self, hashes: Column, ids: Column, positions: Column, keep: int) -> None:
        """As RunHeap does; `ids` ascend and `hashes` are their keys."""
        for key in np.unique(hashes).tolist():
            heap = self.by_key.get(key)
            if heap is not None:
                mine = hashes == key
                heap.replace_positions(ids[mine], positions[mine], keep)

    @property
    def nbytes(self) -> int:
        return sum(heap.nbytes for heap in self.by_key.values())
