"""Upkeep of one topic: snapshots, and when segments are given back (reclaiming.py); syncing at intervals.

Nothing here changes what anybody can see of the queue. A snapshot is captured in one turn, right after a unit is
sealed, so it stands for exactly the units up to that one; it is written after that unit is durable.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from heapline.engine.freeze import Frozen, freeze
from heapline.engine.reclaiming import SegmentReclaimer
from heapline.errors import HeaplineError
from heapline.logs import Log
from heapline.model import Now

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
        """The background loop; ends when the topic closes."""
        runner = self._runner
        self.snapshot_at = runner.steady.now().steady
        while True:
            await asyncio.sleep(runner.config.reclaim_interval)
            try:
                if self._is_snapshot_due():
                    await self.snapshot()
                await self.reclaim()
            except Exception as error:  # whatever it is, one failure must not end upkeep for good
                log.warning("upkeep failed, will be tried again", topic=runner.name, error=repr(error))

    async def sync_at_intervals(self) -> None:
        """Under the `interval` policy; under the others it only looks now and then whether that has changed."""
        runner = self._runner
        while True:
            config = runner.topic.config
            if config.fsync != "interval":
                await asyncio.sleep(IDLE_LOOK)
                continue
            await asyncio.sleep(config.fsync_interval)
            if runner.is_serving:
                try:
                    await runner.committer.between_commits(runner.journal.sync)
                except (HeaplineError, OSError) as error:
                    log.warning("sync failed", topic=runner.name, error=str(error))

    def _is_snapshot_due(self) -> bool:
        runner = self._runner
        journal = runner.journal
        if journal.written_unit <= runner.snapshot_unit:
            return False
        if runner.bytes_since_snapshot >= runner.config.snapshot_bytes:
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
        """Give back segments that nothing needs. Never while a snapshot is being written."""
        async with self._lock:
            await self.reclaimer.reclaim()

    async def snapshot(self) -> None:
        """Write a snapshot of the topic as it is now."""
        async with self._lock:
            runner = self._runner
            unit, frozen, journal, store = await runner.call(self._capture)
            if unit <= max(runner.snapshot_unit, store.newest_unit):
                return
            await self._make_durable(journal, unit)
            await runner.io.run(self._write, store, unit, frozen)
            if journal is not runner.journal:
                return  # reloaded meanwhile; the snapshot itself is of durable units and stays good
            runner.note_snapshot(unit)
            self.snapshot_at = runner.steady.now().steady
            self.snapshots_total += 1

    def _capture(self, now: Now) -> tuple[int, Frozen, Journal, SnapshotStore]:
        """In a turn: close the open unit and take references to the state that it leads to."""
        runner = self._runner
        runner.topic.forget_passed(now)
        runner.topic.seal(runner.journal, now)
        unit = runner.journal.open_unit_number - 1
        return unit, freeze(runner.topic, unit), runner.journal, runner.snapshots

    async def _make_durable(self, journal: Journal, unit: int) -> None:
        """Under the relaxed policies what is written need not be durable. A snapshot ahead of its journal, or a segment
        deleted for acks that a power cut undoes, would be damage: so sync first."""
        if journal.durable_unit < unit:
            await self._runner.committer.between_commits(journal.sync)

    @staticmethod
    def _write(store: SnapshotStore, unit: int, frozen: Frozen) -> None:
        store.write(unit, frozen.encode(), frozen.blobs)
