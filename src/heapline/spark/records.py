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
    __slots__ = ("at", "data", "rows")

    def __init__(self, data: Bytes, rows: npt.NDArray[Any], at: I64) -> None:
        self.data, self.rows = data, rows
        self.at = at  # of each row's first byte in `data`

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> I64:
        ids: I64 = self.rows["id"]
        return ids

    def take(self, which: slice | npt.NDArray[Any]) -> Records:
        return Records(self.data, self.rows[which], self.at[which])

    def payloads(self) -> Any:
        """One after the other, as one buffer."""
        return gather(self.data, self.at + self.rows["payload_at"], self.rows["payload_len"].astype(np.int64))

    def smalls(self) -> Any:
        return gather(self.data, self.at + self.rows["small_at"], self.rows["small_len"].astype(np.int64))


def records_of(unit: Unit, event: Enqueued | Moved | BatchPrepared) -> Records:
    """The records that an event brings; they are views of the unit's bytes."""
    block = unit.blocks[event.block]
    rows = unit.rows(block)[event.start : event.start + event.count]
    at = block.offset + np.arange(event.start, event.start + event.count, dtype=np.int64) * ROW.itemsize
    return Records(np.frombuffer(unit.data, dtype=np.uint8), rows, at)


def own_records(unit: Unit, event: Moved | BatchPrepared) -> Records:
    """The same with bytes of their own, so that they can be kept without what was read along with them."""
    block = unit.blocks[event.block]
    end = block.offset + block_nbytes(block.count, block.smalls_len, block.payloads_len)
    data = np.frombuffer(bytes(unit.data[block.offset : end]), dtype=np.uint8)
    rows = np.frombuffer(data, ROW, event.count, event.start * ROW.itemsize)
    return Records(data, rows, np.arange(event.start, event.start + event.count, dtype=np.int64) * ROW.itemsize)


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
