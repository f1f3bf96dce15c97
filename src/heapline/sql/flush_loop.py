"""The background task of a flusher: flush while there is something, wait for more, and try again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg

from heapline.contract.errors import HeaplineError, UnavailableError
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.sql")
RETRY_SECONDS = 0.2  # after a flush that failed


class FlushLoop:
    def __init__(
        self,
        shard: int,
        poll: float,  # seconds between flushes, if nothing is known to wait
        flush: Callable[[], Awaitable[bool]],  # returns whether everything was flushed
        failed: Callable[[HeaplineError], None],  # notifies the calls that wait for a flush
    ) -> None:
        self._shard, self._poll, self._flush, self._failed = shard, poll, flush, failed
        self._work = asyncio.Event()
        self._tasks = OwnedTasks()
        self.failures_total = 0

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.cancel()

    def wake(self) -> None:
        """Flush now: there is something."""
        self._work.set()

    async def _run(self) -> None:
        while True:
            self._work.clear()
            try:
                if await self._flush():
                    await self._sleep()
            except (HeaplineError, OSError, asyncpg.PostgresError) as error:
                log.warning("flush failed; will retry", shard=self._shard, error=str(error))
                await self._retry(error)
            except Exception as error:  # a failed flush must not stop the flushes that follow
                log.exception("flush failed; will retry", shard=self._shard)
                await self._retry(error)

    async def _retry(self, error: Exception) -> None:
        self.failures_total += 1
        if not isinstance(error, HeaplineError):
            error = UnavailableError(f"cannot flush messages ({error}); retry")
        self._failed(error)
        await asyncio.sleep(RETRY_SECONDS)

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(self._poll):
                await self._work.wait()
        except TimeoutError:
            return
