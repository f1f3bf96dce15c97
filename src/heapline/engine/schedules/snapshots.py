"""A broker's schedule book together with its store: every value read from it is durable.

A change is made in the book and its write begins in the same step (`keep`), so writes have the order of the changes. A
read waits for the writes in progress. If a write fails, the state on disk is unknown: the book is discarded and read
again (`know`) when all writes in progress have ended. A done mark that is lost this way does no harm, because the topic
knows which firings it has (see firings.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from heapline.core.schedules.book import Book
from heapline.engine.schedules.store import ScheduleStore

T = TypeVar("T")


class KeptBook:
    def __init__(self, store: ScheduleStore) -> None:
        self.store = store
        self.book = Book()
        self._is_known = False  # whether the book matches the disk
        self._reading = asyncio.Lock()
        self._writes: set[asyncio.Future[bool]] = set()  # in progress; whether they succeeded
        self._put_off: dict[str, int] = {}  # schedule -> time of the next attempt, unless it succeeds first

    async def know(self) -> None:
        """Ensure that the book matches the disk, or raise."""
        if self._is_known:
            return
        async with self._reading:  # one task reads for all concurrent callers
            if self._is_known:
                return
            while self._writes:
                await asyncio.wait(self._writes)
            self.book, self._is_known = Book.from_state(await self.store.read()), True
            for name, until in self._put_off.items():
                self.book.postpone(name, until)

    async def keep(self, name: str) -> None:
        """Make a change durable. Call it in the same step as the change, so that no reload comes between."""
        write: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writes.add(write)
        succeeded = False
        try:
            await self.store.write(self.book, [name])
            succeeded = True
        finally:
            self._is_known = self._is_known and succeeded
            self._writes.discard(write)
            write.set_result(succeeded)

    async def look(self, look: Callable[[Book], T]) -> T:
        """Return the result of `look` on the book, once that state is durable."""
        while True:
            await self.know()
            found = look(self.book)
            writes = list(self._writes)
            if writes:
                await asyncio.wait(writes)
            if all(write.result() for write in writes):
                return found

    def postpone(self, name: str, until: int) -> None:
        """Skip the schedule until `until`, even if the book is reloaded after a failed write."""
        self._put_off[name] = until
        self.book.postpone(name, until)

    def has_succeeded(self, name: str) -> None:
        """Stop skipping a schedule that succeeded or was deleted."""
        self._put_off.pop(name, None)
