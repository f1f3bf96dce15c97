"""Upkeep of one topic: snapshots, giving segments back, rewriting what would pin them, syncing at intervals.

Nothing here changes what anybody can see of the queue. A snapshot is captured in one turn, right after a unit is
sealed, so it stands for exactly the units up to that one; it is written after that unit is durable.
A segment goes when it lies below the older of two verified snapshots, nothing in it is live, retention allows
it and no reader holds it. One that is mostly dead has its living messages written again at the journal's end.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from heapline.core.events import I64, Moved
from heapline.core.ids import partition_of
from heapline.core.position import ALIGN
from heapline.core.record import ROW
from heapline.engine.freeze import Frozen, freeze
from heapline.errors import HeaplineError
from heapline.journal.block import make_block
from heapline.journal.reclaim import delete_segment, held_by
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import segment_path
from heapline.logs import Log
from heapline.model import Now

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner
    from heapline.journal.journal import Journal
    from heapline.journal.snapshot import SnapshotStore

log = Log("heapline.engine")
REWRITE_BYTES = 1 << 20  # rewritten in one turn, so that a rewrite delays nobody for long
REWRITE_ROWS = 4096
IDLE_LOOK = 30.0  # seconds


class Upkeep:
    def __init__(self, runner: TopicRunner) -> None:
        self._runner = runner
        self.snapshot_at = 0  # steady ms
        self._lock = asyncio.Lock()
        self.snapshots_total = 0
        self.segments_reclaimed_total = 0
        self.records_moved_total = 0

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

    # -- reclaim ---------------------------------------------------------------------------------------------------

    async def reclaim(self) -> None:
        """Give back segments that nothing needs; rewrite the few living messages of those that are mostly dead."""
        async with self._lock:
            runner = self._runner
            candidates = await runner.io.run(self._candidates)
            for segment in candidates:
                # Asked in a turn, so that the answer waits until what emptied the segment is durable: an ack that is
                # only decided may yet be undone by a crash or a failed write.
                count, journal, unit = await runner.call(partial(self._live_in, segment))
                if count:
                    if self._worth_rewriting(segment, candidates):
                        await self._rewrite(segment)  # it goes when two snapshots have passed the rewriting
                    break
                await self._make_durable(journal, unit)
                await runner.reads_done()
                if not await runner.io.run(self._delete, segment):
                    break
                runner.topic.live.drop(segment)
                self.segments_reclaimed_total += 1

    def _live_in(self, segment: int, now: Now) -> tuple[int, Journal, int]:
        """How many records of the segment are live, and up to which unit that was decided."""
        runner = self._runner
        unit = runner.journal.open_unit_number - (not runner.topic.has_open_unit)
        return runner.topic.live.count(segment), runner.journal, unit

    def _candidates(self) -> list[int]:
        """Segments from the journal's start that lie below the older snapshot and outside retention."""
        runner = self._runner
        directory, disk = runner.loader.directory, runner.loader.disk
        older_unit = runner.snapshots.older_unit
        keep_after = runner.wall_ms() - round(runner.topic.config.retention * 1000)
        found: list[int] = []
        for segment in list_segments(disk, directory):
            following = read_header(disk, directory, segment + 1) if disk.exists(
                segment_path(directory, segment + 1)) else None  # fmt: skip
            if following is None or following.first_unit - 1 > older_unit or following.created_at > keep_after:
                break
            found.append(segment)
        return found

    def _delete(self, segment: int) -> bool:
        runner = self._runner
        disk, directory = runner.loader.disk, runner.loader.directory
        older_unit, durable_unit = runner.snapshots.older_unit, runner.journal.durable_unit
        now = runner.wall_ms()
        held = held_by(disk, directory, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
        if held:
            log.info("segment held", topic=runner.name, segment=segment, by=held)
            return False
        delete_segment(disk, directory, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
        runner.journal.records.forget(segment)
        return True

    def _worth_rewriting(self, segment: int, candidates: list[int]) -> bool:
        """Segments go from the journal's start only, so a full one there may pin many empty ones behind it."""
        runner = self._runner
        live, size = runner.topic.live, runner.topic.config.segment_bytes
        share = live.bytes(segment) / size
        share_of_all = sum(live.bytes(s) for s in candidates) / (size * len(candidates))
        return min(share, share_of_all) < runner.config.rewrite_below

    async def _rewrite(self, segment: int) -> None:
        runner = self._runner
        layout = runner.topic.layout
        while True:
            places = runner.topic.live.places(segment)[:REWRITE_ROWS]
            if not len(places):
                return
            positions = layout.pack(segment, places, 0)
            records = await runner.load(positions)
            moved = await runner.call(partial(self._move, positions, records))
            self.records_moved_total += moved
            if not moved:
                return  # what is left does not check: it stays where it is

    def _move(self, positions: I64, records: Any, now: Now) -> int:
        """In a turn: write these records again, those that are still live."""
        runner = self._runner
        topic = runner.topic
        alive = topic.live.alive(positions)
        good = [i for i in np.flatnonzero(alive).tolist() if i not in records.bad]
        total = 0
        taken: list[int] = []
        limit = min(REWRITE_BYTES, topic.config.segment_bytes // 4)  # one unit takes it, however small segments are
        for i in good:
            total += len(records.payloads[i]) + len(records.smalls[i]) + 2 * ALIGN + ROW.itemsize
            if taken and total > limit:
                break
            taken.append(i)
        owners = partition_of(records.rows["id"].astype(np.int64))
        for number in np.unique(owners[taken]).tolist():
            mine = [i for i in taken if owners[i] == number]
            rows = records.rows[mine].copy()
            block = make_block(rows, [records.smalls[i] for i in mine], [records.payloads[i] for i in mine])
            topic.reserve(runner.journal, block.nbytes + 256, now)
            event = Moved(0, 0, len(mine))
            topic.emit_records(runner.journal, topic.partitions[number], event, rows, block, now)
        return len(taken)
