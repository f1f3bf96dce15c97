"""A broker on a fake disk whose blocking jobs can be held back by name, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from heapline.contract.config import BrokerConfig
from heapline.engine.broker import EmbeddedBroker
from heapline.engine.io import Io
from heapline.testing.clock import FakeClock
from tests.simulation.fake_disk import FakeDisk
from tests.simulation.loop import run

SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 500_000}


class HeldIo(Io):
    """Runs each job immediately, except those named in `hold`, which wait for `let_go`."""

    def __init__(self) -> None:
        self.hold: set[str] = set()
        self.answers_held = False  # the jobs run, but their results are held back
        self._held: list[Callable[[], None]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def resolve(result: Any, error: Exception | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args)
            except Exception as problem:
                error = problem
            if self.answers_held and name in self.hold:
                self._held.append(lambda: resolve(result, error))
            else:
                loop.call_soon(resolve, result, error)

        name = getattr(function, "__name__", "")
        if name in self.hold and not self.answers_held:
            self._held.append(work)
        else:
            loop.call_soon(work)
        return future

    def let_go(self) -> None:
        self.hold, self.answers_held = set(), False
        held, self._held = self._held, []
        for job in held:
            job()

    def close(self) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        self.clock, self.disk, self.io = FakeClock(), FakeDisk(), HeldIo()

    def broker(self, disk: FakeDisk | None = None, **config: Any) -> EmbeddedBroker:
        settings = {"spare_segment_bytes": 0, "reclaim_interval": 1e6, "snapshot_interval": 1e9} | config
        return EmbeddedBroker(
            "/data",
            config=BrokerConfig(**settings),
            disk=disk or self.disk,
            io=self.io,
            clock=self.clock,
            draw=np.random.default_rng(1).random,
        )

    async def opened(self, config: dict[str, Any] | None = None, **topic: Any) -> EmbeddedBroker:
        hl = await self.broker(**(config or {})).__aenter__()
        await hl.create_topic("jobs", **(SMALL | topic))
        return hl


def play(scene: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    rig = Rig()
    run(scene(rig), rig.clock)


async def spin(turns: int = 40) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
