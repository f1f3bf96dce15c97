"""Acks of one member that are made side by side, joined into one call: while one is under way the next ones gather.

Each caller is told of his own rows alone. Knows nothing of how a call is made, nor of what is acked twice.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

from heapline.errors import DeliveryLost, HeaplineError

Columns = dict[int, Any]  # partition -> offsets


class _Ack(NamedTuple):
    rows: Columns
    answer: asyncio.Future[None]


class RowAcks:
    def __init__(self, send: Callable[[Columns], Awaitable[None]]) -> None:
        self._send = send
        self._gathered: list[_Ack] = []
        self._task: asyncio.Task[None] | None = None

    async def ack(self, rows: Columns) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gathered.append(_Ack(rows, answer))
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())
        await answer

    async def settled(self) -> None:
        """When nothing is under way any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _work(self) -> None:
        try:
            while self._gathered:
                acks, self._gathered = self._gathered, []
                await self._carry_out(acks)
        finally:
            self._task = None
            for ack in self._gathered:  # whoever ended this task ends them too
                ack.answer.cancel()

    async def _carry_out(self, acks: list[_Ack]) -> None:
        lost: DeliveryLost | None = None
        try:
            await self._send(joined([ack.rows for ack in acks]))
        except DeliveryLost as error:
            lost = error
        except HeaplineError as error:
            for ack in acks:
                _answer(ack, copy.copy(error))
            return
        except BaseException:
            for ack in acks:
                ack.answer.cancel()
            raise
        for ack in acks:
            _answer(ack, None if lost is None else own_share(lost, ack.rows))


def _answer(ack: _Ack, error: Exception | None) -> None:
    if ack.answer.done():
        return
    if error is None:
        ack.answer.set_result(None)
    else:
        ack.answer.set_exception(error)


def joined(some: list[Columns]) -> Columns:
    if len(some) == 1:
        return some[0]
    columns: dict[int, list[Any]] = {}
    for rows in some:
        for partition, offsets in rows.items():
            columns.setdefault(partition, []).append(offsets)
    return {partition: np.concatenate(parts) for partition, parts in columns.items()}


def own_share(lost: DeliveryLost, rows: Columns) -> DeliveryLost | None:
    """What of the lost rows was among these."""
    mine = {partition: set(offsets.tolist()) for partition, offsets in rows.items()}
    pairs = [(p, o) for p, o in zip(lost.partitions, lost.offsets, strict=True) if o in mine.get(p, ())]
    if not pairs:
        return None
    return DeliveryLost([p for p, _ in pairs], [o for _, o in pairs], lost.topic, lost.group)
