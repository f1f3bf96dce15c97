"""Reads a replay portion by portion: the scan in an I/O thread, the mode and the filter, and not faster than its rate.

What a fast replay knows of the living is as old as its reading, and looked at again when that is a while ago.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping

from heapline.clock import Clock
from heapline.core.rate import TokenBucket
from heapline.engine.replays import living
from heapline.engine.replays.asking import Request
from heapline.engine.replays.holding import Hold
from heapline.engine.replays.mending import mend
from heapline.engine.replays.portions import Portion, Sieve
from heapline.engine.replays.ranges import Ranges
from heapline.engine.replays.scan import MergedScan, Stretch
from heapline.engine.runner import TopicRunner
from heapline.errors import HeaplineError
from heapline.logs import Log

log = Log("heapline.replay")
ANY_NUMBER = 1 << 30
LOOK_MS = 20  # how often the clock is looked at while a rate is waited for: it may be moved by hand
LIVING_MS = 30_000  # after which it is looked again who is living


class Reading:
    def __init__(
        self, runner: TopicRunner, request: Request, ranges: Ranges, clock: Clock, seen: Iterable[int] = (),
        hold: Hold | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._clock = runner, clock
        self._fast = request.mode == "fast"
        starts, ends = ({p: pair[i] for p, pair in ranges.items()} for i in (0, 1))
        self._sieve = Sieve(runner.name, starts, ends, request.where, set(seen))
        self._scan = self._begin(starts)
        self._hold = hold or Hold(runner, clock)
        self._lets_go = hold is None  # else the hold is for longer than this reading
        self._living: living.Living | None = None
        self._looked_ms = 0

    @property
    def is_done(self) -> bool:
        return self._scan.is_done

    async def close(self) -> None:
        if self._lets_go:
            with contextlib.suppress(OSError, HeaplineError):  # it runs out by itself
                await self._hold.end()

    async def stay(self) -> None:
        """For whoever waits with rows in hand: what comes after them, and they themselves, must be there later."""
        await self._hold.renew()

    async def next(self) -> Portion:
        """The next portion; it may have no rows, and still stand further on."""
        runner = self._runner
        if self._fast and (self._living is None or self._clock.boot_ms() - self._looked_ms > LIVING_MS):
            self._looked_ms = self._clock.boot_ms()
            self._living = await living.look(runner, sorted(self._sieve.ends))
        portion = self._sieve.portion(await mend(runner, await self._stretch()), self._living)
        if portion.bad:
            log.warning("rows of a replay cannot be read", topic=runner.name, rows=portion.bad)
        return portion

    async def _stretch(self) -> Stretch:
        runner = self._runner
        runner.check()
        if runner.journal is not self._journal:  # it was loaded again
            self._scan = self._begin(self._scan.positions)
        try:
            if self._scan.segment is not None:
                await self._hold.keep(self._scan.segment)
            stretch = await runner.io.run(self._scan.read)
            if self._scan.began_in is not None:
                await self._hold.keep(self._scan.began_in)
            return stretch
        except Exception:
            runner.check()  # a journal that was closed meanwhile says no more than that
            raise

    def _begin(self, positions: Mapping[int, int]) -> MergedScan:
        self._journal = journal = self._runner.journal
        ranges = {p: (positions[p], end) for p, end in self._sieve.ends.items()}
        return MergedScan(journal.reader(), journal.layout, journal.load, ranges)


class Pace:
    """Lets so many a second go; all of them, without a rate."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        self._clock = clock
        self._bucket = None if rate is None else TokenBucket(rate, clock.boot_ms())

    async def room(self, meanwhile: Callable[[], Awaitable[None]]) -> int:
        """How many may go now; waits until one may."""
        bucket = self._bucket
        if bucket is None:
            return ANY_NUMBER
        while not (room := bucket.room(self._clock.boot_ms())):
            await meanwhile()
            await asyncio.sleep(min(LOOK_MS, bucket.next_in(self._clock.boot_ms())) / 1000)
        return room

    def went(self, count: int) -> None:
        if self._bucket is not None:
            self._bucket.take(count)
