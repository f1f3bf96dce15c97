"""Single calls of many coroutines, joined into few: what waits while a call is under way goes together in the next one.

A lane carries calls of one kind to one topic, one batch at a time and in the order in which they were made, so what
one caller asks for stays in order even when a batch has to be repeated. Nothing lingers: an idle lane starts in the
same turn of the loop, and takes along all that was asked in it. Each caller gets its own result or its own error.

`Gathering` decides what goes together and knows neither loop nor wire; how a batch is carried is the lane's owner's.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

COUNT_MAX = 1000  # messages or leases in one batch
FEW = 2  # times as many make a crowd
MOMENT = 0.05  # seconds that a few wait for a crowd at most: some round trips, and nothing against a lease
BYTES_MAX = 1 << 20  # of payloads in one batch; a larger one goes alone


class Single:
    """One caller's call: what it asks, and where it waits for the answer."""

    __slots__ = ("count", "future", "nbytes", "until", "what")

    def __init__(self, what: Any, future: Any, until: float, nbytes: int = 0, count: int = 1) -> None:
        self.what, self.future, self.until, self.nbytes, self.count = what, future, until, nbytes, count


class Gathering:
    """What waits, in order, and how much of it goes next."""

    def __init__(
        self, count_max: int = COUNT_MAX, bytes_max: int = BYTES_MAX, apart: Callable[[Any], Any] | None = None
    ) -> None:
        self._count_max, self._bytes_max = count_max, bytes_max
        self._apart = apart  # two of which this says the same are not told apart in an answer: they go one by one
        self._waiting: deque[Single] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, single: Single) -> None:
        self._waiting.append(single)

    def take(self) -> list[Single]:
        """The next batch: as many as fit, without those that nobody waits for any more."""
        waiting, batch, size, count = self._waiting, list[Single](), 0, 0
        names: set[Any] = set()
        while waiting:
            single = waiting[0]
            if single.future.done():  # cancelled before it was sent
                waiting.popleft()
                continue
            if batch and (count + single.count > self._count_max or size + single.nbytes > self._bytes_max):
                break
            if self._apart is not None:
                name = self._apart(single.what)
                if name in names:
                    break
                names.add(name)
            size += single.nbytes
            count += single.count
            batch.append(waiting.popleft())
        return batch

    def waiting(self) -> list[Single]:
        return [single for single in self._waiting if not single.future.done()]


class Crowd:
    """Keeps callers together that go the same way: what all lanes of a topic know of each other.

    Of hundreds that enqueue, take and ack, a few are always ahead. By themselves they would cost as many calls as all
    the others, for ever. So a few wait for an answer that is under way, and the others catch up. Where no more than a
    few were seen lately, nobody waits. Nor does anybody wait long: a call that the server holds back, or that is
    repeated until its deadline, says nothing about the others.
    """

    def __init__(self) -> None:
        self._size = 0  # of what went together lately
        self._under_way = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def gathered(self, count: int) -> None:
        """So many would go now."""
        if 0 < count * FEW < self._size and self._under_way:
            loop = asyncio.get_running_loop()
            waiting = loop.create_future()
            self._waiting.append(waiting)
            timer = loop.call_later(MOMENT, _end, waiting)
            try:
                await waiting
            finally:
                timer.cancel()

    def left(self, count: int) -> None:
        self._size = max(count, self._size // 2)
        self._under_way += 1

    def came_back(self) -> None:
        self._under_way -= 1
        for waiting in self._waiting:
            _end(waiting)
        self._waiting.clear()


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Lane:
    def __init__(
        self, gathering: Gathering, carry: Callable[[list[Single]], Awaitable[None]],
        own: Callable[[Coroutine[Any, Any, None]], None], give_up: Callable[[bool], Exception], width: int = 1,
        crowd: Crowd | None = None,
    ) -> None:  # fmt: skip
        self._gathering, self._carry, self._own = gathering, carry, own
        self._give_up = give_up  # what a call is told whose time is over, sent or not
        self._width = width  # batches under way at a time; only with one of them are calls carried out in order
        self._crowd = crowd or Crowd()
        self._running = 0
        self._under_way: list[Single] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # to ask which one runs is a system call

    def put(self, what: Any, until: float, nbytes: int = 0, count: int = 1) -> asyncio.Future[Any]:
        """A future of the answer. Whoever cancels it before it is sent has sent nothing."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._gathering.add(Single(what, future, until, nbytes, count))
        if self._timer is None:
            self._timer = loop.call_at(until, self._look)
        if self._running < self._width:
            self._running += 1
            self._own(self._run())
        return future

    async def _run(self) -> None:
        try:
            while True:
                await self._crowd.gathered(len(self._gathering))
                if not (batch := self._gathering.take()):
                    break
                self._under_way += batch
                self._crowd.left(len(batch))
                try:
                    await self._carry(batch)
                except Exception as error:
                    fail(batch, error)
                finally:
                    self._crowd.came_back()
                    self._under_way = [s for s in self._under_way if not s.future.done()] if self._width > 1 else []
        finally:
            self._running -= 1

    def _look(self) -> None:
        """A batch is carried until the last deadline in it: whose own is over is told now."""
        loop = asyncio.get_running_loop()
        calls = [(s, True) for s in self._under_way if not s.future.done()]
        calls += [(s, False) for s in self._gathering.waiting()]
        for single, sent in calls:
            if single.until <= loop.time():
                refuse(single, self._give_up(sent))
        left = [single.until for single, _ in calls if not single.future.done()]
        self._timer = loop.call_at(min(left), self._look) if left else None

    def end(self, error: Exception) -> None:
        """Nothing is sent any more: those who wait are told why."""
        fail(self._gathering.waiting(), error)
        if self._timer is not None:
            self._timer.cancel()


def answer(single: Single, result: Any) -> None:
    if not single.future.done():
        single.future.set_result(result)


def refuse(single: Single, error: Exception) -> None:
    if not single.future.done():
        single.future.set_exception(error)


def fail(batch: list[Single], error: Exception) -> None:
    """Each caller raises an error of its own: one object would gather all their tracebacks."""
    for single in batch:
        refuse(single, copy.copy(error))
