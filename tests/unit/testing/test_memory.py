"""The in-memory broker opens automatically, leaves nothing behind, and uses a clock that tests advance."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

import heapline
from heapline.testing.clock import HandClock
from heapline.testing.memory import MemoryBroker, SyncMemoryBroker, memory_broker, memory_broker_sync
from heapline.testing.memory_disk import MemoryDisk


async def test_broker_opens_automatically_at_its_first_use() -> None:
    hl = MemoryBroker()
    assert await hl.list_topics() == []
    await hl.create_topic("jobs")
    await hl.enqueue("jobs", b"x")
    assert [m.payload for m in await hl.pop("jobs")] == [b"x"]
    await hl.close()


def test_broker_created_outside_a_loop_need_not_be_closed() -> None:
    hl = MemoryBroker()

    async def use() -> None:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"x", delay=5)
        assert await hl.pop("jobs") == []

    asyncio.run(use())  # an error or warning about leftovers would fail this test
    hl.abandon()
    gc.collect()
    with pytest.raises(heapline.Closed):
        hl.standing("jobs")


def test_broker_continues_in_the_next_loop_when_the_last_is_closed() -> None:
    clock = HandClock()
    hl = MemoryBroker(clock)

    async def first() -> None:
        await hl.create_topic("jobs", partitions=2)
        await hl.create_topic("other")
        await hl.enqueue("jobs", b"1", delay=60)
        await hl.enqueue("jobs", b"2", priority=7)
        await hl.enqueue("other", b"3")
        await hl.pop("other")

    async def second() -> None:
        assert [info.name for info in await hl.list_topics()] == ["jobs", "other"]
        assert [m.payload for m in await hl.pop("jobs", 9)] == [b"2"]
        assert await hl.pop("other") == []  # leased
        await hl.create_topic("more")

    async def third() -> None:
        clock.advance(60)
        assert [m.payload for m in await hl.pop("jobs", 1, holder="me", visibility=1)] == [b"1"]
        await hl.prepare_batch("b", "p", [heapline.Outgoing(b"2")], topic="more")
        assert await hl.commit_batch("b", ["p"]) == 1

    async def fourth() -> None:
        with pytest.raises(RuntimeError, match="continue with MemoryBroker"):
            await hl.pop("more")
        hl.abandon()
        async with MemoryBroker(clock, disk=hl.disk) as again:
            assert await again.commit_batch("b", ["p"]) == 1
            assert [m.payload for m in await again.pop("more")] == [b"2"]

    for work in (first, second, third, fourth):
        asyncio.run(work())
        clock.advance(1)


async def test_broker_refuses_a_second_loop_while_the_first_runs() -> None:
    async with memory_broker() as hl:
        await hl.create_topic("jobs")

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="create one broker per loop"):
                await hl.enqueue("jobs", b"x")

        await asyncio.to_thread(asyncio.run, elsewhere())


async def test_closed_broker_does_not_open_again() -> None:
    async with memory_broker() as hl:
        await hl.create_topic("jobs")
    with pytest.raises(heapline.Closed):
        await hl.list_topics()


async def test_broker_creates_no_thread_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    async with memory_broker() as hl:
        await hl.create_topic("jobs", partitions=4)
        await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x" * 1000) for _ in range(100)])
        await hl.ack(await hl.pop("jobs", 50))
        await hl.snapshot("jobs")
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(hl.path)


async def test_same_disk_in_a_second_broker_is_a_restart() -> None:
    disk = MemoryDisk()
    async with MemoryBroker(disk=disk) as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"x", priority=3)
        with pytest.raises(heapline.DirectoryLocked):
            await MemoryBroker(disk=disk).__aenter__()
    async with MemoryBroker(disk=disk) as hl:
        assert [m.priority for m in await hl.pop("jobs")] == [3]


@pytest.mark.parametrize("seconds", [60, timedelta(minutes=1)])
async def test_advancing_the_clock_wakes_waiting_pops(seconds: float | timedelta) -> None:
    clock = HandClock()
    async with memory_broker(clock) as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"x", delay=60)
        assert await hl.pop("jobs") == []
        waiting = asyncio.ensure_future(hl.pop("jobs", wait=30))
        await asyncio.sleep(0)
        clock.advance(seconds)
        assert [m.payload for m in await waiting] == [b"x"]


async def test_stopped_clock_makes_nothing_due() -> None:
    clock = HandClock()
    async with memory_broker(clock) as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"x", delay=60)
        clock.advance(59.8)
        assert await hl.pop("jobs") == []


async def test_standing_returns_messages_in_every_state() -> None:
    async with memory_broker(HandClock()) as hl:
        await hl.create_topic("jobs", partitions=3)
        await hl.enqueue("jobs", b"leased", priority=-1)
        await hl.enqueue("jobs", b"dead", priority=-2)
        await hl.enqueue("jobs", b"ready", key="k", headers={"h": "1"})
        await hl.enqueue("jobs", b"delayed", delay=5)
        await hl.enqueue("jobs", b"done", priority=-3)
        await hl.prepare_batch("b", "p", [heapline.Outgoing(b"prepared")], topic="jobs")
        done, dead, _ = await hl.pop("jobs", 3)
        await done.ack()
        await dead.bury()
        states = {info.payload: info.state for info in hl.standing("jobs")}
        assert states == {b"leased": "leased", b"dead": "dead", b"ready": "ready", b"delayed": "delayed"}
        (ready,) = [info for info in hl.standing("jobs") if info.payload == b"ready"]
        assert (ready.key, ready.headers) == ("k", {"h": "1"})


def test_blocking_facade_needs_no_thread() -> None:
    before = threading.active_count()
    clock = HandClock()
    with memory_broker_sync(clock) as hl:
        hl.create_topic("jobs")
        hl.enqueue("jobs", b"x", delay=10)
        assert hl.pop("jobs") == []
        clock.advance(10)
        (m,) = hl.pop("jobs")
        m.ack()
        assert hl.standing("jobs") == []
        assert threading.active_count() == before
    with pytest.raises(heapline.Closed):
        hl.pop("jobs")


def test_blocking_facade_serves_several_threads() -> None:
    with SyncMemoryBroker() as hl:
        hl.create_topic("jobs")
        threads = [threading.Thread(target=hl.enqueue, args=("jobs", b"x")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hl.stats("jobs").ready == 8
