"""A worker and a broker in one loop of virtual time, so a day of leases takes no real time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import heapline
from heapline.client.tasks import Worker
from heapline.engine import EmbeddedBroker
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.loop import run
from tests.simulation.sim_io import SimIo

SMALL: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 256 << 10}
#: The broker's maintenance is not tested here, and a day of it would take seconds.
CALM = heapline.BrokerConfig(reclaim_interval=3600.0, snapshot_interval=1e6)


class World:
    """The broker, an app on it, and a worker while one runs."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.broker = broker
        self.app = heapline.App(broker, topics=dict.fromkeys(("jobs", "other", "tasks"), SMALL))
        self.said: list[Any] = []  # by handlers

    @asynccontextmanager
    async def worker(self, **settings: Any) -> AsyncIterator[Worker]:
        """Run a worker while the block runs; then drain it."""
        worker = self.app.worker(**settings)
        running = asyncio.ensure_future(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            async with asyncio.timeout(10_000):
                await running

    async def until(self, holds: Callable[[], Any], seconds: float = 600.0) -> None:
        async with asyncio.timeout(seconds):
            while True:
                found = holds()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return
                await asyncio.sleep(seconds / 3000)

    async def counts(self, topic: str = "jobs") -> tuple[int, int, int, int]:
        stats = await self.broker.stats(topic)
        return stats.ready, stats.delayed, stats.leased, stats.dead

    async def is_empty(self, topic: str = "jobs") -> bool:
        return await self.counts(topic) == (0, 0, 0, 0)


def in_world(scenario: Callable[[World], Awaitable[None]], seed: int = 1) -> None:
    """Run a scenario in virtual time, on a disk in memory."""

    async def whole() -> None:
        clock = asyncio.get_running_loop().clock  # type: ignore[attr-defined]
        io = SimIo(random.Random(seed))
        async with EmbeddedBroker("/data", config=CALM, disk=FakeDisk(), io=io, clock=clock) as broker:
            await scenario(World(broker))

    run(whole())
