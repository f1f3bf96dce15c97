"""The key-value contract in memory: for tests, for a crowd within one process, and as the model for other stores.

Every read is fresh and every watcher hears everything; the simulator adds the faults around it. Time is a function
that is passed in; a key whose ttl has ended is gone for whoever looks, without an event, as in NATS.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from heapline.assign.kv import Conflict, Entry


@dataclass(slots=True)
class _Kept:
    entry: Entry
    ends_at: float | None


class MemoryKV:
    """
    >>> kv = MemoryKV()
    >>> async def main():
    ...     first = await kv.create("leader", b"ada")
    ...     second = await kv.update("leader", b"bob", first)
    ...     return (await kv.get("leader")).value, second - first
    >>> asyncio.run(main())
    (b'bob', 1)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._revision = 0
        self._watchers: set[tuple[str, asyncio.Queue[Entry | None]]] = set()

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        if self._find(key) is not None:
            raise Conflict(key)
        return self._write(key, value, ttl)

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        self._expect(key, revision)
        return self._write(key, value, ttl)

    async def delete(self, key: str, revision: int) -> None:
        self._expect(key, revision)
        self._revision += 1  # a deletion is a write, too
        del self._kept[key]
        self._tell(key, None)

    async def get(self, key: str) -> Entry | None:
        return self._find(key)

    async def entries(self, prefix: str) -> list[Entry]:
        found = [self._find(key) for key in sorted(self._kept) if covers(prefix, key)]
        return [entry for entry in found if entry is not None]

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        watcher = (prefix, asyncio.Queue[Entry | None]())
        self._watchers.add(watcher)
        try:
            while True:
                yield await watcher[1].get()
        finally:
            self._watchers.discard(watcher)

    def _expect(self, key: str, revision: int) -> None:
        entry = self._find(key)
        if entry is None or entry.revision != revision:
            raise Conflict(key)

    def _find(self, key: str) -> Entry | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.ends_at is not None and self._clock() >= kept.ends_at:
            del self._kept[key]
            return None
        return kept.entry

    def _write(self, key: str, value: bytes, ttl: float | None) -> int:
        self._revision += 1
        entry = Entry(key, bytes(value), self._revision)
        self._kept[key] = _Kept(entry, None if ttl is None else self._clock() + ttl)
        self._tell(key, entry)
        return self._revision

    def _tell(self, key: str, entry: Entry | None) -> None:
        for prefix, queue in self._watchers:
            if covers(prefix, key):
                queue.put_nowait(entry)


def covers(prefix: str, key: str) -> bool:
    """Whether a key lies under a prefix: `worker.` covers `worker.w-1`, `leader` only itself, the empty one all."""
    return key.startswith(prefix) if prefix == "" or prefix.endswith(".") else key == prefix
