"""Maintenance of one topic: snapshots, when to reclaim segments (segment_reclaimer.py), and syncs at intervals.

Nothing here changes the visible state of the queue. A snapshot is captured in one turn, right after a unit is sealed,
so it contains exactly the units up to that one; it is written after that unit is durable.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from heapline.contract.errors import HeaplineError
from heapline.core.now import Now
from heapline.engine.segment_reclaimer import SegmentReclaimer
from heapline.engine.snapshot_state import Frozen, freeze
from heapline.logs import Log

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner
    from heapline.journal.journal import Journal
    from heapline.journal.snapshot import SnapshotStore

log = Log("heapline.engine")
IDLE_LOOK = 30.0  # seconds


class Upkeep:
    def __init__(self, runner: TopicRunner) -> None:
        self._runner = runner
        self.snapshot_at = 0  # steady ms
        self._lock = asyncio.Lock()
        self.snapshots_total = 0
        self.reclaimer = SegmentReclaimer(runner, self._make_durable)

    async def run(self) -> None:
        """Run the background loop until the topic closes."""
        runner = self._runner
        self.snapshot_at = runner.steady.now().steady
        while True:
            await asyncio.sleep(runner.config.reclaim_interval)
            try:
                if self._is_snapshot_due():
                    await self.snapshot()
                await self.reclaim()
            except Exception as error:  # one failure must not end maintenance
                log.warning("upkeep failed, will be tried again", topic=runner.name, error=repr(error))

    async def sync_at_intervals(self) -> None:
        """Sync under the `interval` policy; under the others, check occasionally whether the policy has changed."""
        runner = self._runner
        while True:
            config = runner.loaded.topic.config
            if config.fsync != "interval":
                await asyncio.sleep(IDLE_LOOK)
                continue
            await asyncio.sleep(config.fsync_interval)
            if runner.is_serving:
                try:
                    await runner.loaded.committer.between_commits(runner.loaded.journal.sync)
                except (HeaplineError, OSError) as error:
                    log.warning("sync failed", topic=runner.name, error=str(error))

    def _is_snapshot_due(self) -> bool:
        runner = self._runner
        journal = runner.loaded.journal
        if journal.written_unit <= runner.loaded.snapshot_unit:
            return False
        if runner.loaded.bytes_since_snapshot >= runner.config.snapshot_bytes:
            return True
        age = runner.steady.now().steady - self.snapshot_at
        return age >= runner.config.snapshot_interval * 1000

    @property
    def segments_reclaimed_total(self) -> int:
        return self.reclaimer.segments_total

    @property
    def records_moved_total(self) -> int:
        return self.reclaimer.records_moved_total

    async def reclaim(self) -> None:
        """Delete unneeded segments. Never runs while a snapshot is being written."""
        async with self._lock:
            await self.reclaimer.reclaim()

    async def snapshot(self) -> None:
        """Write a snapshot of the topic's current state."""
        async with self._lock:
            runner = self._runner
            unit, frozen, journal, store = await runner.call(self._capture)
            if unit <= max(runner.loaded.snapshot_unit, store.newest_unit):
                return
            await self._make_durable(journal, unit)
            await runner.io.run(self._write, store, unit, frozen)
            if journal is not runner.loaded.journal:
                return  # reloaded meanwhile; the snapshot has only durable units and stays valid
            runner.loaded.note_snapshot(unit)
            self.snapshot_at = runner.steady.now().steady
            self.snapshots_total += 1

    def _capture(self, now: Now) -> tuple[int, Frozen, Journal, SnapshotStore]:
        """Close the open unit and take references to the state after it. Runs in a turn."""
        runner = self._runner
        runner.loaded.topic.forget_passed(now)
        runner.loaded.topic.seal(runner.loaded.journal, now)
        unit = runner.loaded.journal.open_unit_number - 1
        return unit, freeze(runner.loaded.topic, unit), runner.loaded.journal, runner.loaded.snapshots

    async def _make_durable(self, journal: Journal, unit: int) -> None:
        """Sync the journal up to `unit`. Under the relaxed policies, written units may not be durable. A snapshot ahead
        of its journal, or a segment deleted for acks that a power cut undoes, would be corruption."""
        if journal.durable_unit < unit:
            await self._runner.loaded.committer.between_commits(journal.sync)

    @staticmethod
    def _write(store: SnapshotStore, unit: int, frozen: Frozen) -> None:
        store.write(unit, frozen.encode(), frozen.blobs)
