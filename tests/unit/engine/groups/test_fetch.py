"""Fetches that end, wait or overlap: no row is lost, delivered twice, or delivered to a member that left."""

from __future__ import annotations

import asyncio

import pytest

from heapline.contract.errors import Closed
from heapline.contract.message import Outgoing
from tests.unit.engine.groups.group_calls import fetch, fill, payloads
from tests.unit.engine.rig import opened, settle


@pytest.mark.parametrize("wait", [0.0, 30.0])
async def test_fetch_with_a_page_being_read_raises_when_the_broker_closes(wait: float) -> None:
    async with opened() as rig:
        await fill(rig, 2000)
        await fetch(rig.hl, max_messages=0)
        await rig.reopen()
        rig.io.hold = {"read"}
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=wait))
        await settle()
        assert rig.io.held
        assert not waiting.done()
        closing = asyncio.ensure_future(rig.hl.close())
        await settle()
        rig.io.release()
        await closing
        await settle()
        assert waiting.done()
        assert isinstance(waiting.exception(), Closed)
        await rig.open()


async def test_fetch_in_progress_does_not_rejoin_a_member_that_left() -> None:
    async with opened() as rig:
        await fill(rig, 2000)
        await fetch(rig.hl, max_messages=0)
        await rig.reopen()
        rig.io.hold = {"read"}
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=30.0))
        await settle()
        assert rig.io.held
        assert not waiting.done()
        await rig.hl.group_leave("jobs", "g", "a", session="s")
        rig.io.release()
        assert (await waiting).batches == []
        assert (await rig.hl.get_group("jobs", "g")).members == {}


async def test_rows_pending_for_a_leaving_member_go_to_another_only() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        await rig.hl.enqueue("jobs", b"x")
        await fetch(rig.hl)
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue("jobs", b"y"))
        await settle()
        waiting = asyncio.ensure_future(fetch(rig.hl))
        await settle()
        left = asyncio.ensure_future(rig.hl.group_leave("jobs", "g", "a", session="s"))
        other = asyncio.ensure_future(fetch(rig.hl, "b", session="t"))
        await settle()
        rig.io.release()
        await asyncio.gather(enqueued, left)
        assert payloads(await waiting) == []
        assert payloads(await other) == [b"x", b"y"]


async def test_fetch_returns_at_most_its_limit_of_rows_left_by_another() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(5)]))
        await settle()
        waiting = asyncio.ensure_future(fetch(rig.hl))
        await settle()
        waiting.cancel()
        await settle()
        rig.io.release()
        await enqueued
        assert payloads(await fetch(rig.hl, max_messages=2)) == [b"0", b"1"]
        assert payloads(await fetch(rig.hl, max_messages=2)) == [b"2", b"3"]
        assert payloads(await fetch(rig.hl)) == [b"4"]


async def test_partition_with_its_page_on_disk_is_not_starved() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        for _ in range(4):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 100, key=str(i)) for i in range(2000)])
        await fetch(rig.hl, max_messages=0)
        await rig.reopen()
        await fetch(rig.hl, max_messages=1)
        await fetch(rig.hl, max_messages=1)
        rig.runner().streams._reading._pages.drop_below(1, 1 << 62)  # as when memory is short
        seen = [batch.partition for _ in range(8) for batch in (await fetch(rig.hl, max_messages=10)).batches]
        assert set(seen) == {0, 1}


async def test_member_that_fetched_in_time_survives_a_long_stall() -> None:
    async with opened() as rig:
        first = await fetch(rig.hl)
        rig.clock.advance(31)
        again = await fetch(rig.hl)
        assert again.generation == first.generation


async def test_rows_timed_out_during_a_disk_stall_go_to_one_member() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", ack_timeout=5.0, member_lease=60.0)
        await fetch(rig.hl)
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue("jobs", b"x"))
        waiting = asyncio.ensure_future(fetch(rig.hl))
        await settle()
        rig.clock.advance(6)
        beat = asyncio.ensure_future(fetch(rig.hl, "b", max_messages=0))
        await settle()
        assert not waiting.done()
        rig.io.release()
        await asyncio.gather(enqueued, beat)
        assert payloads(await waiting) == []  # its deadline passed before it arrived
        rig.clock.advance(60)
        got = [payloads(await fetch(rig.hl, member)) for member in "ab"]
        assert sorted(map(len, got)) == [0, 1]
