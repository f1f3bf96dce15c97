"""Threads for plain functions. A thread cannot be stopped, so one that hangs is abandoned and replaced.

The worker's slots limit how many run at the same time. Threads are daemons, so abandoned ones do not keep a process
alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Threads:
    def __init__(self, idle_max: int) -> None:
        self._idle_max = idle_max
        self._idle: list[queue.SimpleQueue[Job | None]] = []  # used by the event loop only
        self.count = 0

    def run(self, function: Callable[[], Any], on_end: Callable[[], None]) -> asyncio.Future[Any]:
        """Return the future of the result. `on_end` is called in the loop when the function has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start(loop)
        context = contextvars.copy_context()
        ended: asyncio.Future[Any] = loop.create_future()
        ended.add_done_callback(lambda done: self._end(inbox, done, future, on_end))
        inbox.put((loop, ended, lambda: context.run(function)))
        return future

    def _start(self, loop: asyncio.AbstractEventLoop) -> queue.SimpleQueue[Job | None]:
        inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.count += 1
        threading.Thread(target=_work, args=(inbox,), name=f"heapline-task-{self.count}", daemon=True).start()
        return inbox

    def _end(
        self,
        inbox: queue.SimpleQueue[Job | None],
        done: asyncio.Future[Any],
        future: asyncio.Future[Any],
        on_end: Callable[[], None],
    ) -> None:
        if len(self._idle) < self._idle_max:
            self._idle.append(inbox)
        else:
            self._leave(inbox)
        result, error = done.result()
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        on_end()

    def _leave(self, inbox: queue.SimpleQueue[Job | None]) -> None:
        self.count -= 1
        inbox.put(None)

    def close(self) -> None:
        while self._idle:
            self._leave(self._idle.pop())


def _work(inbox: queue.SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        loop, ended, function = job
        try:
            answer: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            answer = (None, _storable(error))
        try:
            loop.call_soon_threadsafe(ended.set_result, answer)
        except RuntimeError:
            return  # the loop is closed, so the worker has ended
        del job, ended, function, answer


def _storable(error: BaseException) -> BaseException:
    """Wrap what a future cannot hold or would take for its own cancellation, and exits of the interpreter."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | asyncio.CancelledError):
        return error
    wrapped = RuntimeError(f"the handler raised {type(error).__qualname__}")
    wrapped.__cause__ = error
    return wrapped
