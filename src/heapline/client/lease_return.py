"""Return the leases of a pop whose caller is gone, so that its messages do not wait until their deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from heapline.contract.errors import HeaplineError
from heapline.contract.leases import LeaseKeys, Pop, Release

CLOSE_SECONDS = 5.0  # for tasks that still return leases when their broker closes


class LeaseReturn:
    """Tasks of a broker that outlive the calls they were started for, and end when the broker closes."""

    def __init__(self, do: Callable[[Any], Awaitable[Any]]) -> None:
        self._do = do
        self._tasks: set[asyncio.Task[None]] = set()

    def own(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the background. `close` waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abandon(self, pop: Pop) -> None:
        """Return what this pop, which has a request id, has leased or still leases."""
        self.own(self._release(pop))

    async def _release(self, pop: Pop) -> None:
        """Repeat the pop to learn what it leased: a repeat under the same request id returns the same leases."""
        with contextlib.suppress(HeaplineError):
            leased = await self._do(msgspec.structs.replace(pop, max_messages=1, wait=0.0, visibility=None))
            if (m := leased.messages) is not None:
                await self._do(Release(pop.topic, LeaseKeys(m.ids, m.tokens)))

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
