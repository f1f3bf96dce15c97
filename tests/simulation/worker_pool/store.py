"""A key-value store that behaves as badly as the protocol allows.

Writes are atomic and see the newest state. Everything else fails on demand: requests and answers are late or lost (an
unanswered write may have been applied, or may be much later), reads are stale, watchers miss events, clients are cut
off. Faults are drawn from the run's random numbers.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from heapline.assign.errors import ConnectionLost
from heapline.assign.kv import Conflict, Entry, is_under_prefix
from tests.simulation.worker_pool.process import Process

T = TypeVar("T")


@dataclass
class Faults:
    """The current fault rates; `calm()` ends all faults."""

    latency: float = 0.002  # mean seconds per direction
    slow: float = 0.0  # share of messages that take up to `slow_max` seconds
    slow_max: float = 4.0
    late: float = 0.0  # share of requests that are applied up to `late_max` seconds later, after all callers gave up
    late_max: float = 25.0
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    lost_events: float = 0.0
    stale: float = 0.0  # share of stale reads
    stale_max: float = 17.0

    def calm(self) -> None:
        self.slow = self.late = self.lost_requests = self.lost_answers = self.lost_events = self.stale = 0.0


@dataclass
class _Version:
    at: float
    entry: Entry | None
    ends_at: float


@dataclass
class Store:
    """The true state with its history."""

    clock: Callable[[], float]
    on_write: Callable[[Entry], None]
    _versions: dict[str, list[_Version]] = field(default_factory=dict)
    _revision: int = 0
    clients: list[Client] = field(default_factory=list)

    def find(self, key: str, at: float) -> Entry | None:
        versions = self._versions.get(key, [])
        index = bisect_right(versions, at, key=lambda version: version.at)
        if not index or at >= versions[index - 1].ends_at:
            return None
        return versions[index - 1].entry

    def write(self, key: str, value: bytes | None, expected: int | None, ttl: float | None) -> int:
        """Write a key. `expected` None means that the key must not exist."""
        now = self.clock()
        entry = self.find(key, now)
        if (entry.revision if entry is not None else None) != expected:
            raise Conflict(key)
        self._revision += 1
        written = None if value is None else Entry(key, value, self._revision)
        ends_at = float("inf") if ttl is None else now + ttl
        versions = self._versions.setdefault(key, [])
        versions.append(_Version(now, written, ends_at))
        if len(versions) > 400:
            del versions[:200]
        if written is not None:
            self.on_write(written)
        for client in self.clients:
            client.deliver(key, written)
        return self._revision

    def entries(self, prefix: str, at: float) -> list[Entry]:
        found = [self.find(key, at) for key in sorted(self._versions) if is_under_prefix(prefix, key)]
        return [entry for entry in found if entry is not None]


class Client:
    """One process's connection. Implements `KV`."""

    def __init__(self, store: Store, process: Process, faults: Faults, rng: random.Random) -> None:
        self._store, self._process, self._faults, self._rng = store, process, faults, rng
        self._loop = asyncio.get_running_loop()
        self._watchers: list[tuple[str, asyncio.Queue[Entry | None]]] = []
        self.is_cut = False
        self.lag = 0.0  # seconds by which all reads are stale at least, as on a lagging node
        self.is_deaf = False  # its watchers receive nothing
        self.answer_delay = 0.0  # least seconds until an answer
        self.cuts_after_write = False  # it is cut off right after the next answer to a write
        store.clients.append(self)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        return await self._call(lambda: self._store.write(key, value, None, ttl), True)

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        return await self._call(lambda: self._store.write(key, value, revision, ttl), True)

    async def delete(self, key: str, revision: int) -> None:
        await self._call(lambda: self._store.write(key, None, revision, None), True)

    async def get(self, key: str) -> Entry | None:
        return await self._call(lambda: self._store.find(key, self._past()))

    async def entries(self, prefix: str) -> list[Entry]:
        return await self._call(lambda: self._store.entries(prefix, self._past()))

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        watcher = (prefix, asyncio.Queue[Entry | None]())
        self._watchers.append(watcher)
        try:
            while True:
                yield await watcher[1].get()
        finally:
            self._watchers.remove(watcher)

    # --- faults

    def _past(self) -> float:
        lag = self.lag
        if self._rng.random() < self._faults.stale:
            lag = max(lag, self._rng.uniform(0, self._faults.stale_max))
        return self._store.clock() - lag

    def _delay(self) -> float:
        if self._rng.random() < self._faults.slow:
            return self._rng.uniform(0, self._faults.slow_max)
        return self._rng.expovariate(1 / self._faults.latency)

    async def _call(self, operation: Callable[[], T], writes: bool = False) -> T:
        if self._process.is_dead:
            raise ConnectionLost("the process is dead")
        answer: asyncio.Future[T] = self._loop.create_future()
        if self._rng.random() >= self._faults.lost_requests:
            late = self._rng.uniform(0, self._faults.late_max) if self._rng.random() < self._faults.late else 0.0
            self._loop.call_later(late + self._delay(), self._arrive, operation, answer, writes)
        return await answer

    def _arrive(self, operation: Callable[[], Any], answer: asyncio.Future[Any], writes: bool) -> None:
        if self.is_cut:
            # Requests sent while cut off arrive later, or never.
            if self._rng.random() < 0.5:
                self._loop.call_later(self._rng.uniform(0.1, 3.0), self._arrive, operation, answer, writes)
            return
        try:
            result, error = operation(), None
        except Conflict as conflict:
            result, error = None, conflict
        if self._rng.random() >= self._faults.lost_answers:
            delay = max(self._delay(), self.answer_delay)
            self._loop.call_later(delay, self._answer, answer, result, error, writes)

    def _answer(self, answer: asyncio.Future[Any], result: Any, error: Exception | None, writes: bool) -> None:
        if answer.done() or self.is_cut:
            return
        if writes and self.cuts_after_write:
            self.is_cut, self.cuts_after_write = True, False
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def deliver(self, key: str, entry: Entry | None) -> None:
        if self.is_cut or self.is_deaf or self._process.is_dead:
            return
        for prefix, queue in self._watchers:
            if is_under_prefix(prefix, key) and self._rng.random() >= self._faults.lost_events:
                self._loop.call_later(self._delay(), queue.put_nowait, entry)
