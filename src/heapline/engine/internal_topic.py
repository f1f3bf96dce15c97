"""Internal topics, which users cannot name: they hold the broker's own records, one message each.

So journal, group commit, snapshots, reclaiming, backups and `journal verify` work as for any topic. An internal topic
is created by its first write. If it cannot be opened, only the calls that need it fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable

import numpy as np

from heapline.contract.config import TopicConfig
from heapline.contract.errors import HeaplineError, JournalCorrupt
from heapline.core.events import Cancelled
from heapline.core.now import Now
from heapline.engine.runner import TopicRunner

NAMESPACE = "_system"  # users' topics cannot have this namespace: names start with a letter or digit
CONFIG = TopicConfig(streams=False, segment_bytes=4 << 20, max_payload_bytes=2 << 20)
READ_ROWS = 1024
READ_TRIES = 3  # before a record that cannot be read is corrupt


class InternalTopic:
    def __init__(self, name: str, make: Callable[[InternalTopic], Awaitable[TopicRunner]]) -> None:
        self.name = name
        self.runner: TopicRunner | None = None  # None if the topic does not exist
        self.refusal: HeaplineError | None = None  # why it cannot be opened
        self._make = make

    def check(self) -> None:
        """Raise the reason why the topic cannot be opened, if there is one."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)

    async def create(self) -> TopicRunner:
        """Return the topic's runner. Create the topic if it does not exist."""
        self.check()
        return self.runner or await self._make(self)

    async def read(self) -> list[tuple[int, bytes]]:
        """Return id and payload of every message, by id, which is the order of writing."""
        self.check()
        if self.runner is None:
            return []
        for _ in range(READ_TRIES - 1):
            with contextlib.suppress(JournalCorrupt):  # a record may have moved; read its current position
                return await self._read(self.runner)
        return await self._read(self.runner)

    async def _read(self, runner: TopicRunner) -> list[tuple[int, bytes]]:
        ids, positions, _ = await runner.call(lambda now: runner.loaded.topic.partitions[0].entries.waiting())
        order = ids.argsort()
        ids, positions = ids[order].tolist(), positions[order]
        found: list[tuple[int, bytes]] = []
        for start in range(0, len(ids), READ_ROWS):
            records = await runner.load(positions[start : start + READ_ROWS])
            for fact in records.bad.values():
                raise JournalCorrupt(fact.path, fact.offset, f"a record of {runner.name} ({fact.detail})")
            found += zip(ids[start : start + READ_ROWS], records.payloads, strict=True)
        return found


def cancel(runner: TopicRunner, ids: Iterable[int], now: Now) -> None:
    """Delete these messages as far as they exist. Runs in a turn."""
    partition = runner.loaded.topic.partitions[0]
    column = np.array(sorted(ids), dtype=np.int64)
    positions = partition.entries.positions_of(column)
    there = positions >= 0
    if there.any():
        runner.loaded.emit(partition, Cancelled(column[there], positions[there], bytes(int(there.sum()))), now)
