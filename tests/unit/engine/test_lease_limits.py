"""The limit of leases per holder, enforced in the turn that grants them."""

from __future__ import annotations

import asyncio

import pytest

import heapline
from heapline.contract.call import Context
from heapline.contract.leases import Leased, Pop
from heapline.engine.delivery import Delivery
from heapline.testing import MemoryBroker


def count(leased: Leased) -> int:
    return 0 if leased.messages is None else len(leased.messages)


def holder(limit: int) -> Context:
    return Context(principal="key:1", leases_max=limit)


async def test_second_pop_of_a_holder_gets_its_remaining_leases() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x" * 300_000) for _ in range(12)])
        pops = [hl.do(Pop("jobs", 100, max_bytes=1 << 20), holder(100)) for _ in range(2)]
        first, second = await asyncio.gather(*pops)
        assert count(first) > 0
        assert count(second) > 0, "the first was limited by its bytes, so slots and messages are left"


async def test_waiting_pop_gets_its_count_once_its_holder_has_free_leases() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x") for _ in range(9)])
        held = await hl.pop("jobs", 9, holder="key:1")
        waiting = asyncio.ensure_future(hl.do(Pop("jobs", 10, wait=5), holder(10)))
        await asyncio.sleep(0)
        await hl.ack(held)
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"y") for _ in range(10)])
        assert count(await waiting) == 10


async def test_holder_at_its_limit_is_refused_and_another_is_not() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x") for _ in range(5)])
        assert count(await hl.do(Pop("jobs", 5), holder(3))) == 3
        with pytest.raises(heapline.ResourceExhausted, match="leases of consumer 'key:1'"):
            await hl.do(Pop("jobs", 1), holder(3))
        assert count(await hl.do(Pop("jobs", 5), Context(principal="key:2", leases_max=3))) == 2


async def test_many_pops_of_a_holder_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    held = Delivery._held
    monkeypatch.setattr(Delivery, "_held", lambda self, holder: (counted.append(holder), held(self, holder))[1])
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x") for _ in range(100)])
        pops = [hl.do(Pop("jobs", 1000, max_bytes=1), holder(1000)) for _ in range(100)]
        assert [count(leased) for leased in await asyncio.gather(*pops)] == [1] * 100
        assert len(counted) <= 101
