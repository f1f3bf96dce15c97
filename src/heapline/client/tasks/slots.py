"""A worker's places: so many handlers at once. Who waits longest for one gets the next that is free."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """One place, in turn."""
        if self.free and not self._waiting:
            self.free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.give()  # it was ours already
            else:
                self._waiting.remove(mine)
            raise

    def take_free(self, most: int) -> int:
        """As many more as are free just now and nobody waits for."""
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
