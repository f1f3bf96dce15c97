"""Message records as they lie in the bytes of a unit: rows of fixed width, and where their other parts are.

Nothing is copied until somebody asks for payloads, and then all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.core.events import BatchPrepared, Enqueued, Moved
from heapline.core.record import ROW
from heapline.journal.block import block_nbytes
from heapline.journal.unit import Unit
from heapline.spark.buffers import I64, Bytes, gather


class Records:
    """Rows that lie one after the other from byte `first` of `data`, or at the bytes `at`, wherever these are."""

    __slots__ = ("at", "data", "first", "rows")

    def __init__(self, data: Bytes, rows: npt.NDArray[Any], first: int, at: I64 | None = None) -> None:
        self.data, self.rows, self.first, self.at = data, rows, first, at

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> I64:
        ids: I64 = self.rows["id"]
        return ids

    def between(self, low: int, high: int) -> Records:
        at = None if self.at is None else self.at[low:high]
        return Records(self.data, self.rows[low:high], self.first + low * ROW.itemsize, at)

    def take(self, which: npt.NDArray[Any]) -> Records:
        """Any of the rows, in any order."""
        return Records(self.data, self.rows[which], self.first, self._places()[which])

    def _places(self) -> I64:
        if self.at is not None:
            return self.at
        return self.first + np.arange(len(self.rows), dtype=np.int64) * ROW.itemsize

    def payloads(self) -> Any:
        """One after the other, as one buffer."""
        return self._parts("payload_at", "payload_len")

    def smalls(self) -> Any:
        return self._parts("small_at", "small_len")

    def _parts(self, at: str, length: str) -> Any:
        rows = self.rows
        if self.at is not None:
            return gather(self.data, self.at + rows[at], rows[length].astype(np.int64))
        if not len(rows):
            return b""
        # As a block is laid out, they lie in the order of their rows, without gaps.
        last = len(rows) - 1
        start = self.first + rows[at].item(0)
        return self.data[start : self.first + last * ROW.itemsize + rows[at].item(last) + rows[length].item(last)]


def records_of(unit: Unit, event: Enqueued | Moved | BatchPrepared) -> Records:
    """The records that an event brings; they are views of the unit's bytes."""
    first = unit.blocks[event.block].offset + event.start * ROW.itemsize
    rows = np.frombuffer(unit.data, ROW, event.count, first)
    return Records(np.frombuffer(unit.data, dtype=np.uint8), rows, first)


def own_records(unit: Unit, event: Moved | BatchPrepared) -> Records:
    """The same with bytes of their own, so that they can be kept without what was read along with them."""
    block = unit.blocks[event.block]
    end = block.offset + block_nbytes(block.count, block.smalls_len, block.payloads_len)
    data = np.frombuffer(bytes(unit.data[block.offset : end]), dtype=np.uint8)
    first = event.start * ROW.itemsize
    return Records(data, np.frombuffer(data, ROW, event.count, first), first)


def in_order(found: Sequence[Records], ids: I64) -> list[Records] | None:
    """The records of these ids, in this order, in as few pieces as they lie; None if one of them is not among those."""
    if not found:
        return None if len(ids) else []
    if len(found) == 1 and np.array_equal(found[0].ids, ids):
        return list(found)
    there = np.concatenate([records.ids for records in found])
    order = np.argsort(there, kind="stable")
    at = np.searchsorted(there[order], ids)
    at[at == len(there)] = 0
    places = order[at]
    if not np.array_equal(there[places], ids):
        return None
    starts = np.cumsum([0, *(len(records) for records in found)])
    which = np.searchsorted(starts, places, side="right") - 1
    cuts = np.flatnonzero(np.diff(which)) + 1
    pieces = zip(np.split(which, cuts), np.split(places, cuts), strict=True)
    return [found[owner[0]].take(place - starts[owner[0]]) for owner, place in pieces if len(place)]
