"""One simulated node: a broker on a fake disk, in virtual time, that can be crashed and reopened.

Each run of the node has its own event loop, so a crash leaves nothing behind: no timer, no task, no
answer. Clock, disk and history continue from run to run.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from heapline.contract.config import BrokerConfig
from heapline.contract.errors import HeaplineError
from heapline.contract.ids import SUFFIX_BITS
from heapline.engine.broker import EmbeddedBroker
from heapline.testing.clock import FakeClock
from tests.simulation.fake_disk import FakeDisk, PowerCut
from tests.simulation.history import History
from tests.simulation.loop import SimLoop
from tests.simulation.sim_io import SimIo

PATH = "/data"
OPEN_TRIES = 20


class Unexpected(AssertionError):
    """An error that no client should ever see."""


class Node:
    def __init__(self, seed: int, config: BrokerConfig) -> None:
        self.rng = random.Random(f"node {seed}")
        self.clock = FakeClock()
        self.history = History(self.clock)
        self.history.steady_of = self._steady
        self.disk = FakeDisk(seed=self.rng.getrandbits(32))
        self.broker: EmbeddedBroker | None = None
        self.crashes = self.opens = self.steps = 0
        self.is_faulty = False  # whether connections to it fail; see wire.py
        self._config = config
        self._draw = np.random.default_rng(seed).random
        self._suffixes = random.Random(seed)  # apart, so that the other draws of a seed stay the same
        self._over: asyncio.Future[str] | None = None
        self._io: SimIo | None = None
        self._strays: list[str] = []

    def _steady(self, topic: str) -> int | None:
        """Return the topic's own time. The simulator's only access to internals: checkers judge by steady time."""
        runner = self.broker.topics._runners.get(topic) if self.broker is not None else None
        return runner.steady.now().steady if runner is not None else None

    @property
    def hl(self) -> EmbeddedBroker:
        assert self.broker is not None
        return self.broker

    # -- lives -----------------------------------------------------------------------------------------------------

    def live(self, work: Callable[[], list[Coroutine[Any, Any, None]]]) -> str:
        """Open the broker and run tasks on it until all are done or the node is ended; return how it ended."""
        loop = SimLoop(self.clock)
        loop.set_exception_handler(self._stray)
        try:
            how = loop.run_until_complete(self._life(work))
        finally:
            self._abandon(loop)
        if self._strays:
            raise Unexpected("; ".join(self._strays))
        if how == "crash":
            self._crash()
        self.steps += self.disk.steps
        self.disk.steps = 0
        self.disk.cut_power_in(None)
        return how

    async def _life(self, work: Callable[[], list[Coroutine[Any, Any, None]]]) -> str:
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        if not await self._unless_over(loop.create_task(self._open(), name="open")):
            return self._over.result()
        tasks = [loop.create_task(coroutine, name=f"client-{i}") for i, coroutine in enumerate(work())]
        if await self._unless_over(loop.create_task(_all(tasks), name="clients")):
            self.end("done")
        how = self._over.result()
        if how == "crash":
            return how
        self._over = loop.create_future()  # closing can be interrupted too
        closed = await self._unless_over(loop.create_task(self._close(tasks), name="close"))
        return how if closed else self._over.result()

    async def _unless_over(self, task: asyncio.Task[None]) -> bool:
        """Wait for a task; return False if the run ended first."""
        assert self._over is not None
        waited: list[asyncio.Future[Any]] = [task, self._over]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            return False
        task.result()
        return True

    async def _open(self) -> None:
        for attempt in range(OPEN_TRIES):
            io = self._io = SimIo(self.rng, on_power_cut=lambda: self.end("crash"))
            broker = EmbeddedBroker(
                PATH, config=self._config, disk=self.disk, io=io, clock=self.clock, draw=self._draw,
                draw_id_suffix=lambda: self._suffixes.getrandbits(SUFFIX_BITS),
            )  # fmt: skip
            try:
                await broker.__aenter__()
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ENOSPC):
                    raise
                self.history.note(f"open failed: {error}")
                if attempt > OPEN_TRIES // 2:  # the operator has fixed the disk
                    self.disk.clear_faults()
                    self.disk.capacity = None
                await asyncio.sleep(1.0)
                continue
            self.broker = broker
            self.opens += 1
            self.history.note("opened")
            return
        raise Unexpected("the broker could not be opened, even on a disk without faults")

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.hl.close()
        self.history.note("closed")
        self.broker = None

    def end(self, how: str) -> None:
        """End the current run: `crash`, or anything else for an orderly close."""
        if self._over is not None and not self._over.done():
            if how == "crash" and self._io is not None:
                self._io.cut()
                self.history.crash("CRASH")
            self._over.set_result(how)

    def _crash(self) -> None:
        self.broker = None
        self.crashes += 1
        self.disk.is_off = True
        capacity, rates = self.disk.capacity, self.disk.rates
        self.steps += self.disk.steps
        self.disk = self.disk.crash(self.rng)
        self.disk.capacity, self.disk.rates = capacity, rates
        self.clock.reboot()

    # -- leftovers -------------------------------------------------------------------------------------------------

    def _stray(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record an error in a callback, or one that was never retrieved."""
        error = context.get("exception")
        over = self._over is not None and self._over.done()
        # When a future is collected is not deterministic: an expected error that was never retrieved does not count.
        if error is None or over or isinstance(error, PowerCut | HeaplineError | OSError):
            return
        self._strays.append(f"{context['message']}: {error!r}")

    def _abandon(self, loop: SimLoop) -> None:
        for _ in range(5):
            left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
            for task in left:
                task.cancel()
            for _ in range(3 if left else 0):
                loop.run_until_complete(asyncio.sleep(0))
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    """Wait until all are done; the first error is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in sorted(done, key=lambda task: task.get_name()):
        if not task.cancelled():
            task.result()
