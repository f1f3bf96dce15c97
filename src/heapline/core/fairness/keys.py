"""Fairness keys of one partition's messages: the key of each message, and the messages of blocked keys.

`KeyHashes` keeps the ids of live messages and the hashes of their keys, sorted by id. Ids rise within a partition, so
appending keeps the columns sorted, and a lookup is one binary search per batch. A removed message is only marked. When
more than half are marked, the columns are rewritten without them. The cost is sixteen bytes per message and one for the
mark, whether it is ready, delayed, leased or dead. The columns up to the current length never change (growing and
compacting create new ones), so a snapshot may keep views. Hash 0 means "no fairness key".

`Parking` keeps the messages of blocked keys, one small heap per key, so that searches of the main heap skip them. A key
is blocked while it has as many leases as it may. A search for the best messages takes those of blocked keys off the
partition's heap and parks them here. When a lease of the key ends, its best messages return to the heap. Parked
messages count as ready. Parking is derived state, not an event. Correctness never requires that a message *is* parked,
only that it is *not*: with f free slots, the heap must hold the key's f best entries or all of them (fair_entries.py
ensures that).

Most blocked keys have few messages and many keys are blocked, so a few rows are a plain binary heap of tuples; a key
with many has a RunHeap. (1000 keys of 20 messages, one lease each: 4 times the pops per second of a RunHeap for every
key.) This module does not know what a key means, which entries are stale, or when a key is blocked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from heapline.core.events import I64
from heapline.core.heap.run_heap import RunHeap
from heapline.core.heap.runs import Column, Row, Rows, Run, rows_of, tuples_of

NO_KEY = 0
_ROWS_AT_FIRST = 256
_GONE_MIN = 1024  # with fewer removed messages, compacting is not worthwhile


def hash_of(key: bytes) -> int:
    """Return the hash of a fairness key: 64 bits as int64, never NO_KEY. It is stored, so it must never change."""
    digest = xxhash.xxh3_64_intdigest(key) or 1
    return digest - (1 << 64) if digest >> 63 else digest


def hashes_of(keys: Iterable[bytes | None], count: int) -> I64:
    return np.fromiter((NO_KEY if key is None else hash_of(key) for key in keys), np.int64, count)


class KeyHashes:
    """The fairness keys of one partition's live messages."""

    def __init__(self) -> None:
        self._ids = np.zeros(_ROWS_AT_FIRST, dtype=np.int64)
        self._hashes = np.zeros(_ROWS_AT_FIRST, dtype=np.int64)
        self._is_gone = np.zeros(_ROWS_AT_FIRST, dtype=np.bool_)
        self._count = 0
        self._gone = 0

    def __len__(self) -> int:
        return self._count - self._gone

    def append(self, ids: I64, hashes: I64) -> None:
        """Add messages; their ids rise and are above all earlier ones."""
        end = self._count + len(ids)
        if end > len(self._ids):
            self._resize(max(2 * len(self._ids), end))
        self._ids[self._count : end] = ids
        self._hashes[self._count : end] = hashes
        self._count = end

    def of(self, ids: I64) -> I64:
        """Return the hash of each message; NO_KEY for an unknown id."""
        known = self._ids[: self._count]
        if not len(known):
            return np.zeros(len(ids), dtype=np.int64)
        at = np.minimum(known.searchsorted(ids), self._count - 1)
        return np.where(known[at] == ids, self._hashes[at], NO_KEY)

    def of_one(self, id: int) -> int:
        return int(self.of(np.array([id], dtype=np.int64))[0])

    def forget(self, ids: I64) -> None:
        """Forget messages that were removed."""
        if not self._count:
            return
        known = self._ids[: self._count]
        at = np.minimum(known.searchsorted(ids), self._count - 1)
        at = at[known[at] == ids]
        self._is_gone[at] = True
        self._gone += len(at)
        if self._gone > _GONE_MIN and 2 * self._gone > self._count:
            self._compact()

    def _compact(self) -> None:
        kept = np.flatnonzero(~self._is_gone[: self._count])
        self._load(self._ids[kept], self._hashes[kept], np.zeros(len(kept), dtype=np.bool_))

    def _resize(self, size: int) -> None:
        for name in ("_ids", "_hashes", "_is_gone"):
            old = getattr(self, name)
            grown = np.zeros(size, dtype=old.dtype)
            grown[: self._count] = old[: self._count]
            setattr(self, name, grown)

    def _load(self, ids: I64, hashes: I64, is_gone: npt.NDArray[np.bool_]) -> None:
        self._ids, self._hashes, self._is_gone = ids, hashes, is_gone
        self._count, self._gone = len(ids), int(is_gone.sum())
        self._resize(max(_ROWS_AT_FIRST, len(ids) + len(ids) // 4))

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._hashes.nbytes + self._is_gone.nbytes

    def to_state(self) -> list[Any]:
        end = self._count
        return [self._ids[:end], self._hashes[:end], self._is_gone[:end].copy()]

    @classmethod
    def from_state(cls, state: list[Any]) -> KeyHashes:
        found = cls()
        ids, hashes = (np.frombuffer(column, dtype=np.int64) for column in state[:2])
        found._load(ids, hashes, np.frombuffer(state[2], dtype=np.bool_))
        return found


FEW_ROWS_MAX = 256
_FEW_BYTES = 168  # estimate: a tuple of three ints and its slot in a list


class Parking:
    """The parked entries of one partition, by the hash of their fairness key."""

    def __init__(self) -> None:
        self._few: dict[int, list[Row]] = {}  # each a binary heap
        self._many: dict[int, RunHeap] = {}  # no key is in both
        self.rows = 0

    def __contains__(self, key: int) -> bool:
        return key in self._few or key in self._many

    def park(self, rows: Rows, hashes: Column) -> list[int]:
        """Park these entries; return the keys that had none here before."""
        keys, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        new = [key for key in keys.tolist() if key not in self]
        for key in keys[counts > FEW_ROWS_MAX].tolist():
            mine = hashes == key
            heap = self._run_heap(key)
            heap.push(rows.keys[mine], rows.ids[mine], rows.positions[mine])
            heap.maintain(4 * int(mine.sum()))
        rest = counts[inverse] <= FEW_ROWS_MAX
        few = Rows(rows.keys[rest], rows.ids[rest], rows.positions[rest])
        for key, row in zip(hashes[rest].tolist(), tuples_of(few), strict=True):
            self._park_one(key, row)
        self.rows += len(rows.ids)
        return new

    def _park_one(self, key: int, row: Row) -> None:
        heap = self._many.get(key)
        if heap is not None:
            heap.push_one(*row)
            return
        few = self._few.setdefault(key, [])
        heapq.heappush(few, row)
        if len(few) > FEW_ROWS_MAX:
            self._run_heap(key)

    def _run_heap(self, key: int) -> RunHeap:
        """Return the key's RunHeap, converting it from a small heap if necessary."""
        heap = self._many.get(key)
        if heap is None:
            heap = self._many[key] = RunHeap()
            few = self._few.pop(key, None)
            if few:
                heap.push(*rows_of(few))
        return heap

    def take(self, key: int, count: int) -> list[Row]:
        """Remove and return the first entries of a key, at most `count`."""
        few = self._few.get(key)
        if few is not None:
            taken = [heapq.heappop(few) for _ in range(min(count, len(few)))]
            if not few:
                del self._few[key]
        else:
            heap = self._many.get(key)
            taken = [] if heap is None else tuples_of(heap.pop(count))
            if heap is not None and not len(heap):
                del self._many[key]
        self.rows -= len(taken)
        return taken

    def clear(self) -> tuple[list[Rows], list[int]]:
        """Remove everything; return the entries as sorted pieces, and their keys."""
        left = [run.rest() for run in self.runs()]
        keys = [*self._few, *self._many]
        self._few.clear()
        self._many.clear()
        self.rows = 0
        return left, keys

    def find(self, key: int, id: int) -> Row | None:
        if key in self._many:
            return self._many[key].find(id)
        return next((row for row in self._few.get(key, ()) if row[1] == id), None)

    def runs(self, keys: Iterable[int] | None = None) -> Iterator[Run]:
        """Yield the entries of these keys, or all, as immutable runs. Their serials have no meaning."""
        wanted = [*self._few, *self._many] if keys is None else list(keys)
        few = [row for key in wanted for row in self._few.get(key, ())]
        if few:
            yield Run(0, *rows_of(few))
        for key in wanted:
            if key in self._many:
                yield from self._many[key].runs()

    def replace_positions(self, hashes: Column, ids: Column, positions: Column, keep: int) -> None:
        """Replace positions as RunHeap does; `ids` ascend and `hashes` are their keys."""
        for key in np.unique(hashes).tolist():
            mine = hashes == key
            if key in self._many:
                self._many[key].replace_positions(ids[mine], positions[mine], keep)
            elif key in self._few:
                new = dict(zip(ids[mine].tolist(), positions[mine].tolist(), strict=True))
                # Order is by key and id, and a message has one position, so the list remains a heap.
                self._few[key] = [(k, id, (new.get(id, at) & ~keep) | (at & keep)) for k, id, at in self._few[key]]

    @property
    def nbytes(self) -> int:
        few = sum(map(len, self._few.values())) * _FEW_BYTES
        return few + sum(heap.nbytes for heap in self._many.values())
