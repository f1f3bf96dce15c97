"""Calls that share a turn: each gets its own answer; calls that arrive one by one may gather for one commit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import heapline
from heapline.contract.config import BrokerConfig
from heapline.engine import EmbeddedBroker
from heapline.testing import MemoryBroker


async def commits_of_ten(directory: Path, gather_steps: int) -> int:
    config = BrokerConfig(spare_segment_bytes=0, gather_steps=gather_steps)
    async with EmbeddedBroker(str(directory), config=config) as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20)
        before = (await broker.stats("jobs")).log.commits_total
        calls = []
        for i in range(10):
            calls.append(asyncio.ensure_future(broker.enqueue("jobs", b"%d" % i)))
            await asyncio.sleep(0)
        results = await asyncio.gather(*calls)
        assert len({r.id for r in results}) == 10
        return (await broker.stats("jobs")).log.commits_total - before


async def test_calls_of_several_loop_steps_share_a_commit_when_they_gather(tmp_path: Path) -> None:
    assert await commits_of_ten(tmp_path, gather_steps=50) == 1


async def test_calls_are_decided_immediately_without_gathering(tmp_path: Path) -> None:
    assert await commits_of_ten(tmp_path, gather_steps=0) > 1


async def test_pops_of_a_turn_get_their_own_rows_and_deadlines() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", partitions=1)
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % i, priority=i - 3) for i in range(7)])
        pops = [hl.pop("jobs", 1), hl.pop("jobs", 2, visibility=5), hl.pop("jobs", 3), hl.pop("jobs", 4)]
        answers = await asyncio.gather(*pops)
        found = [[(m.payload, m.priority, m.attempts) for m in answer] for answer in answers]
        rows = [(b"%d" % i, i - 3, 1) for i in range(7)]
        assert found == [rows[:1], rows[1:3], rows[3:6], rows[6:]]
        first, short, *others = [{m.deadline for m in answer} for answer in answers]
        assert others == [first, first]
        assert max(short) < min(first)


@pytest.mark.parametrize("partitions", [1, 3])
async def test_repeated_and_new_pops_share_a_turn(partitions: int) -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", partitions=partitions)
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % i, priority=i) for i in range(6)])
        (named,) = await hl.pop("jobs", request_id="r", visibility=60)
        new, again, other = await asyncio.gather(
            hl.pop("jobs", 2), hl.pop("jobs", request_id="r"), hl.pop("jobs", 2, request_id="s")
        )
        assert [m.payload for m in new + other] == [b"1", b"2", b"3", b"4"]
        assert [(m.id, m.token, m.deadline) for m in again] == [(named.id, named.token, named.deadline)]
        await hl.ack([*new, *again, *other])
        assert [m.payload for m in await hl.pop("jobs", 9)] == [b"5"]


async def test_acks_of_a_turn_report_only_their_own_lost_leases() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % i) for i in range(4)])
        one, two, three, four = await hl.pop("jobs", 4)
        await hl.release([two, three])
        found = await asyncio.gather(hl.ack(one), hl.ack(two), hl.ack([four, three]), return_exceptions=True)
        lost = [e.lost if isinstance(e, heapline.LeaseLost) else e for e in found]
        assert lost == [None, [two.id], [three.id]]
        assert (await hl.stats("jobs")).acked_total == 2


async def test_cancelled_pop_of_a_turn_returns_its_own_messages() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % i, priority=i) for i in range(6)])
        pops = [asyncio.ensure_future(hl.pop("jobs", 2)) for _ in range(3)]
        await asyncio.sleep(0)
        pops[1].cancel()
        first, _, third = await asyncio.gather(*pops, return_exceptions=True)
        assert isinstance(first, list)
        assert isinstance(third, list)
        held = [m.payload for m in first + third]
        rest = [m.payload for m in await hl.pop("jobs", 6, wait=1)]
        assert sorted(held + rest) == [b"%d" % i for i in range(6)]
