"""A small stand-in for a broker with groups: one member, rows that a test puts in, and a list of all calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Context
from heapline.contract.columns import pack
from heapline.contract.groups import (
    FetchedRows,
    GroupAck,
    GroupFetch,
    GroupLeave,
    GroupNack,
    LostRows,
    PartitionBatch,
    StreamRows,
    pack_offsets,
    unpack_offsets,
)


def batch(partition: int, first: int, payloads: Sequence[bytes], attempts: int = 1, **more: Any) -> PartitionBatch:
    count = len(payloads)
    offsets = range(first, first + count)
    rows = StreamRows(
        pack(offsets),
        pack([offset + 1000 for offset in offsets]),
        list(payloads),
        pack([0] * count),
        memoryview(bytes([attempts] * count)),
        pack([1_700_000_000_000] * count),
        **more,
    )
    return PartitionBatch(partition, rows)


class FakeGroups(Broker):
    def __init__(self, *batches: PartitionBatch) -> None:
        self.waiting = list(batches)
        self.partitions, self.generation = [0, 1], 1
        self.calls: list[tuple[Any, ...]] = []
        self.held: dict[int, set[int]] = {}
        self.error: Exception | None = None
        self.left = False
        self.changed = asyncio.Event()

    def put(self, *batches: PartitionBatch) -> None:
        self.waiting += batches
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.changed.set()

    def assign(self, *partitions: int) -> None:
        self.partitions, self.generation = list(partitions), self.generation + 1
        self.changed.set()

    async def do(self, command: Any, context: Context = HERE, /) -> Any:
        match command:
            case GroupFetch():
                return await self._fetch(command)
            case GroupAck():
                return await self._settle("ack", command)
            case GroupNack():
                return await self._settle("nack", command, command.reason)
            case GroupLeave():
                self.calls.append(("leave",))
                self.left = True
        return None

    async def _fetch(self, command: GroupFetch) -> FetchedRows:
        room = command.max_messages
        self.calls.append(("fetch", room, command.wait))
        known = self.generation
        while command.wait and not self.error and self.generation == known and not (self.waiting and room):
            self.changed.clear()
            await self.changed.wait()
        if self.error is not None:
            raise self.error
        found = []
        while self.waiting and len(self.waiting[0].rows) <= room:
            found.append(self.waiting.pop(0))
            room -= len(found[-1].rows)
            self.held.setdefault(found[-1].partition, set()).update(found[-1].rows.offsets.cast("B").cast("q"))
        return FetchedRows("jobs", self.generation, list(self.partitions), found)

    async def _settle(self, verb: str, command: Any, *more: Any) -> LostRows:
        plain = unpack_offsets(command.rows)
        self.calls.append((verb, plain, *more))
        await asyncio.sleep(0)
        lost = {p: [o for o in some if o not in self.held.get(p, ())] for p, some in plain.items()}
        for p, some in plain.items():
            self.held.get(p, set()).difference_update(some)
        return LostRows(pack_offsets(lost))
