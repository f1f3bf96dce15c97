"""Depths and rates of the last day for each topic and for all together: sampled from memory, kept in small files.

A sample costs one look at counters and, while messages are ready, at the oldest of each partition. The files `series`
are beside the journals. They are not durable data: one that is missing, damaged or of another version is begun again, a
failed write is only logged, and a kill loses at most WRITE_EVERY. A topic in which nothing happens has no file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

import msgspec

from heapline.clock import Clock
from heapline.core.ids import unix_ms_of
from heapline.core.series import STEP, Sample, Series
from heapline.engine.io import Io
from heapline.engine.runner import TopicRunner
from heapline.journal.disk import Disk
from heapline.journal.small_files import sealed, unsealed
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.engine")
FILE = "series"
VERSION = 1  # of the file; a file of another version is ignored and replaced
WRITE_EVERY = 30  # samples: five minutes
NOTHING = Sample((0, 0, 0, 0), (0, 0, 0), 0)


class SeriesKeeper:
    def __init__(
        self,
        path: str,
        disk: Disk,
        clock: Clock,
        io: Callable[[], Io | None],
        runners: Callable[[], Iterable[TopicRunner]],
    ) -> None:
        self._path, self._disk, self._clock, self._current_io, self._runners = path, disk, clock, io, runners
        self._series: dict[str, Series] = {}  # by directory; that of all topics under the data directory
        self._tasks = OwnedTasks()
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True
        await self._sample_and_write(False)
        self._tasks.spawn(self._run())

    async def _run(self) -> None:
        for number in count(1):
            await asyncio.sleep(STEP)
            await self._sample_and_write(number % WRITE_EVERY == 0)

    async def _sample_and_write(self, writes: bool) -> None:
        try:
            await self.sample()
            if writes:
                await self.write()
        except Exception:  # the queue works without them
            log.exception("depths and rates not sampled")

    async def close(self) -> None:
        """Write what is known. The topics must still be open."""
        if self.is_open:
            await self._tasks.cancel()
            await self._sample_and_write(True)

    def _io(self) -> Io:
        io = self._current_io()
        assert io is not None, "the broker is open"
        return io

    def of(self, runner: TopicRunner | None) -> Series | None:
        return self._series.get(self._path if runner is None else runner.loader.directory)

    async def sample(self) -> None:
        """Sample all topics that are served."""
        runners = {runner.loader.directory: runner for runner in self._runners() if runner.is_serving}
        gone = self._series.keys() - runners.keys() - {self._path}
        for directory in gone:
            del self._series[directory]
        for directory in [self._path, *runners]:
            if directory not in self._series:
                self._series[directory] = await self._io().run(self._read, directory)
        time, total = self._clock.wall_ms() // 1000, NOTHING
        for directory, runner in runners.items():
            found = sample_of(runner)
            self._series[directory].add(time, found)
            total = Sample(
                tuple(map(sum, zip(total.depths, found.depths, strict=True))),
                tuple(map(sum, zip(total.totals, found.totals, strict=True))),
                max(total.oldest_wait, found.oldest_wait),
            )
            await asyncio.sleep(0)
        self._series[self._path].add(time, total)

    async def write(self) -> None:
        for directory, series in list(self._series.items()):
            if series.is_changed:
                await self._io().run(self._write, directory, msgspec.msgpack.encode(series.to_state()))

    def _write(self, directory: str, state: bytes) -> None:
        try:
            self._disk.write_file_atomic(f"{directory}/{FILE}", sealed(VERSION, state))
        except OSError as error:  # the topic was deleted, or the disk is full
            log.warning("series not written", cause=type(error).__name__, directory=directory)

    def _read(self, directory: str) -> Series:
        try:
            content = unsealed(VERSION, bytes(self._disk.read_file(f"{directory}/{FILE}")))
            return Series.from_state(msgspec.msgpack.decode(content, type=list[object]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, msgspec.DecodeError) as error:
            log.warning("series cannot be read; beginning again", cause=str(error), directory=directory)
        return Series()


def sample_of(runner: TopicRunner) -> Sample:
    entries = [p.entries for p in runner.loaded.topic.partitions]
    depths = (
        sum(e.ready for e in entries),
        sum(e.delayed for e in entries),
        sum(len(e.leases) for e in entries),
        sum(len(e.dead) for e in entries),
    )
    counters = runner.counters
    failed = counters.nacked + counters.timeouts + counters.dead
    oldest = [p.census.oldest_ready() for p in runner.loaded.topic.partitions] if depths[0] else []
    ages = [runner.steady.now().steady - unix_ms_of(id) for id in oldest if id is not None]
    return Sample(depths, (counters.enqueued, counters.acked, failed), max(0, *ages, 0) // 1000)
