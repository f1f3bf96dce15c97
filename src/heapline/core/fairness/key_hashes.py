"""The fairness keys of live messages: message ids and the hashes of their keys, sorted by id.

Ids rise within a partition, so appending keeps the columns sorted, and a lookup is one binary search per batch. A
removed message is only marked. When more than half are marked, the columns are rewritten without them. The cost is
sixteen bytes per message and one for the mark, whether it is ready, delayed, leased or dead.

The columns up to the current length never change (growing and compacting create new ones), so a snapshot may keep
views. Hash 0 means "no fairness key". This module does not know what a key means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

I64 = npt.NDArray[np.int64]

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
