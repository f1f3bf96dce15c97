"""Rows to ack or nack, as columns: conversion from rows, batches or offsets, and acks that are sent together.

Arguments that a broker would refuse are refused here. The broker decides whether the member still holds the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest, DeliveryLost
from heapline.contract.stream import StreamBatch, StreamMessage

I64 = npt.NDArray[np.int64]


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
