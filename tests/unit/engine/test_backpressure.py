"""Bytes that wait for the disk are bounded: enqueues wait, then raise ResourceExhausted; acks continue."""

from __future__ import annotations

import asyncio

import pytest

import heapline
from heapline.contract.message import Outgoing
from tests.unit.engine.rig import opened, settle

MiB = 1 << 20


@pytest.mark.parametrize("size", [1000, 200_000])
async def test_enqueues_wait_while_too_much_is_uncommitted(size: int) -> None:
    async with opened(uncommitted_bytes_max=4 * MiB, uncommitted_wait=60.0) as rig:
        rig.io.hold = {"commit"}
        tasks = []
        for _ in range(100):
            messages = [Outgoing(b"x" * size)] * (200_000 // size)
            tasks.append(asyncio.create_task(rig.hl.enqueue_batch("jobs", messages)))
            await settle(3)
        taken = rig.runner().counters.enqueued * size
        assert 3 * MiB < taken < 8 * MiB, "accepted bytes are about the limit"
        rig.io.release()
        await asyncio.gather(*tasks)
        assert rig.runner().counters.enqueued * size == 20_000_000


async def test_enqueue_that_waits_too_long_is_refused_with_the_limit() -> None:
    async with opened(uncommitted_bytes_max=100_000, uncommitted_wait=0.02) as rig:
        rig.io.hold = {"commit"}
        tasks = []
        for _ in range(5):
            tasks.append(asyncio.create_task(rig.hl.enqueue("jobs", b"x" * 90_000)))
            await settle()
        with pytest.raises(heapline.ResourceExhausted, match="wait for the disk") as caught:
            await rig.hl.enqueue("jobs", b"x")
        assert caught.value.limit == 100_000
        rig.io.release()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        taken = [r for r in results if isinstance(r, heapline.Enqueued)]
        assert 2 <= len(taken) < 5
        assert (await rig.hl.stats("jobs")).ready == len(taken)


async def test_acks_and_pops_continue_while_enqueues_wait() -> None:
    async with opened(uncommitted_bytes_max=100_000, uncommitted_wait=60.0) as rig:
        await rig.hl.enqueue("jobs", b"old")
        (held,) = await rig.hl.pop("jobs")
        rig.io.hold = {"commit"}
        tasks = []
        for _ in range(4):
            tasks.append(asyncio.create_task(rig.hl.enqueue("jobs", b"x" * 90_000)))
            await settle()
        acks = asyncio.create_task(held.ack())
        await settle()
        assert rig.runner().loaded.topic.leased == 0, "decided; only its answer waits for the disk"
        rig.io.release()
        await asyncio.gather(acks, *tasks)


async def test_enqueue_cancelled_while_waiting_for_space_leaves_nothing() -> None:
    async with opened(uncommitted_bytes_max=100_000, uncommitted_wait=60.0) as rig:
        rig.io.hold = {"commit"}
        tasks = []
        for _ in range(4):
            tasks.append(asyncio.create_task(rig.hl.enqueue("jobs", b"x" * 90_000)))
            await settle()
        tasks[-1].cancel()
        rig.io.release()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[-1], asyncio.CancelledError)
        assert (await rig.hl.stats("jobs")).ready == 3
