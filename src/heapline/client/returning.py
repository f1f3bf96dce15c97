"""A pop that nobody waits for any more: what it still brings goes back, so that no message hangs until its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from heapline.errors import HeaplineError
from heapline.model import Message

CLOSE_SECONDS = 5.0  # for leases that are still being given back


class Returns:
    """Owned by a broker, and ended with it."""

    def __init__(self, release: Callable[[list[Message]], Awaitable[None]]) -> None:
        self._release = release
        self._tasks: set[asyncio.Task[None]] = set()

    async def pop(self, popping: Coroutine[Any, Any, list[Message]], waits: bool, is_named: bool) -> list[Message]:
        """A named pop can be repeated, and who does that has the same leases: nothing of it is given back."""
        asking = asyncio.ensure_future(popping)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if waits:
                asking.cancel()  # the server gives back what it had not answered with yet
            self.own(self._forget(asking) if is_named else self._give_back(asking))
            raise

    def late(self, messages: list[Message]) -> None:
        """They came for nobody."""
        self.own(self._give_back(_at_once(messages)))

    async def _give_back(self, asking: Awaitable[list[Message]]) -> None:
        with contextlib.suppress(HeaplineError, asyncio.CancelledError):
            if messages := await asking:
                await self._release(messages)

    @staticmethod
    async def _forget(asking: Awaitable[list[Message]]) -> None:
        with contextlib.suppress(HeaplineError, asyncio.CancelledError):
            await asking

    def own(self, work: Coroutine[Any, Any, None]) -> None:
        """Carry this out, before the broker closes at the latest."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)


async def _at_once(messages: list[Message]) -> list[Message]:
    return messages
