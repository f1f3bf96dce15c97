"""Group commit: write one unit while the next one fills, and send answers when they are durable.

One committer serves one loaded topic. When a write fails it sends no more answers; the runner abandons it, waits until
its last I/O has ended (a file must not be closed during a write), and reloads the topic with another committer. Use it
in the event loop's thread only; `commit`, `prepare` and other work on the journal run elsewhere, one at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from heapline.contract.errors import HeaplineError
from heapline.core.now import Now
from heapline.engine.counters import Counters
from heapline.engine.io import Io
from heapline.engine.topic import Topic
from heapline.journal.log import TopicLog
from heapline.journal.unit import SealedUnit

T = TypeVar("T")
FULL_DISK_PAUSE = 0.25  # seconds between checks for space on a full disk: constant checks would wear it out


class GroupCommitter:
    def __init__(
        self,
        topic: Topic,
        journal: TopicLog,
        io: Io,
        now: Callable[[], Now],
        failed: Callable[[BaseException], None],
        counters: Counters,
    ) -> None:
        self._topic = topic
        self._journal = journal
        self._io = io
        self._now = now
        self._failed = failed
        self._counters = counters
        self._queue: deque[SealedUnit] = deque()
        self.queued_bytes = 0  # of sealed units that wait or are being written
        self._answers: deque[tuple[int, Callable[[], None], Sequence[asyncio.Future[Any]]]] = deque()
        self._between: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._running: tuple[Callable[[], Any], asyncio.Future[Any]] | None = None  # the one of `_between` in progress
        self._room_waiters: deque[asyncio.Future[None]] = deque()
        self._busy = False  # the single I/O call is in progress
        self._rest: asyncio.TimerHandle | None = None  # timer of the next check for space
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._when_free: Callable[[], None] | None = None
        self._abandoned: HeaplineError | None = None

    # -- answers ---------------------------------------------------------------------------------------------------

    def answer(self, give: Callable[[], None], futures: Sequence[asyncio.Future[Any]]) -> None:
        """Send an answer once everything decided so far is durable; `futures` are the ones that it completes."""
        waits_for = self._journal.open_unit_number - (not self._topic.open_frames)
        if waits_for <= self._journal.written_unit:
            give()
        else:
            self._answers.append((waits_for, give, futures))

    @property
    def durable_unit(self) -> int:
        """The last unit that may be answered. A relaxed policy promises only that the unit is written."""
        return self._journal.written_unit

    # -- commits ---------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Pass the next unit to the writer if it is idle."""
        if self._abandoned is not None:
            return
        self._take_sealed()  # even while the disk is busy: the queue counts the waiting bytes
        if not self._busy and not self._start_next() and self._journal.wants_prepare:
            self.prepare_soon()

    def _start_next(self) -> bool:
        """Start the next write, or other work on the journal. Return False if there is none."""
        if self._between:
            self._run_between()
            return True
        if not self._queue and self._topic.open_frames:
            self._topic.seal(self._journal, self._now())
            self._take_sealed()
        if not self._queue:
            return False
        unit = self._queue.popleft()
        self._start(self._journal.commit, (unit,), partial(self._committed, unit, perf_counter()))
        return True

    def _take_sealed(self) -> None:
        for unit in self._journal.take_sealed():
            self._queue.append(unit)
            self.queued_bytes += unit.nbytes

    def _start(self, work: Callable[..., Any], args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Run the single I/O call; `then` gets its result. A failure ends this committer."""
        self._busy = True
        self._io.write(work, args, partial(self._ended, then))

    def _ended(self, then: Callable[[Any], None], result: Any, error: BaseException | None) -> None:
        self._busy = False
        while self._idle_waiters:
            give(self._idle_waiters.pop(), None)
        if self._abandoned is not None:
            return
        if error is not None:
            self._failed(error)
            return
        then(result)
        if self._when_free is not None:
            call, self._when_free = self._when_free, None
            call()

    @property
    def is_writing(self) -> bool:
        return self._busy

    def when_free(self, call: Callable[[], None]) -> None:
        """Call `call` once, when the I/O call in progress has succeeded and its answers have been sent."""
        self._when_free = call

    def _committed(self, unit: SealedUnit, began: float, _: None) -> None:
        counters = self._counters
        counters.commits += 1
        counters.commit.add(perf_counter() - began)
        counters.bytes_written += unit.nbytes
        self.queued_bytes -= unit.nbytes
        if self._rest is None and self._journal.wants_prepare:
            self.prepare_soon()
        else:  # the disk first, then the answers
            self._take_sealed()
            self._start_next()
        durable = self._journal.written_unit
        while self._answers and self._answers[0][0] <= durable:
            self._answers.popleft()[1]()
        while self._room_waiters and not self.is_backed_up(self._room_limit):
            give(self._room_waiters.popleft(), None)

    def prepare_soon(self) -> None:
        """Prepare space before anything else is written."""
        if not self._busy and self._abandoned is None and self._rest is None:
            self._start(self._journal.prepare, (), self._prepared)

    def _prepared(self, can_grow: bool) -> None:
        if not can_grow:
            self._rest = asyncio.get_running_loop().call_later(FULL_DISK_PAUSE, self._rested)
        self.pump()

    def _rested(self) -> None:
        self._rest = None
        self.pump()

    async def between_commits(self, work: Callable[[], T]) -> T:
        """Run blocking work on the journal that must not overlap a commit."""
        if self._abandoned is not None:
            raise self._abandoned
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._between.append((work, future))
        self.pump()
        return await future

    def _run_between(self) -> None:
        work, future = self._running = self._between.popleft()

        def then(result: Any) -> None:
            self._running = None
            give(future, result)
            self.pump()

        self._start(work, (), then)

    # -- backpressure ----------------------------------------------------------------------------------------------

    _room_limit = 1 << 62

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait for the disk or are being written."""
        return self.queued_bytes + self._journal.open_bytes

    def is_backed_up(self, limit: int) -> bool:
        """Return whether more than `limit` bytes wait for the disk."""
        return self.queued_bytes > 0 and self.queued_bytes + self._journal.open_bytes > limit

    async def wait_for_room(self, limit: int, seconds: float) -> None:
        """Wait until fewer than `limit` bytes wait; raise TimeoutError if that takes too long."""
        self._room_limit = limit
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room_waiters.append(future)
        await asyncio.wait_for(future, seconds)

    # -- shutdown --------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Make all decisions durable."""
        while self._abandoned is None and (self._busy or self._queue or self._between or self._topic.open_frames):
            if not self._busy:  # else its end starts the next call, or fails; a failed journal accepts no calls
                self.pump()
            await self._io_done()
        self._end_rest()

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def abandon(self, error: HeaplineError) -> None:
        """Fail all waiting answers with `error`; send no others from now on."""
        self._abandoned = error
        self._end_rest()
        self._queue.clear()
        while self._answers:
            for future in self._answers.popleft()[2]:
                refuse(future, error)
        if self._running is not None:
            self._between.append(self._running)
        while self._between:
            refuse(self._between.popleft()[1], error)
        while self._room_waiters:
            give(self._room_waiters.popleft(), None)  # they check for the failure themselves

    async def idle(self) -> None:
        """Wait until no I/O is in progress."""
        while self._busy:
            await self._io_done()

    async def _io_done(self) -> None:
        if self._busy:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(future)
            await future


def give(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
