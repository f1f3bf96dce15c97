"""Await operations with a deadline, on another thread's event loop, and without losing a cancellation.

Before Python 3.12, `asyncio.wait_for` forgets a cancellation that arrives together with the answer, and so do libraries
that catch it. The cancelled task would run forever, and so would any task that waits for its end: a worker whose
session was lost would never begin another one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from heapline.assign.errors import ConnectionLost

T = TypeVar("T")


async def honor_cancellation(awaitable: Awaitable[T]) -> T:
    """Await an operation of another library without losing a cancellation.

    If this task was cancelled meanwhile, raise CancelledError, whatever the operation returned.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        return await awaitable
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


async def within(seconds: float, operation: Awaitable[T]) -> T:
    """Run a store operation with a deadline. After the deadline its outcome is unknown."""
    try:
        async with asyncio.timeout(seconds):
            return await honor_cancellation(operation)
    except TimeoutError:
        raise ConnectionLost(f"no answer within {seconds:g} s") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectionLost("the operation was cancelled internally") from None


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop of this thread, or None if there is none."""
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


async def on_loop(loop: asyncio.AbstractEventLoop, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run an operation on its own event loop and wait for it, whichever thread's loop this is."""
    if asyncio.get_running_loop() is loop:
        return await operation()
    if not loop.is_running():
        raise ConnectionLost("its event loop is not running")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(operation(), loop))


def is_cancelled() -> bool:
    """Return whether this task itself is being cancelled.

    Otherwise a CancelledError came from the awaited operation, such as a cancelled task or a closed connection, and
    must not end this task silently.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, at most this many seconds, or forever if None."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await event.wait()
