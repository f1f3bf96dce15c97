"""The key-value store that `heapline.assign` needs, the `KV` protocol, and its in-memory implementation.

**Required.** Revisions are numbers that rise with every write to any key of the store and are never reused. `create`
and `update` are atomic and see the newest state. All safety rests on this alone; anything else may fail in any way.

**Not required.** `get` and `entries` may return old values (17 s old on NATS), `watch` may lose events or stall (18 s
on NATS), and a key's ttl may end late. So no component ends a lease, leads or holds a partition because of what it
read. It writes by compare-and-set, or waits for time to pass on its own clock.

**Outcomes.** `Conflict`: the write was not applied and never will be. `ConnectionLost`: unknown; the write may have
been applied, or may still be.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from heapline.assign.errors import AssignError
from heapline.contract.errors import ConflictError

R = TypeVar("R", bound=msgspec.Struct)


class Entry(NamedTuple):
    """One key with its value and revision."""

    key: str
    value: bytes
    revision: int


class Conflict(AssignError, ConflictError):
    """A compare-and-set found another revision than expected. The key did not change."""

    fields = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key!r} is at another revision than expected; read it and decide again")


class KV(Protocol):
    """A store with compare-and-set.

    Keys are tokens of the characters A-Z a-z 0-9 _ - joined with dots. A ttl is in seconds and belongs to one write:
    the key is removed when that time passes without another write.
    """

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Write a key that does not exist (never written, deleted or expired) and return its revision.

        Raise Conflict if it exists.
        """
        ...

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        """Write a key that is at exactly this revision and return the new one.

        Raise Conflict otherwise; a missing key conflicts with every revision.
        """
        ...

    async def delete(self, key: str, revision: int) -> None:
        """Remove a key that is at exactly this revision. Raise Conflict otherwise."""
        ...

    async def get(self, key: str) -> Entry | None:
        """Return the key's current or an older entry, or None if it does not or did not exist."""
        ...

    async def entries(self, prefix: str) -> list[Entry]:
        """Return the current or older entries of all keys under a prefix.

        A prefix is empty, a key, or text that ends with a dot.
        """
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        """Yield writes under a prefix from now on: an entry, or None for "something changed, poll the store".

        None means that a key was removed or that events may be lost. Events are hints: they may be late, merged or
        missing. The iterator ends by raising ConnectionLost, or when it is closed.
        """
        ...


class MemoryKV:
    """A store in memory: for tests, for worker pools in one process, and as the model for other stores.

    Every read is fresh and every watcher gets every event; the simulator adds the faults around it. An expired key is
    removed without an event, as in NATS.

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
        self._stored: dict[str, tuple[Entry, float]] = {}  # key: its entry, and when it expires
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
        self._revision += 1  # a deletion takes a revision, too
        del self._stored[key]
        self._notify(key, None)

    async def get(self, key: str) -> Entry | None:
        return self._find(key)

    async def entries(self, prefix: str) -> list[Entry]:
        found = [self._find(key) for key in sorted(self._stored) if is_under_prefix(prefix, key)]
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
        entry, ends_at = self._stored.get(key, (None, math.inf))
        if self._clock() >= ends_at:
            del self._stored[key]
            return None
        return entry

    def _write(self, key: str, value: bytes, ttl: float | None) -> int:
        self._revision += 1
        entry = Entry(key, bytes(value), self._revision)
        self._stored[key] = (entry, math.inf if ttl is None else self._clock() + ttl)
        self._notify(key, entry)
        return self._revision

    def _notify(self, key: str, entry: Entry | None) -> None:
        for prefix, queue in self._watchers:
            if is_under_prefix(prefix, key):
                queue.put_nowait(entry)


def is_under_prefix(prefix: str, key: str) -> bool:
    """Return whether a key is under a prefix.

    `worker.` covers `worker.w-1`, `leader` covers only itself, and the empty prefix covers all keys.
    """
    return key.startswith(prefix) if prefix == "" or prefix.endswith(".") else key == prefix


def encode_record(record: msgspec.Struct) -> bytes:
    """Encode a record as JSON."""
    return msgspec.json.encode(record)


def decode_record(value: bytes, kind: type[R]) -> R | None:
    """Decode a record; return None if the value is not one, because other programs may write to the same keys."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
