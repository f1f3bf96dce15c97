"""A broker whose disk and I/O a test controls: jobs run one after the other on the loop, or wait until released.

Without threads and real files, results depend only on what the test does. Waits use the real loop's time, the broker a
FakeClock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from heapline.contract.config import BrokerConfig, TopicConfig
from heapline.engine import EmbeddedBroker
from heapline.engine.io import Io
from heapline.engine.runner import TopicRunner
from heapline.testing import FakeClock
from tests.simulation.fake_disk import FakeDisk

T = TypeVar("T")
PATH = "/data"
SMALL: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 256 << 10}


class StepIo(Io):
    """Runs jobs in order on the loop. Those named in `hold` wait for `release`."""

    def __init__(self) -> None:
        self.hold: set[str] = set()
        self.held: list[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        self.ran: Counter[str] = Counter()

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if _name(function) in self.hold:
            self.held.append((future, function, args))
        else:
            loop.call_soon(self._do, future, function, args)
        return future

    def _do(self, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.ran[_name(function)] += 1
        try:
            result = function(*args)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def release(self) -> None:
        """Run the held jobs, and all later ones."""
        self.hold.clear()
        self.step(len(self.held))

    def step(self, count: int = 1) -> None:
        """Run this many of the held jobs."""
        for _ in range(count):
            self._do(*self.held.pop(0))

    def close(self) -> None:
        pass


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Rig:
    def __init__(self, disk: FakeDisk | None = None, **config: Any) -> None:
        self.clock = FakeClock()
        self.disk = disk or FakeDisk()
        self.config = BrokerConfig(**{"spare_segment_bytes": 0, "reclaim_interval": 3600.0, **config})
        self.io = StepIo()
        self.hl: EmbeddedBroker

    async def open(self) -> EmbeddedBroker:
        self.io = StepIo()
        self.hl = EmbeddedBroker(PATH, config=self.config, disk=self.disk, io=self.io, clock=self.clock)
        await self.hl.__aenter__()
        return self.hl

    async def reopen(self) -> EmbeddedBroker:
        await self.hl.close()
        return await self.open()

    async def topic(self, name: str = "jobs", **config: Any) -> TopicConfig:
        return (await self.hl.create_topic(name, **{**SMALL, **config})).config

    def runner(self, name: str = "jobs") -> TopicRunner:
        """The only access of these tests to internals."""
        return self.hl.topics._runners[name]

    def files(self, ending: str) -> list[str]:
        return [path for path, _ in self.disk.walk() if path.endswith(ending)]


@asynccontextmanager
async def opened(
    disk: FakeDisk | None = None, topic: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Rig]:
    """A rig with a topic "jobs", closed at the end."""
    rig = Rig(disk, **config)
    await rig.open()
    await rig.topic(**topic or {})
    try:
        yield rig
    finally:
        rig.io.release()
        await rig.hl.close()


async def settle(turns: int = 50) -> None:
    """Let everything that is ready run."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for an event that happens without a call, however slow the machine."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it may be anything
            await asyncio.sleep(0.001)
