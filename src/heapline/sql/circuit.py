"""Whether a shard answers. While it does not, calls fail immediately, and one task here tries to reach it.

A broken connection, or one that cannot be opened, shows immediately that the shard is down. A host that stalls breaks
nothing: its statements just take long, as a slow statement does. So if calls are in progress and none has been answered
for QUIET_SECONDS, a new connection is opened to ask. If that is not answered either, the shard is down, and the calls
that wait for it are cut off.

It also counts the connections in use: a call that waits for a free one must fail when the shard goes down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic

from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.sql")
CHECK_SECONDS = 1.0  # between checks whether calls wait without an answer
QUIET_SECONDS = 2.0  # without an answer, after which the shard is asked
PING_SECONDS = 3.0  # that a shard may take to answer
PROBE_SECONDS = 0.2  # between attempts to reach a shard that is down


class Circuit:
    def __init__(
        self,
        shard: int,
        connections: int,
        ping: Callable[[], Awaitable[bool]],
        cut: Callable[[], Awaitable[None]],
    ) -> None:
        self._shard, self._free = shard, connections
        self._ping, self._cut = ping, cut  # whether the shard answers; end all connections
        self.is_up = True
        self._down = asyncio.Event()
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a free connection
        self._calls = 0  # in progress
        self._answered_at = 0.0  # when the last of them was answered, or the first one began
        self._tasks = OwnedTasks()

    def start(self) -> None:
        self._tasks.spawn(self._watch())

    async def close(self) -> None:
        await self._tasks.cancel()

    def fail(self) -> None:
        """Let calls fail until the shard answers again."""
        self.is_up = False
        self._down.set()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionError("it went down while this call waited for a connection"))

    def answered(self) -> None:
        self._answered_at = monotonic()

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold one of the connections. Raise ConnectionError if the shard goes down before one is free."""
        if not self._calls:
            self.answered()
        self._calls += 1
        try:
            await self._wait_for_connection()
            try:
                yield
            finally:
                self._release()
        finally:
            self._calls -= 1

    async def _wait_for_connection(self) -> None:
        if self._free:
            self._free -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                self._release()  # it was handed over just before
            raise

    def _release(self) -> None:
        """Hand a connection over to the call that has waited longest."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._free += 1

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._down.wait()
            if not self.is_up:
                await self._until_up()
            elif self._is_quiet() and not await self._ping() and self._is_quiet():
                log.error("shard does not answer; its calls are cut off", shard=self._shard, calls=self._calls)
                self.fail()
                await self._cut()

    def _is_quiet(self) -> bool:
        return self._calls > 0 and monotonic() - self._answered_at >= QUIET_SECONDS

    async def _until_up(self) -> None:
        while not await self._ping():  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(PROBE_SECONDS)
        self._down.clear()
        self.is_up = True
        self.answered()
