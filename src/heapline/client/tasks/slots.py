"""Slots of a worker: how many handlers run at the same time. The longest waiting task gets the next free slot."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a slot."""
        if self.free and not self._waiting:
            self.free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.give()  # it had been granted already
            else:
                self._waiting.remove(mine)
            raise

    def take_free(self, most: int) -> int:
        """Take up to `most` slots that are free and that no task waits for; return how many."""
        count = 0 if self._waiting else min(self.free, most)
        self.free -= count
        return count

    def give(self, count: int = 1) -> None:
        for _ in range(count):
            while self._waiting and self._waiting[0].done():
                self._waiting.popleft()
            if self._waiting:
                self._waiting.popleft().set_result(None)
            else:
                self.free += 1
