"""Acks that are made side by side travel together, and each hears of its own rows alone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from heapline.client.row_acks import RowAcks
from heapline.errors import DeliveryLost, UnavailableError


def rows(**by_partition: list[int]) -> Any:
    return {int(name[1:]): np.array(offsets, dtype=np.int64) for name, offsets in by_partition.items()}


class Server:
    def __init__(self, *answers: Exception | None) -> None:
        self.calls: list[dict[int, list[int]]] = []
        self._answers = list(answers)

    async def send(self, columns: Any) -> None:
        self.calls.append({p: sorted(offsets.tolist()) for p, offsets in columns.items()})
        await asyncio.sleep(0)
        if self._answers and (answer := self._answers.pop(0)) is not None:
            raise answer


async def test_acks_made_while_one_is_under_way_travel_together() -> None:
    server = Server()
    acks = RowAcks(server.send)
    await asyncio.gather(*(acks.ack(rows(p0=[n], p1=[n + 10])) for n in range(5)))
    assert sum(len(call[0]) for call in server.calls) == 5
    assert len(server.calls) == 1
    await acks.ack(rows(p2=[1]))
    assert server.calls[-1] == {2: [1]}


async def test_each_is_told_of_its_own_lost_rows() -> None:
    server = Server(DeliveryLost([0, 1], [2, 7], "jobs", "g"))
    acks = RowAcks(server.send)
    told = await asyncio.gather(
        acks.ack(rows(p0=[1, 2])), acks.ack(rows(p0=[3])), acks.ack(rows(p1=[7])), return_exceptions=True
    )
    assert told[1] is None
    assert isinstance(told[0], DeliveryLost)
    assert (told[0].partitions, told[0].offsets) == ([0], [2])
    assert isinstance(told[2], DeliveryLost)
    assert (told[2].partitions, told[2].offsets) == ([1], [7])


async def test_failure_is_told_to_all_and_the_next_call_is_made() -> None:
    server = Server(UnavailableError("gone"), None)
    acks = RowAcks(server.send)
    told = await asyncio.gather(acks.ack(rows(p0=[1])), acks.ack(rows(p0=[2])), return_exceptions=True)
    assert [type(error) for error in told] == [UnavailableError, UnavailableError]
    assert told[0] is not told[1]
    await acks.ack(rows(p0=[3]))


async def test_ack_that_is_given_up_ends_no_other() -> None:
    server = Server()
    acks = RowAcks(server.send)
    first = asyncio.ensure_future(acks.ack(rows(p0=[1])))
    second = asyncio.ensure_future(acks.ack(rows(p0=[2])))
    await asyncio.sleep(0)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    await acks.settled()
