"""An event loop in virtual time: a whole broker in one thread, and the same run for the same seed.

When nothing is ready the loop does not wait: it moves its clock to the next timer. When there is no timer either,
nothing can ever happen again, and `Deadlock` is raised with the waiting tasks. No sockets, threads or signals:
callers of those get NotImplementedError from asyncio itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from heapline.testing.clock import FakeClock

T = TypeVar("T")


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set."""


class _NoSelector:
    """Replaces waiting for sockets: time jumps instead."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.skip(timeout)
        return []

    def close(self) -> None:
        pass


class SimLoop(asyncio.BaseEventLoop):
    """`time()` is the fake clock's true time, in seconds."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__()
        self.clock = clock or FakeClock()
        self._selector = _NoSelector(self)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.clock.elapsed_ns / 1e9

    def skip(self, timeout: float | None) -> None:
        if timeout is None:
            tasks = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Deadlock(f"nothing is ready and no timer is set; these wait forever: {', '.join(tasks)}")
        if timeout > 0:
            self.clock.advance_ns(math.ceil(timeout * 1e9))

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass  # no thread sleeps in a selector, so none needs to be woken


def run(work: Coroutine[Any, Any, T], clock: FakeClock | None = None) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` does in real time.

    >>> async def nap():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(nap())
    3600.0
    """
    loop = SimLoop(clock)
    try:
        return loop.run_until_complete(work)
    finally:
        cancel_all(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def cancel_all(loop: SimLoop) -> None:
    """Cancel all remaining tasks, and those that they start meanwhile."""
    for _ in range(100):
        left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        if not left:
            return
        for task in left:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.wait(left, timeout=60))
        except Deadlock:
            return
