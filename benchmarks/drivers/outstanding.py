"""For libraries that call a handler per message: as many batches in progress as tasks are in flight elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.drivers.window import Job


class Outstanding:
    """A turn ends when as many messages were processed as it enqueued: the same closed loop as one that pops them."""

    def __init__(self, job: Job, enqueue: Callable[[], Awaitable[object]]) -> None:
        self._batch = job.batch
        self._enqueue = enqueue
        self._worked = 0
        self._done = asyncio.Semaphore(0)

    async def turn(self) -> int:
        await self._enqueue()
        await self._done.acquire()
        return self._batch

    def worked_off(self) -> None:
        """Called by the handler, for each message."""
        self._worked += 1
        if self._worked % self._batch == 0:
            self._done.release()
