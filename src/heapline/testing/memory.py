"""A broker in memory, for tests of what is built on Heapline: the real engine, on a disk that is a dictionary.

No files and no threads: what a thread would do runs at once, in the caller's own step. So it opens in a moment, by
itself at its first use, in whichever event loop that happens; a test need not even close it. It keeps everything that
`heapline.open` keeps, except of course what it holds when the process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from heapline.clock import Clock
from heapline.config import make_broker_config
from heapline.engine.catalog import Catalog
from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.io import Io
from heapline.engine.runner import TopicRunner
from heapline.engine.sync import SyncBroker
from heapline.errors import Closed
from heapline.model import MessageInfo
from heapline.testing.hand_clock import HandClock
from heapline.testing.memory_disk import MemoryDisk
from heapline.testing.standing import standing

T = TypeVar("T")
PATH = "/memory"


class InlineIo:
    """An `Io` that runs everything on the spot."""

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


class MemoryBroker(EmbeddedBroker):
    """`async with MemoryBroker() as hl: …`, or just use it.

    With a `clock` of your own (`HandClock`) time passes when you say so; otherwise it is the system's. Give the same
    `disk` to a second one after the first was closed, to see what a restart remembers. Other keywords are fields of
    BrokerConfig.
    """

    def __init__(self, clock: Clock | None = None, *, disk: MemoryDisk | None = None, **config: Any) -> None:
        fields = {"spare_segment_bytes": 0, **config}  # a disk that is never full needs no spares
        self.disk = disk or MemoryDisk()
        io: Io = InlineIo()
        super().__init__(PATH, config=make_broker_config(fields), disk=self.disk, io=io, clock=clock)
        self._is_new = disk is None
        if isinstance(clock, HandClock):
            clock.watch(self)

    def standing(self, topic: str) -> list[MessageInfo]:
        """All messages that a topic holds now, of any state, oldest first. Looks without asking, so needs no await."""
        return standing(self._runner(topic))

    def topic_names(self) -> list[str]:
        return sorted(self._runners)

    def time_moved(self) -> None:
        """The clock was moved by hand: whoever waits for a message that is due by now gets it."""
        for runner in self._all_runners():
            if not runner._loop.is_closed():
                runner.later(lambda now: None)

    def abandon(self) -> None:
        """Close it from outside its event loop, which may be gone: nothing is answered any more."""
        self._closed = True
        for runner in self._all_runners():
            if not runner._loop.is_closed():
                for task in list(runner._tasks):
                    task.cancel()
        for watch in self._batches._watches:
            if not watch.get_loop().is_closed():
                watch.cancel()

    # -- opens by itself -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._catalog is None:
            await super()._start()

    def _open_if_new(self) -> None:
        if self._is_new and self._catalog is None and not self._closed:
            self._catalog = self._open_directory()
            self._batches.start(self._config.batch_timeout, self._config.decision_retention)

    def _runner(self, topic: str) -> TopicRunner:
        self._open_if_new()
        return super()._runner(topic)

    def _catalog_or_fail(self) -> Catalog:
        self._open_if_new()
        return super()._catalog_or_fail()


class SyncMemoryBroker(SyncBroker):
    """The same for code that does not await. Its loop runs only during a call, in the thread of whoever calls."""

    def __init__(self, clock: Clock | None = None, *, disk: MemoryDisk | None = None, **config: Any) -> None:
        self._memory = MemoryBroker(clock, disk=disk, **config)
        super().__init__(PATH, self._memory._config)
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> SyncMemoryBroker:
        self._loop = asyncio.new_event_loop()
        try:
            self._broker = self._run(self._memory.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def standing(self, topic: str) -> list[MessageInfo]:
        return self._memory.standing(topic)

    def topic_names(self) -> list[str]:
        return self._memory.topic_names()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise Closed
        with self._one_at_a_time:
            return self._loop.run_until_complete(work)

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def memory_broker(clock: Clock | None = None, **config: Any) -> MemoryBroker:
    """A broker in memory: `async with memory_broker() as hl: …`"""
    return MemoryBroker(clock, **config)


def memory_broker_sync(clock: Clock | None = None, **config: Any) -> SyncMemoryBroker:
    """The same for code that does not await: `with memory_broker_sync() as hl: …`"""
    return SyncMemoryBroker(clock, **config)
