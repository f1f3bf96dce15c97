"""The stream rows of a group's member: those that are outstanding, and those that it settles.

Rows to ack or nack are columns of offsets by partition, made from rows, batches or offsets. Arguments that a broker
would refuse are refused here; the broker decides whether the member still holds the rows.

Outstanding rows are counted by batch as long as complete batches are settled. Small fetches are kept in sets. A large
batch is kept as its column, with a mask once part of it was settled. A row that is redelivered while it is still
counted here, because it timed out, may count twice in columns until the first delivery is forgotten. This only makes a
subscription request less. Used by one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest, DeliveryLost
from heapline.contract.stream import StreamBatch, StreamMessage

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


class Acks:
    """Acks that are sent together: their rows, and their result."""

    def __init__(self) -> None:
        self._offsets: dict[int, list[I64]] = {}
        self.done: asyncio.Future[DeliveryLost | None] = asyncio.get_running_loop().create_future()

    def add(self, offsets: Mapping[int, I64]) -> None:
        for partition, some in offsets.items():
            self._offsets.setdefault(partition, []).append(some)

    def offsets(self) -> dict[int, I64]:
        return {p: some[0] if len(some) == 1 else np.concatenate(some) for p, some in self._offsets.items()}


def offsets_of(rows: Any) -> dict[int, I64]:
    """Return rows, batches, many of them, or {partition: offsets}, as columns."""
    if isinstance(rows, StreamMessage):
        return {rows.partition: np.array([rows.offset])}
    if isinstance(rows, StreamBatch):
        return {rows.partition: rows.offsets}
    if isinstance(rows, Mapping):
        return {_partition(partition): _column(offsets) for partition, offsets in rows.items()}
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise BadRequest(f"ack rows or batches of this subscription, or {{partition: offsets}}, not {rows!r}")
    found: dict[int, list[int]] = {}
    for each in rows:
        if isinstance(each, StreamMessage):
            if each.partition in found:
                found[each.partition].append(each.offset)
            else:
                found[each.partition] = [each.offset]
        elif isinstance(each, StreamBatch):
            found.setdefault(each.partition, []).extend(each.offsets.tolist())
        else:
            raise BadRequest(f"ack rows or batches of this subscription, not {type(each).__name__}")
    return {partition: np.array(offsets) for partition, offsets in found.items()}


def _partition(partition: Any) -> int:
    if type(partition) is not int or partition < 0:
        raise BadRequest(f"a partition is an int from 0 on, not {str(partition)[:80]!r}")
    return partition


def _column(offsets: Any) -> I64:
    """Return offsets as a column. Refuse invalid ones here, because they are sent together with other acks."""
    try:
        column = np.asarray(offsets if isinstance(offsets, np.ndarray) else list(offsets))
    except (TypeError, ValueError, OverflowError):
        column = np.zeros((0, 0))
    if column.ndim != 1 or (len(column) and (column.dtype.kind != "i" or column.min() < 0)):
        raise BadRequest(f"offsets are a list of int from 0 on, not {str(offsets)[:80]!r}")
    return column.astype(np.int64)
