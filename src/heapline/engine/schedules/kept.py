"""The book of a broker's schedules together with its store: what is told of it is durable.

A change is made in the book and its write begins in the same step (`keep`), so the order of writes is that of changes.
Who looks waits for the writes that are under way then. If a write fails nobody knows what is on disk: the book is
thrown away, and read again (`know`) when all writes under way have ended. A done mark that is lost in that way costs
nothing, since the topic knows which firings it has (see firing.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from heapline.engine.schedules.store import ScheduleStore
from heapline.schedules import Book

T = TypeVar("T")


class KeptBook:
    def __init__(self, store: ScheduleStore) -> None:
        self.store = store
        self.book = Book()
        self._is_known = False  # whether the book is what is on disk
        self._reading = asyncio.Lock()
        self._writes: set[asyncio.Future[bool]] = set()  # under way; whether they succeeded
        self._put_off: dict[str, int] = {}  # schedule -> when it is tried again, unless it succeeds first

    async def know(self) -> None:
        """Have a book that is what is on disk, or raise."""
        if self._is_known:
            return
        async with self._reading:  # one reads for all who ask meanwhile
            if self._is_known:
                return
            while self._writes:
                await asyncio.wait(self._writes)
            self.book, self._is_known = Book.from_state(await self.store.read()), True
            for name, until in self._put_off.items():
                self.book.postpone(name, until)

    async def keep(self, name: str) -> None:
        """Make durable what was just changed of a schedule, in the same step: a book that is read again must not come
        between."""
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
        """What stands in the book, once that is durable."""
        while True:
            await self.know()
            found = look(self.book)
            writes = list(self._writes)
            if writes:
                await asyncio.wait(writes)
            if all(write.result() for write in writes):
                return found

    def postpone(self, name: str, until: int) -> None:
        """Leave it out until then, also in the book that is read when this one could not be kept."""
        self._put_off[name] = until
        self.book.postpone(name, until)

    def has_succeeded(self, name: str) -> None:
        """It need not be left out any longer, or is gone."""
        self._put_off.pop(name, None)
