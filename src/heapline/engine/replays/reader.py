"""Read a replay portion by portion: scan in an I/O thread, apply mode and filter, and keep to the rate.

A fast replay reads the live messages when it starts, and again when that state is LIVING_MS old. A long replay keeps
the journal from being reclaimed with a reader lease, as any reader may have. The lease is taken only after a while:
most replays end before that, and a lease costs two syncs. The lease of a killed replay expires. A replay that waits
long between two pages (for its rate, or for space in a topic) renews it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping

from heapline.clock import Clock
from heapline.contract.errors import HeaplineError
from heapline.core.rate import TokenBucket
from heapline.engine.replays.portions import Living, Portion, Sieve, look
from heapline.engine.replays.requests import Ranges, Request
from heapline.engine.replays.scan import MergedScan, Stretch, find_moved
from heapline.engine.runner import TopicRunner
from heapline.logs import Log

log = Log("heapline.replay")
AFTER_MS = 3_000  # ms that a replay runs without a lease
RENEW_MS = 60_000
LEASE_MS = 10 * 60_000
ANY_NUMBER = 1 << 30
LOOK_MS = 20  # ms between clock reads while waiting for the rate: the clock may be moved manually
LIVING_MS = 30_000  # ms after which the live messages are read again


class Hold:
    """The lease of one replay. With `name`, a replay that continues after a restart finds its lease again."""

    def __init__(self, runner: TopicRunner, clock: Clock, name: str | None = None, after_ms: int = AFTER_MS) -> None:
        self._runner, self._clock = runner, clock
        token = os.urandom(8).hex() if name is None else hashlib.sha256(name.encode()).hexdigest()[:32]
        self._name = f"replay-{token}"
        self._next_ms = clock.boot_ms() + after_ms
        self._segment: int | None = None
        self._holds = False

    async def keep(self, segment: int) -> None:
        """Keep the segment and all segments after it."""
        self._segment = segment
        await self.renew()

    async def renew(self) -> None:
        """Renew the lease on the segments kept so far."""
        if self._segment is None or self._clock.boot_ms() < self._next_ms:
            return
        self._next_ms = self._clock.boot_ms() + RENEW_MS
        self._holds = True
        hold, until = self._runner.loaded.journal.hold, self._clock.wall_ms() + LEASE_MS
        try:
            await self._runner.io.run(hold, self._name, self._segment, until)
        except OSError as error:  # the replay may succeed without the lease
            log.warning("the journal cannot be held for a replay", topic=self._runner.name, error=str(error))

    async def end(self) -> None:
        if self._holds:
            self._holds = False
            await self._runner.io.run(self._runner.loaded.journal.release, self._name)


class Reading:
    def __init__(
        self,
        runner: TopicRunner,
        request: Request,
        ranges: Ranges,
        clock: Clock,
        seen: Iterable[int] = (),
        hold: Hold | None = None,
    ) -> None:
        self._runner, self._clock = runner, clock
        self._fast = request.mode == "fast"
        starts, ends = ({p: pair[i] for p, pair in ranges.items()} for i in (0, 1))
        self._sieve = Sieve(runner.name, runner.loaded.topic.id_suffix, starts, ends, request.where, set(seen))
        self._scan = self._begin(starts)
        self._hold = hold or Hold(runner, clock)
        self._lets_go = hold is None  # otherwise the caller keeps the hold after this reader
        self._living: Living | None = None
        self._looked_ms = 0

    @property
    def is_done(self) -> bool:
        return self._scan.is_done

    async def close(self) -> None:
        if self._lets_go:
            with contextlib.suppress(OSError, HeaplineError):  # the lease expires automatically
                await self._hold.end()

    async def stay(self) -> None:
        """Renew the hold while the caller waits with undelivered rows, so that these and later rows are kept."""
        await self._hold.renew()

    async def next(self) -> Portion:
        """Return the next portion. It may have no rows and still advance the position."""
        runner = self._runner
        if self._fast and (self._living is None or self._clock.boot_ms() - self._looked_ms > LIVING_MS):
            self._looked_ms = self._clock.boot_ms()
            self._living = await look(runner, sorted(self._sieve.ends))
        portion = self._sieve.portion(await find_moved(runner, await self._stretch()), self._living)
        if portion.bad:
            log.warning("rows of a replay cannot be read", topic=runner.name, rows=portion.bad)
        return portion

    async def _stretch(self) -> Stretch:
        runner = self._runner
        runner.check()
        if runner.loaded.journal is not self._journal:  # the topic was reloaded
            self._scan = self._begin(self._scan.positions)
        try:
            if self._scan.segment is not None:
                await self._hold.keep(self._scan.segment)
            stretch = await runner.io.run(self._scan.read)
            if self._scan.began_in is not None:
                await self._hold.keep(self._scan.began_in)
            return stretch
        except Exception:
            runner.check()  # if the journal was closed meanwhile, raise the reason; its own error has none
            raise

    def _begin(self, positions: Mapping[int, int]) -> MergedScan:
        self._journal = journal = self._runner.loaded.journal
        ranges = {p: (positions[p], end) for p, end in self._sieve.ends.items()}
        return MergedScan(journal.reader(), journal.layout, journal.load, ranges)


class Pace:
    """Admits up to `rate` rows per second, or all rows if no rate is set."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        self._clock = clock
        self._bucket = None if rate is None else TokenBucket(rate, clock.boot_ms())

    async def room(self, meanwhile: Callable[[], Awaitable[None]]) -> int:
        """Wait until at least one row is admitted, and return how many are."""
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
