"""One chunk of a producer's sequences: offset, message id and fingerprint as columns sorted by offset.

A chunk decides how rows are ordered and how its columns grow. It does not know producers, epochs or what a hit means.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heapline.core.dedup.verdict import I64, U32

U16 = npt.NDArray[np.uint16]

_ROWS_AT_FIRST = 16


class Chunk:
    __slots__ = ("count", "ids", "offsets", "prints", "time")

    def __init__(self, time: int) -> None:
        self.time = time
        self.count = 0
        self.offsets: U16 = np.empty(_ROWS_AT_FIRST, dtype=np.uint16)
        self.ids: I64 = np.empty(_ROWS_AT_FIRST, dtype=np.int64)
        self.prints: U32 = np.empty(_ROWS_AT_FIRST, dtype=np.uint32)

    @property
    def last(self) -> int:
        return self.offsets.item(self.count - 1)

    def find(self, offsets: U16) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the row of each offset (or where it would be), and whether it is present."""
        kept = self.offsets[: self.count]
        index = kept.searchsorted(offsets)
        np.minimum(index, self.count - 1, out=index)
        return index, kept[index] == offsets

    def put(self, offsets: U16, ids: I64, prints: U32) -> None:
        """Add rows in ascending order of offset, within capacity. A row that is already present does not change."""
        if self.count and offsets.item(0) <= self.last:
            found = self.find(offsets)[1]
            if found.any():
                offsets, ids, prints = offsets[~found], ids[~found], prints[~found]
            self._insert(offsets, ids, prints)
        else:
            self._append(offsets, ids, prints)

    def find_one(self, offset: int) -> int:
        """Return the row of an offset, or `-1 - row` of its insertion point if it is absent."""
        at = int(self.offsets[: self.count].searchsorted(np.uint16(offset)))
        return at if at < self.count and self.offsets.item(at) == offset else -1 - at

    def put_one(self, offset: int, message_id: int, print_: int) -> None:
        at, end = self.count, self.count
        if end and offset <= self.last:
            at = -1 - self.find_one(offset)
            if at < 0:
                return
            for column in (self.offsets, self.ids, self.prints):
                column[at + 1 : end + 1] = column[at:end]
        self.offsets[at], self.ids[at], self.prints[at] = offset, message_id, print_
        self.count = end + 1

    def make_room(self, more: int, floor: int, rows_max: int) -> None:
        """Ensure capacity for `more` rows: drop rows below `floor`, and double unless that freed half."""
        if self.count + more <= len(self.ids):
            return
        kept = self.count_from(floor)
        start = self.count - kept
        capacity = len(self.ids)
        while capacity < kept + more or (capacity < kept * 2 and capacity < rows_max):
            capacity *= 2
        # Repeated rows are counted in `more` though they are not added, so the limit is not simply rows_max.
        capacity = max(min(capacity, rows_max), kept + more)
        for name in ("offsets", "ids", "prints"):
            old = getattr(self, name)
            new = np.empty(capacity, dtype=old.dtype)
            new[:kept] = old[start : self.count]
            setattr(self, name, new)
        self.count = kept

    def count_from(self, floor: int) -> int:
        """Count rows at or above the offset `floor`, which may be outside the chunk on either side."""
        if floor <= 0:
            return self.count
        if floor > self.last:
            return 0
        return self.count - int(self.offsets[: self.count].searchsorted(np.uint16(floor)))

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.ids.nbytes + self.prints.nbytes + 3 * 112

    def to_state(self) -> tuple[int, bytes, bytes, bytes]:
        n = self.count
        return (
            self.time,
            self.offsets[:n].astype("<u2").tobytes(),
            self.ids[:n].astype("<i8").tobytes(),
            self.prints[:n].astype("<u4").tobytes(),
        )

    @classmethod
    def from_state(cls, time: int, offsets: bytes, ids: bytes, prints: bytes) -> Chunk:
        chunk = cls(time)
        chunk.offsets = np.frombuffer(offsets, "<u2").astype(np.uint16)
        chunk.ids = np.frombuffer(ids, "<i8").astype(np.int64)
        chunk.prints = np.frombuffer(prints, "<u4").astype(np.uint32)
        chunk.count = len(chunk.ids)
        if not len(chunk.offsets) == len(chunk.prints) == chunk.count > 0:
            raise ValueError("the columns of a chunk differ in length")
        if (chunk.offsets[1:] <= chunk.offsets[:-1]).any():
            raise ValueError("the offsets of a chunk do not ascend")
        return chunk

    def _append(self, offsets: U16, ids: I64, prints: U32) -> None:
        start, self.count = self.count, self.count + len(offsets)
        self.offsets[start : self.count] = offsets
        self.ids[start : self.count] = ids
        self.prints[start : self.count] = prints

    def _insert(self, offsets: U16, ids: I64, prints: U32) -> None:
        """Insert rows. Only rows after the lowest new one move."""
        if not len(offsets):
            return
        cut = int(self.offsets[: self.count].searchsorted(offsets[0]))
        tail = slice(cut, self.count)
        merged = np.concatenate((self.offsets[tail], offsets))
        order = merged.argsort(kind="stable")
        ids = np.concatenate((self.ids[tail], ids))[order]
        prints = np.concatenate((self.prints[tail], prints))[order]
        self.count = cut
        self._append(merged[order], ids, prints)
