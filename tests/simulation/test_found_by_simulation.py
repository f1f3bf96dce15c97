"""Defects found by the simulator, each as the shortest scenario that shows it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from heapline.contract.config import BrokerConfig
from heapline.contract.errors import CorruptionError, StorageFull
from heapline.engine.broker import EmbeddedBroker
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.loop import SimLoop, run
from tests.simulation.sim_io import SimIo

SMALL = BrokerConfig(spare_segment_bytes=1 << 20, cache_bytes=0)
TOPIC = {"segment_bytes": 1 << 20, "max_payload_bytes": 128 << 10}


def on(disk: FakeDisk, work: Callable[[EmbeddedBroker], Awaitable[Any]], path: str = "/data", seed: int = 1) -> Any:
    """Open a broker on the disk in virtual time, do the work, and close it."""

    async def opened() -> Any:
        clock = cast(SimLoop, asyncio.get_running_loop()).clock
        broker = EmbeddedBroker(path, config=SMALL, disk=disk, io=SimIo(random.Random(seed)), clock=clock)
        async with broker as hl:
            return await asyncio.wait_for(work(hl), 3600)

    return run(opened())


async def make(hl: EmbeddedBroker) -> None:
    await hl.create_topic("jobs", **TOPIC)
    await hl.enqueue("jobs", b"first")


async def fill_up(hl: EmbeddedBroker, disk: FakeDisk) -> int:
    """Enqueue until the disk is full; return how many messages were accepted."""
    disk.capacity = disk.used + 4096
    for count in range(1000):
        try:
            await hl.enqueue("jobs", bytes(60_000))
        except StorageFull:
            return count
    raise AssertionError("the disk was never full")


async def take_all(hl: EmbeddedBroker) -> int:
    count = 0
    while messages := await hl.pop("jobs", 10):
        await hl.ack(messages)
        count += len(messages)
    return count


@pytest.mark.parametrize("path", ["/data", "/srv/queues/data"])
def test_new_data_directory_survives_a_power_cut(path: str) -> None:
    disk = FakeDisk()
    on(disk, make, path)
    for seed in range(20):
        topics = on(disk.crash(random.Random(seed)), lambda hl: hl.list_topics(), path)
        assert [t.name for t in topics] == ["jobs"]


def test_full_disk_is_not_searched_for_space_repeatedly() -> None:
    disk = FakeDisk()

    async def work(hl: EmbeddedBroker) -> int:
        await make(hl)
        await fill_up(hl, disk)
        before = disk.steps
        await asyncio.sleep(60)
        return disk.steps - before

    assert on(disk, work) < 60 * 50


def test_broker_on_a_full_disk_can_be_closed_opened_and_drained() -> None:
    disk = FakeDisk()

    async def work(hl: EmbeddedBroker) -> int:
        await make(hl)
        return await fill_up(hl, disk)

    count = on(disk, work)
    assert on(disk.crash(random.Random(3)), take_all) == count + 1
    assert on(disk, take_all) == count + 1


def test_unreadable_sector_in_one_topic_leaves_the_others_open() -> None:
    disk = FakeDisk()

    async def work(hl: EmbeddedBroker) -> None:
        for name in ("jobs", "other"):
            await hl.create_topic(name, **TOPIC)
            await hl.enqueue(name, b"x")

    on(disk, work)
    segment = next(path for path, _ in disk.walk() if "/other." in path and path.endswith(".seg"))
    disk.damage(segment, 1, "eio")
    after = disk.crash()
    for path, _ in list(after.walk()):
        if "/other." in path and path.endswith((".snap", ".blob")):
            after.unlink(path)

    async def look(hl: EmbeddedBroker) -> None:
        assert await take_all(hl) == 1
        with pytest.raises(CorruptionError, match=r"\.seg"):
            await hl.pop("other")

    on(after, look)


def test_read_that_fails_once_at_open_is_tried_again() -> None:
    disk = FakeDisk()
    on(disk, make)
    disk.inject("pread", path=".seg", times=2)
    assert on(disk, take_all) == 1
