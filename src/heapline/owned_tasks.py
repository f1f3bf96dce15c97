"""Background tasks with an owner, which waits for them or cancels them when it closes; waits and locks by key.

asyncio keeps only weak references to tasks, so a task without an owner can be collected while it runs. An owner keeps a
reference until the task ends, and retrieves its exception. A task that should report its errors must do so itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
CANCEL_SECONDS = 5.0  # after which a task is cancelled again: a library may have swallowed the cancellation


async def until_done(future: asyncio.Future[T]) -> T:
    """Wait for a future even if the caller is cancelled: for a write that the next write must follow."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


class OwnedTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that this owner keeps until it ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run_to_completion(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result. If the caller is cancelled, the work continues, owned."""
        return await asyncio.shield(self.spawn(work))

    async def join(self, seconds: float | None = None) -> None:
        """Wait until all tasks have ended, or for `seconds`. Without a limit, tasks that start meanwhile count too."""
        while self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
            if seconds is not None:
                return

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. The calling task, if owned, is left running."""
        current = asyncio.current_task()
        left = {task for task in self._tasks if task is not current}
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the caller that would have received it may have been cancelled


class KeyedLocks(Generic[K]):
    """One lock per key; a lock exists only while a task holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[K, tuple[asyncio.Lock, list[None]]] = {}

    def __iter__(self) -> Iterator[K]:
        return iter(self._locks)

    @asynccontextmanager
    async def alone(self, key: K) -> AsyncIterator[None]:
        """Run one block per key at a time."""
        lock, users = self._locks.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._locks[key]
