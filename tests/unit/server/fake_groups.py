"""A small stand-in for a broker with groups: one member, rows that a test puts in, and a list of all calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heapline.errors import DeliveryLost
from heapline.streams import Fetched, Payloads, StreamBatch


def batch(partition: int, first: int, payloads: Sequence[bytes], attempts: int = 1, **more: Any) -> StreamBatch:
    count = len(payloads)
    offsets = np.arange(first, first + count, dtype=np.int64)
    blob = b"".join(payloads)
    ends = np.cumsum([len(p) for p in payloads], dtype=np.int64)
    sizes = np.array([len(p) for p in payloads], dtype=np.int64)
    return StreamBatch(
        None, "jobs", partition, offsets, offsets + 1000, Payloads(memoryview(blob), ends - sizes, ends),
        np.zeros(count, dtype=np.int64), np.full(count, attempts, dtype=np.int64),
        np.full(count, 1_700_000_000_000, dtype=np.int64), **more,
    )  # fmt: skip


class FakeGroups:
    def __init__(self, *batches: StreamBatch) -> None:
        self.waiting = list(batches)
        self.partitions, self.generation = [0, 1], 1
        self.calls: list[tuple[Any, ...]] = []
        self.held: dict[int, set[int]] = {}
        self.error: Exception | None = None
        self.left = False
        self.changed = asyncio.Event()

    def put(self, *batches: StreamBatch) -> None:
        self.waiting += batches
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.changed.set()

    def assign(self, *partitions: int) -> None:
        self.partitions, self.generation = list(partitions), self.generation + 1
        self.changed.set()

    async def group_fetch(
        self, topic: str, group: str, member: str, *, session: str, max_messages: int, max_bytes: int, wait: float,
        start: Any, config: Mapping[str, Any],
    ) -> Fetched:  # fmt: skip
        self.calls.append(("fetch", max_messages, wait))
        known = self.generation
        while wait and not self.error and self.generation == known and not (self.waiting and max_messages):
            self.changed.clear()
            await self.changed.wait()
        if self.error is not None:
            raise self.error
        found = []
        while self.waiting and len(self.waiting[0]) <= max_messages:
            found.append(self.waiting.pop(0))
            max_messages -= len(found[-1])
            self.held.setdefault(found[-1].partition, set()).update(found[-1].offsets.tolist())
        return Fetched(found, list(self.partitions), self.generation)

    async def group_ack(self, topic: str, group: str, member: str, offsets: Any, *, session: str) -> None:
        await self._settle("ack", offsets)

    async def group_nack(
        self, topic: str, group: str, member: str, offsets: Any, *, session: str, reason: str | None
    ) -> None:
        await self._settle("nack", offsets, reason)

    async def _settle(self, verb: str, offsets: Any, *more: Any) -> None:
        plain = {p: [int(o) for o in some] for p, some in offsets.items()}
        self.calls.append((verb, plain, *more))
        await asyncio.sleep(0)
        lost = [(p, o) for p, some in plain.items() for o in some if o not in self.held.get(p, ())]
        for p, some in plain.items():
            self.held.get(p, set()).difference_update(some)
        if lost:
            raise DeliveryLost([p for p, _ in lost], [o for _, o in lost], "jobs", "g")

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        self.calls.append(("leave",))
        self.left = True
