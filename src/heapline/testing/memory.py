"""An in-memory broker, for tests of programs that use Heapline: the real engine, on a disk that is a dictionary.

No files and no threads: work for threads runs immediately, in the caller's own step. So it opens quickly and
automatically at its first use, in the event loop of that use, and again when that loop is closed; a test need not close
it. It keeps everything that `heapline.open` keeps, except that its content is lost when the process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from heapline.clock import Clock
from heapline.contract.config import BrokerConfig, make_broker_config
from heapline.contract.errors import Closed
from heapline.contract.message import MessageInfo
from heapline.core.ids import partition_of
from heapline.engine.broker import EmbeddedBroker, SyncBroker
from heapline.engine.catalog import Catalog
from heapline.engine.internal_topic import NAMESPACE
from heapline.engine.io import Io
from heapline.engine.lookup import Record, living
from heapline.engine.runner import TopicRunner
from heapline.engine.schedules.store import NAME
from heapline.engine.topics import TopicKeeper
from heapline.testing.clock import HandClock
from heapline.testing.memory_disk import MemoryDisk

T = TypeVar("T")
PATH = "/memory"


class InlineIo(Io):
    """An `Io` that runs everything immediately."""

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


class MemoryTopics(TopicKeeper):
    """Topics on a disk in memory. They open at their first use, in the event loop of that use."""

    def __init__(self, clock: Clock | None, disk: MemoryDisk | None, config: BrokerConfig) -> None:
        self.memory = disk or MemoryDisk()
        self._home: asyncio.AbstractEventLoop | None = None  # the event loop that it serves in
        self._opens_itself = disk is None
        self._reset(config, clock)

    def _reset(self, config: BrokerConfig, clock: Clock | None) -> None:
        super().__init__(PATH, config=config, disk=self.memory, io=InlineIo(), clock=clock)

    def names(self) -> list[str]:
        return sorted(self._runners)

    def time_moved(self) -> None:
        for runner in self._all_runners():
            if not runner.loop.is_closed():
                runner.later(lambda now: None)
        self.schedules.poke()

    def abandon(self) -> None:
        self._closed = True
        for runner in self._all_runners():
            if not runner.loop.is_closed():
                for task in list(runner.tasks):
                    task.cancel()
        for watch in self.batches.watches:
            if not watch.get_loop().is_closed():
                watch.cancel()
        self.schedules.abandon()
        self.replays.stop()
        self.directory.release()

    # -- automatic opening -----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._catalog is None:
            self._home = asyncio.get_running_loop()
            await super()._start()

    def _open_here(self) -> None:
        """Open at the first use, and reload from the disk when the loop of the last use is closed."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # only inspected, without a loop
        if loop is self._home or self._closed:
            return
        if self._home is None:
            if not self._opens_itself:
                return
        elif not self._home.is_closed():
            raise RuntimeError("this broker serves another event loop that still runs; create one broker per loop")
        elif self.batches.decisions.topic.runner is not None:  # decisions are read in turns, which need a loop
            raise RuntimeError("after commit_batch, call hl.abandon() and continue with MemoryBroker(disk=hl.disk)")
        else:
            self.directory.release()
            self._reset(self._config, self._clock)
        self._home = loop
        run_in_one_step(self._open_without_tasks())

    async def _open_without_tasks(self) -> None:
        """Do the work of `_start` without tasks."""
        self._catalog = self.directory.open()
        entries = dict(self._catalog.entries)
        kept = entries.pop((NAMESPACE, NAME), None)
        if kept is not None:
            await self._open_internal(self.schedules.store.topic, kept)
        for entry in entries.values():
            await self._load(entry)
        self.batches.start(self._config.batch_timeout, self._config.decision_retention)
        self.schedules.start()
        self.replays.open()

    def runner(self, topic: str) -> TopicRunner:
        self._open_here()
        return super().runner(topic)

    def _catalog_or_fail(self) -> Catalog:
        if self._catalog is None or self._all_runners():  # not while it is being opened
            self._open_here()
        return super()._catalog_or_fail()


class MemoryBroker(EmbeddedBroker):
    """An in-memory broker. Use it with `async with MemoryBroker() as hl: …`, or directly.

    With your own `clock` (`HandClock`), time advances when you move it; otherwise it is the system's. To test what a
    restart keeps, pass the same `disk` to a second broker after the first was closed. Other keywords are fields of
    BrokerConfig.
    """

    topics: MemoryTopics

    def __init__(self, clock: Clock | None = None, *, disk: MemoryDisk | None = None, **config: Any) -> None:
        fields = {"spare_segment_bytes": 0, **config}  # a disk that is never full needs no spares
        self.topics = MemoryTopics(clock, disk, make_broker_config(fields))
        if isinstance(clock, HandClock):
            clock.watch(self)

    @property
    def disk(self) -> MemoryDisk:
        return self.topics.memory

    def standing(self, topic: str) -> list[MessageInfo]:
        """Return all messages of a topic, in any state, oldest first. Reads without a turn, so needs no await."""
        return _live_messages(self.topics.runner(topic))

    def topic_names(self) -> list[str]:
        return self.topics.names()

    def time_moved(self) -> None:
        """Serve waiting callers after the clock was moved: messages may be due now."""
        self.topics.time_moved()

    def abandon(self) -> None:
        """Close it from outside its event loop, which may be closed: no more calls are answered."""
        self.topics.abandon()


def _live_messages(runner: TopicRunner) -> list[MessageInfo]:
    """Return all live messages, oldest first, read from the engine's own tables without a turn.

    It blocks while it reads each live record. Messages of uncommitted batches are not included.
    """
    topic = runner.loaded.topic
    packed = [topic.layout.pack(segment, topic.live.places(segment), 0) for segment in topic.live.segments()]
    positions = np.concatenate(packed) if packed else np.zeros(0, dtype=np.int64)
    if not len(positions):
        return []
    records, missing = runner.loaded.journal.cached(positions)
    if len(missing):
        records.fill(missing, runner.loaded.journal.load(positions[missing]))
    infos: list[MessageInfo] = []
    for i in range(len(positions)):
        if i in records.bad:
            continue
        record = Record(records, i)
        partition = topic.partitions[int(partition_of(record.id))]
        row = partition.entries.find(record.id)
        if row is not None:
            infos.append(living(topic, partition, record.id, row, record))
    return sorted(infos, key=lambda info: info.id)


def run_in_one_step(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits to its end, and return its result. Needs no event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise AssertionError(f"{work!r} must not wait")


class SyncMemoryBroker(SyncBroker):
    """A blocking in-memory broker. Its loop runs only during a call, in the caller's thread."""

    def __init__(self, clock: Clock | None = None, *, disk: MemoryDisk | None = None, **config: Any) -> None:
        self._memory = MemoryBroker(clock, disk=disk, **config)
        super().__init__(PATH, self._memory.topics.config)
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
        self._refuse_own_thread(work)
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
    """Return an in-memory broker: `async with memory_broker() as hl: …`"""
    return MemoryBroker(clock, **config)


def memory_broker_sync(clock: Clock | None = None, **config: Any) -> SyncMemoryBroker:
    """Return a blocking in-memory broker: `with memory_broker_sync() as hl: …`"""
    return SyncMemoryBroker(clock, **config)
