"""Records in memory: the blocks of recent units, so that a pop soon after its enqueue needs no disk.

`RecordCache` maps positions to the blocks that hold them. Blocks arrive in journal order and the oldest are dropped
first, when the byte budget (which many journals may share) is exhausted. A block that is not written yet is never
dropped, because it could not be read back. Cached blocks were made in this process, so their checksums are not checked
again. Used by the event loop's thread only, except `mark_written`. record_reader.py reads from disk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.position import ALIGN, PositionLayout
from heapline.core.record import ROW
from heapline.journal.block import ROW_BYTES, Block, Rows

I64 = npt.NDArray[np.int64]
CACHE_BYTES_DEFAULT = 64 << 20


class BadRecord(NamedTuple):
    """A corrupt record: the data of RecordCorrupt without the topic's name."""

    message_id: int  # as stored in the row, so possibly wrong; 0 if the row could not be read
    path: str
    offset: int
    detail: str


@dataclass(slots=True)
class Records:
    """Records in the order of the requested positions. A missing or bad one has a zero row and b"" as bytes."""

    rows: Rows
    payloads: list[bytes]
    smalls: list[bytes]
    bad: dict[int, BadRecord] = field(default_factory=dict)

    def fill(self, indexes: I64, others: Records) -> None:
        """Insert records that were read later."""
        self.rows[indexes] = others.rows
        for index, payload, small in zip(indexes.tolist(), others.payloads, others.smalls, strict=True):
            self.payloads[index] = payload
            self.smalls[index] = small
        for at, bad in others.bad.items():
            self.bad[int(indexes[at])] = bad


def empty_records(count: int) -> Records:
    return Records(np.zeros(count, ROW), [b""] * count, [b""] * count)


class CacheBudget:
    """A byte budget shared by several caches. The oldest block of all caches is dropped first."""

    def __init__(self, limit_bytes: int = CACHE_BYTES_DEFAULT) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._order: deque[RecordCache] = deque()

    def took(self, cache: RecordCache, nbytes: int) -> None:
        self.used_bytes += nbytes
        self._order.append(cache)
        while self.used_bytes > self.limit_bytes and self._order and self._order[0].drop_oldest():
            self._order.popleft()

    def gave(self, nbytes: int) -> None:
        self.used_bytes -= nbytes


class RecordCache:
    """The blocks of one journal that are still in memory."""

    def __init__(self, layout: PositionLayout, budget: CacheBudget | None = None) -> None:
        self.layout = layout
        self.budget = budget if budget is not None else CacheBudget()
        # Columns of a queue: entries from _head to _tail are in memory, ascending by position.
        self._starts: I64 = np.zeros(256, np.int64)
        self._ends: I64 = np.zeros(256, np.int64)
        self._blocks: deque[bytes] = deque()
        self._units: deque[int] = deque()
        self._head = 0
        self._tail = 0
        self._written_unit = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, segment: int, offset: int, block: Block, unit: int) -> None:
        """Keep a block that was just added to a unit."""
        if self._tail == len(self._starts):
            self._make_room()
        start = (segment << self.layout.place_bits) | (offset // ALIGN)  # as `layout.spot` of the first row's position
        self._starts[self._tail] = start
        self._ends[self._tail] = start + block.count * (ROW_BYTES // ALIGN)
        self._tail += 1
        self._blocks.append(block.data)
        self._units.append(unit)
        self.budget.took(self, block.nbytes)

    def _make_room(self) -> None:
        """Move the columns to the front of arrays that are at most half full."""
        live = slice(self._head, self._tail)
        count = self._tail - self._head
        size = max(256, 2 * count)
        for name in ("_starts", "_ends"):
            fresh = np.zeros(size, np.int64)
            fresh[:count] = getattr(self, name)[live]
            setattr(self, name, fresh)
        self._head, self._tail = 0, count

    def mark_written(self, unit: int) -> None:
        """Note that everything up to this unit can be read back from disk."""
        self._written_unit = unit

    def drop_oldest(self) -> bool:
        """Drop the oldest block. Return False if it must stay for now, True otherwise."""
        if not self._blocks:
            return True
        if self._units[0] > self._written_unit:
            return False
        self._units.popleft()
        self._head += 1
        self.budget.gave(len(self._blocks.popleft()))
        return True

    def clear(self) -> None:
        """Drop everything, because the journal is closed or reloaded."""
        self.budget.gave(sum(map(len, self._blocks)))
        self._blocks.clear()
        self._units.clear()
        self._head = self._tail = 0

    def cached(self, positions: I64) -> tuple[Records, I64]:
        """Return the records in memory, and the indexes of those that are not. No I/O."""
        spots = self.layout.spot(positions)
        starts = self._starts[self._head : self._tail]
        found = np.searchsorted(starts, spots, side="right") - 1
        if len(starts):
            there = (found >= 0) & (spots < self._ends[self._head : self._tail][found])
        else:
            there = np.zeros(len(spots), np.bool_)
        if there.all():
            return self._gather(found, (spots - starts[found]) * ALIGN), np.empty(0, np.int64)
        records = empty_records(len(spots))
        hits = np.flatnonzero(there)
        if len(hits):
            which = found[hits]
            records.fill(hits, self._gather(which, (spots[hits] - starts[which]) * ALIGN))
        return records, np.flatnonzero(~there)

    def _gather(self, which: I64, offsets: I64) -> Records:
        blocks = self._blocks
        datas = _pick(blocks, which)
        at = offsets.tolist()
        raw = b"".join([data[o : o + ROW_BYTES] for data, o in zip(datas, at, strict=True)])
        rows = np.frombuffer(bytearray(raw), ROW)
        payloads = _cut(datas, offsets + rows["payload_at"], rows["payload_len"])
        has_small = rows["small_len"].any()
        smalls = _cut(datas, offsets + rows["small_at"], rows["small_len"]) if has_small else [b""] * len(at)
        return Records(rows, payloads, smalls)


def _pick(blocks: deque[bytes], which: I64) -> list[bytes]:
    """Return the block of each index. Each distinct one is fetched once, because a deque is slow in its middle."""
    distinct, back = np.unique(which, return_inverse=True)
    fetched = [blocks[i] for i in distinct.tolist()]
    return [fetched[i] for i in back.tolist()]


def _cut(datas: list[bytes], starts: Any, lengths: Any) -> list[bytes]:
    ends = (starts + lengths).tolist()
    return [data[a:b] for data, a, b in zip(datas, starts.tolist(), ends, strict=True)]
