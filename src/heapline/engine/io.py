"""Run blocking work. The engine itself never blocks and never creates a thread: it uses this interface.

`run` is for any blocking call, and `write` for the journals' commits, which do not wait behind other calls. `ThreadIo`
is the real one. The simulator has its own, which runs everything in one thread, in fake time.

Writes have their own threads, because the hand-over is a large part of a small commit's cost: with a plain queue to the
thread and one wake-up back it takes 20 µs of CPU, and 37 µs through a `ThreadPoolExecutor` and a future. `RWF_DSYNC`
instead of `fdatasync` saved nothing measurable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar
from weakref import finalize

T = TypeVar("T")
Done = Callable[[Any, BaseException | None], None]  # (result, error)
Job = tuple[Callable[..., Any], tuple[Any, ...], Done]
THREADS = 8
WRITERS_MAX = 8  # threads that write; a broker whose topics commit one at a time has one


class Io(Protocol):
    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]: ...

    def write(self, function: Callable[..., Any], args: tuple[Any, ...], done: Done) -> None:
        """Run the function, then call `done` in a later step of the event loop. It cannot be cancelled."""
        self.run(function, *args).add_done_callback(partial(_finish, done))

    def close(self) -> None: ...


def _finish(done: Done, ran: asyncio.Future[Any]) -> None:
    error = RuntimeError("the write was cancelled") if ran.cancelled() else ran.exception()
    done(ran.result() if error is None else None, error)


class ThreadIo(Io):
    """Blocking work in threads, for the running event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="heapline-io")
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ends = _Ends(self._loop)
        self._writers: list[Thread] = []
        self._is_closed = False
        finalize(self, _stop, self._jobs, self._writers).atexit = False  # of a broker that was not closed

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run the function in a thread. `run_in_executor` would chain a second future, which costs 15 µs per call."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._pool.submit(_work, self._loop, future, function, args)
        return future

    def write(self, function: Callable[..., Any], args: tuple[Any, ...], done: Done) -> None:
        if self._is_closed:
            raise RuntimeError("the threads have ended; nothing is written after close")
        self._ends.expected += 1
        if self._ends.expected > len(self._writers) < WRITERS_MAX and (error := self._add_writer()) is not None:
            self._ends.add(done, None, error)
        else:
            self._jobs.put((function, args, done))

    def _add_writer(self) -> RuntimeError | None:
        """Start another thread. Return the error if the system allows none and there is no other to write."""
        # Daemons: an interpreter that exits without closing the broker must not wait for them. What they write then was
        # not answered.
        name = f"heapline-write-{len(self._writers)}"
        writer = Thread(target=_write, args=(self._jobs, self._ends), name=name, daemon=True)
        try:
            writer.start()
        except RuntimeError as error:
            return None if self._writers else error
        self._writers.append(writer)
        return None

    def close(self) -> None:
        """Wait until all work has ended."""
        self._is_closed = True
        _stop(self._jobs, self._writers)
        for writer in self._writers:
            writer.join()
        self._pool.shutdown(wait=True)


class _Ends:
    """Writes that have ended. Those that end before the event loop runs again wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._is_waking = False
        self.expected = 0  # writes handed over whose end has not been reported; of the loop's thread

    def add(self, done: Done, result: Any, error: BaseException | None) -> None:
        """Report the end of a write, in the thread that wrote."""
        self._ended.append((done, result, error))
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._report)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                # Nothing waits for an answer.

    def _report(self) -> None:
        self._is_waking = False  # before reading: a write that ends from now on wakes the loop again
        try:
            while self._ended:
                done, result, error = self._ended.popleft()
                self.expected -= 1
                done(result, error)
        finally:
            if self._ended:  # `done` raised
                self._loop.call_soon(self._report)


def _write(jobs: SimpleQueue[Job | None], ends: _Ends) -> None:
    """Write until a None comes. Does not hold the `ThreadIo`, so that a forgotten one is freed."""
    while (job := jobs.get()) is not None:
        function, args, done = job
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*args)
        except BaseException as problem:
            error = problem
        ends.add(done, result, error)
        del job, function, args, done, result, error  # this thread may wait for long


def _stop(jobs: SimpleQueue[Job | None], writers: list[Thread]) -> None:
    for _ in writers:
        jobs.put(None)


def _work(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], function: Callable[..., T], args: tuple[Any, ...]
) -> None:
    """Run the function in this thread, and complete the future in the loop's."""
    if future.cancelled():  # while all threads were busy
        return
    try:
        result = function(*args)
    except BaseException as error:
        loop.call_soon_threadsafe(_refuse, future, error)
    else:
        loop.call_soon_threadsafe(_give, future, result)


def _give(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
