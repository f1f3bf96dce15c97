"""Fire schedules on time, and change them: a loop that sleeps until a schedule is due.

One task at a time works on a schedule (`_locks`): its firing, or a change that first enqueues what the schedule still
owes (best effort: a full topic does not prevent pausing or deleting). Different schedules do not wait for each other;
group commit combines their writes.

Every reported value is durable; see store.py. The reason why each firing is enqueued once is in firings.py.

The scheduler uses the wall clock and reads it at least every ten seconds, so that it notices a clock change.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from heapline.contract.call import PageBuilder
from heapline.contract.config import short
from heapline.contract.errors import Closed, HeaplineError, ScheduleNotFound, StaleEpoch
from heapline.contract.schedules import Schedule, ScheduleInfo, schedule_name
from heapline.core.latency import Latency
from heapline.core.schedules.book import Book, Taken, schedule_info
from heapline.core.schedules.records import ScheduleFired, ScheduleState
from heapline.engine.columns import check_one
from heapline.engine.runner import TopicRunner
from heapline.engine.schedules.firings import Sent, producer_of, send
from heapline.engine.schedules.store import KeptBook, ScheduleStore, check_size
from heapline.logs import Log
from heapline.owned_tasks import KeyedLocks, OwnedTasks

log = Log("heapline.engine")
T = TypeVar("T")
RETRY_MS = 5000  # ms until a failed enqueue is retried
PAUSE = 5.0  # seconds between attempts to read the schedules
CLOSE_SECONDS = 5.0  # seconds that running firings get to finish when the broker closes
UNDER_WAY_MAX = 256  # concurrent firings: a topic handles them all in one step
ROUNDS_MAX = 10  # rounds of firings that a change enqueues first


class Scheduler:
    """Runs the schedules of a broker. `topic` returns the runner of a topic, or raises."""

    def __init__(
        self, store: ScheduleStore, *, topic: Callable[[str], TopicRunner], wall_ms: Callable[[], int]
    ) -> None:
        self.store = store
        self._topic = topic
        self._wall_ms = wall_ms
        self._kept = KeptBook(store)
        self._poked = asyncio.Event()
        self._locks: KeyedLocks[str] = KeyedLocks()  # for a firing or change of a schedule
        self._troubles: dict[str, str] = {}  # schedule -> why its last firing could not be enqueued
        self._tasks = OwnedTasks()
        self._firings: set[asyncio.Task[None]] = set()  # those of `_tasks` that fire
        self._loop: asyncio.Task[None] | None = None
        self._closed = False
        self.fired = 0  # messages enqueued
        self.missed = 0  # times that a schedule was late, and `misfire` decided
        self.failed = 0  # attempts that did not enqueue everything
        self.delay = Latency()  # from a firing's planned time until it was durable

    def __len__(self) -> int:
        return len(self._book)

    @property
    def failing(self) -> int:
        """Schedules whose last firing could not be enqueued."""
        return len(self._troubles)

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.ensure_future(self._run())

    def poke(self) -> None:
        """Check the clock now."""
        self._poked.set()

    async def close(self) -> None:
        """Stop, before the topics are closed. Work in progress may finish."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._tasks.join(CLOSE_SECONDS)
        self.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abandon(self) -> None:
        """End all tasks now: unfinished firings are still owed."""
        self._closed = True
        for task in (*self._tasks, *((self._loop,) if self._loop is not None else ())):
            if not task.get_loop().is_closed():
                task.cancel()

    async def _run(self) -> None:
        while True:
            self._poked.clear()
            try:
                await self._know()
                self._begin_due()
                now = self._wall_ms()
                wake = self._book.next_wake(now)
                is_busy = len(self._firings) >= UNDER_WAY_MAX
                pause = None if wake is None or is_busy else max(0, wake - now) / 1000
            except (HeaplineError, OSError) as error:
                log.error("schedules cannot be read", error=str(error), retry_in=PAUSE)
                pause = PAUSE
            except Exception:
                log.exception("schedules failed; will retry")
                pause = PAUSE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._poked.wait()

    async def _know(self) -> None:
        if self._closed:
            raise Closed
        await self._kept.know()

    async def _keep(self, name: str) -> None:
        try:
            await self._kept.keep(name)
        finally:
            self.poke()

    @property
    def _book(self) -> Book:
        return self._kept.book

    # -- firing ----------------------------------------------------------------------------------------------------

    async def fire_due(self) -> None:
        """Fire everything due by now and wait for it. Firings that cannot be enqueued are retried later."""
        await self._know()
        self._begin_due()
        while self._firings:  # including those that the loop started
            await asyncio.wait(self._firings, return_when=asyncio.FIRST_COMPLETED)
            self._begin_due()

    def _begin_due(self) -> None:
        """Start as many firings as allowed. Each one that ends wakes the loop, which starts more."""
        now = self._wall_ms()
        for one in self._book.take_due(now, UNDER_WAY_MAX - len(self._firings)):
            self._postpone(one.name)  # a successful firing reschedules it
            firing = self._tasks.spawn(self._fire(one.name))
            self._firings.add(firing)
            firing.add_done_callback(self._firings.discard)

    async def _fire(self, name: str) -> None:
        try:
            async with self._locks.alone(name):
                await self._know()
                await self._settle(name)
        except ScheduleNotFound:  # deleted meanwhile
            self._kept.has_succeeded(name)
        except (HeaplineError, OSError) as error:  # of the store: the done mark is behind, but the topic knows
            if not self._closed:
                log.warning("schedule failed; will retry", schedule=name, error=str(error))
        except Exception:
            log.exception("schedule failed; will retry", schedule=name)
        self.poke()

    async def _settle(self, name: str) -> bool:
        """Enqueue what a schedule owes. Return True if it owed something and all of it was enqueued."""
        now = self._wall_ms()
        taken = self._book.take_one(name, now)
        if taken is None:
            return False
        state = self._book.get(name).state
        sent = await self._send(state, taken)
        await self._know()
        self._tell(name, taken, sent)
        record = _record(taken, sent)
        if isinstance(sent.error, StaleEpoch):
            self._outdo(state, sent.error)
        elif record is None:
            self._postpone(name)
            return False
        else:
            self._book.apply(record)
            if sent.error is not None:
                self._postpone(name)
        await self._keep(name)
        if sent.error is None:
            self._kept.has_succeeded(name)
        return sent.error is None

    def _postpone(self, name: str) -> None:
        self._kept.postpone(name, self._wall_ms() + RETRY_MS)

    async def _send(self, state: ScheduleState, taken: Taken) -> Sent:
        if not taken.messages:  # all firings were skipped
            return Sent(0, 0)
        try:
            return await send(self._topic(short(taken.topic)), state, taken)
        except HeaplineError as error:  # the topic does not exist or cannot be opened
            return Sent(0, 0, error)

    def _outdo(self, state: ScheduleState, error: StaleEpoch) -> None:
        """Raise the schedule's incarnation above the topic's: the book is an older copy than the topic."""
        name = state.schedule.name
        if name in self._book and self._book.get(name).state.incarnation == state.incarnation:
            partitions = self._topic(state.schedule.topic).loaded.topic.partitions
            done = max(p.state.sequences.done_up_to(producer_of(name)) for p in partitions)
            self._book.outdo(name, error.current, done, self._wall_ms())

    def _tell(self, name: str, taken: Taken, sent: Sent) -> None:
        self.fired += sent.new
        now = self._wall_ms()
        for at in taken.times[sent.done - sent.new : sent.done]:
            self.delay.add(max(0, now - at) / 1000)
        if sent.error is None or isinstance(sent.error, StaleEpoch):
            self.missed += taken.missed and sent.error is None
            self._troubles.pop(name, None)
            return
        if isinstance(sent.error, Closed):
            return
        self.failed += 1
        if name not in self._troubles:
            log.warning("schedule cannot fire", schedule=name, topic=taken.topic, error=str(sent.error))
        self._troubles[name] = str(sent.error)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def set(self, schedule: Schedule) -> ScheduleInfo:
        check_size(schedule)
        self._check_topic(schedule)

        def change() -> bool:
            changed = self._book.set(schedule, self._wall_ms()) is not None
            if changed:
                self._troubles.pop(schedule.name, None)
            return changed

        return await self._to_its_end(self._change(schedule.name, change))

    def _check_topic(self, schedule: Schedule) -> None:
        """Raise if the topic, with its current settings, does not accept the schedule's message."""
        runner = self._topic(short(schedule.topic))
        message = schedule.message(self._wall_ms())
        check_one(message, runner.loaded.topic.config, runner.name)

    async def pause(self, name: str) -> ScheduleInfo:
        return await self._to_its_end(self._change(schedule_name(name), lambda: self._pause(name)))

    def _pause(self, name: str) -> bool:
        self._troubles.pop(schedule_name(name), None)  # owed firings are dropped
        return self._book.pause(name, self._wall_ms()) is not None

    async def resume(self, name: str) -> ScheduleInfo:
        return await self._to_its_end(self._change(schedule_name(name), lambda: self._resume(name)))

    def _resume(self, name: str) -> bool:
        return self._book.resume(name, self._wall_ms()) is not None

    async def delete(self, name: str) -> None:
        await self._to_its_end(self._delete(schedule_name(name)))

    async def get(self, name: str) -> ScheduleInfo:
        await self._know()
        return await self._kept.look(lambda book: self._info(book, name))

    async def list_all(self) -> list[ScheduleInfo]:
        await self._know()
        return await self._kept.look(lambda book: [self._info(book, name) for name in book.names()])

    async def page(self, after: str, limit: int) -> tuple[list[ScheduleInfo], str | None]:
        """Return a page of schedules by name, and the name to continue after. A page of large schedules is short."""
        await self._know()
        return await self._kept.look(lambda book: self._page(book, schedule_name(after) if after else "", limit))

    def _page(self, book: Book, after: str, limit: int) -> tuple[list[ScheduleInfo], str | None]:
        names = book.names()
        page: PageBuilder[ScheduleInfo] = PageBuilder(limit)
        for name in names[bisect_right(names, after) :]:
            if not page.add(self._info(book, name)):
                return page.items, page.items[-1].name
        return page.items, None

    def _info(self, book: Book, name: str) -> ScheduleInfo:
        standing = book.get(name)
        return schedule_info(standing, self._troubles.get(standing.state.schedule.name), self._wall_ms())

    async def _change(self, name: str, change: Callable[[], bool]) -> ScheduleInfo:
        async with self._locks.alone(name):
            await self._bring_in(name)
            await self._know()
            if change():
                await self._keep(name)
            return await self._kept.look(lambda book: self._info(book, name))

    async def _delete(self, name: str) -> None:
        async with self._locks.alone(name):
            await self._bring_in(name)
            await self._know()
            self._book.delete(name)
            self._troubles.pop(name, None)
            self._kept.has_succeeded(name)
            await self._keep(name)

    async def _bring_in(self, name: str) -> None:
        """Enqueue what a schedule owes, before it changes."""
        await self._know()
        if name in self._book:
            for _ in range(ROUNDS_MAX):
                if not await self._settle(name):
                    return

    # -- tasks -----------------------------------------------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish a change even if its caller is cancelled: half a change would leave a book unlike the disk."""
        task = self._tasks.spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise Closed from None
            raise


def _record(taken: Taken, sent: Sent) -> ScheduleFired | None:
    """Return the record of the owed firings that are done, or None if none are."""
    if sent.done == len(taken.messages):
        return taken.record
    if not sent.done:
        return None
    last = taken.times[sent.done - 1]
    return ScheduleFired(taken.name, taken.record.incarnation, last, last, sent.done)
