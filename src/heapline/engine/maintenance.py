"""Maintenance of one topic: snapshots, syncs, reclaiming segments from the start of the journal, old dead letters.

Only the expiry of dead letters changes the visible state of the queue, by events. A snapshot is captured in one turn,
right after a unit is sealed, so it contains exactly the units up to that one; it is written after that unit is durable.

A segment can be deleted when it is below the older of two verified snapshots, retention (retention.py) does not hold
it, none of its records is needed, and no reader of the directory holds it. The live messages and group dead letters of
a mostly dead segment are rewritten at the journal's end (`Moved`); it is deleted when two snapshots have passed that.

*Commits.* A prepared message appears at the row of its commit, which may be segments after its record. Whether live or
not, records are kept for as long as their rows are: by retention, by groups, and by readers through the segment in
their lease. If nothing holds them, the record is deleted with its segment, and readers learn that the log starts after
the commit (log_bounds.py). So every row from that start on can be read. The start is raised before the last check of
the leases: a reader that takes its lease first and then reads the start is either respected or sees the new start.

*Killed anywhere:* a record is durable in its new position before the old one can be deleted, because the segment is
deleted two snapshots later. The decisions that free the segment (an ack, a group's progress, a group moved past it) are
durable before it is deleted, even under the relaxed policies. The deletion itself is one unlink.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from heapline.contract.errors import HeaplineError
from heapline.core.dead_letters import outdated
from heapline.core.events import I64, GroupReset, Moved
from heapline.core.ids import partition_of
from heapline.core.now import Now
from heapline.core.record import ALIGN, ROW
from heapline.engine.groups.service import StreamServing
from heapline.engine.groups.start_offsets import count_below
from heapline.engine.loaded_topic import RunningTopic
from heapline.engine.retention import (
    Held,
    behind,
    decide_move_on,
    held,
    letters_in,
    starts_without,
)
from heapline.engine.snapshot_state import Frozen, freeze
from heapline.journal.block import make_block
from heapline.journal.survey import Survey
from heapline.logs import Log

if TYPE_CHECKING:
    from heapline.journal.log import TopicLog

log = Log("heapline.engine")
REWRITE_BYTES = 1 << 20  # rewritten in one turn, so that a rewrite does not delay other calls for long
REWRITE_ROWS = 4096
IDLE_LOOK = 30.0  # seconds
EXPIRY_SLICE = 500  # dead letters deleted in one turn


class _Leave(NamedTuple):
    """The decision about a segment that seems to be free."""

    journal: TopicLog
    unit: int  # the unit that records the decision
    known: list[tuple[int, int]]  # by partition: its end, and the number of its stream rows so far
    starts: list[int]  # by partition: the first readable offset afterwards; 0: as the files say


class SegmentReclaimer:
    def __init__(
        self, runner: RunningTopic, streams: StreamServing, make_durable: Callable[[TopicLog, int], Awaitable[None]]
    ) -> None:
        self._runner, self._streams = runner, streams
        self._make_durable = make_durable
        # Since this process opened the topic:
        self.segments_total = 0
        self.bytes_total = 0
        self.records_moved_total = 0
        self.groups_moved_on_total = 0  # group cursors, by partition, that the journal's start has passed

    async def reclaim(self) -> None:
        """Delete unneeded segments, and rewrite the few live messages of mostly dead segments."""
        runner = self._runner
        if not runner.loaded.journal.snapshots.older_unit:
            return  # nothing can be deleted yet
        survey = await self._survey()
        for index, segment in enumerate(survey.below(runner.loaded.journal.snapshots.older_unit)):
            # Decided in a turn, so that the answer waits until what emptied the segment is durable: a crash or a failed
            # write can still undo an ack that is only decided.
            asking, count = await runner.call(partial(self._look, survey, index))
            if asking:
                log.info("segment held", topic=runner.name, segment=segment.number, by=asking.by)
                return
            if count:
                if self._worth_rewriting(survey, index):
                    await self._rewrite(segment.number)  # deleted when two snapshots have passed the rewrite
                return
            if not await self._give_back(survey, index):
                return

    async def _survey(self) -> Survey:
        runner = self._runner
        # Offsets as of this answer: all rows below are written then, and the files show where.
        offsets = await runner.call(
            lambda now: [partition.state.offset for partition in runner.loaded.topic.partitions]
        )
        return await runner.io.run(runner.loaded.journal.survey, offsets)

    def _look(self, survey: Survey, index: int, now: Now) -> tuple[Held, int]:
        """Return what holds a segment, and how many of its records must be rewritten. Runs in a turn."""
        topic, number = self._runner.loaded.topic, survey.segments[index].number
        letters = letters_in(topic, number, now.steady)
        count = topic.live.count(number) + int(np.count_nonzero(~topic.live.alive(letters)))
        return held(topic, survey, index, now.steady, self._runner.wall_ms()), count

    # -- deleting --------------------------------------------------------------------------------------------------

    async def _give_back(self, survey: Survey, index: int) -> bool:
        """Delete an unneeded segment. Groups whose cursor is in it are moved past it, durably before the deletion."""
        runner, segment = self._runner, survey.segments[index]
        floors = dict(survey.ends(index))
        while True:
            left = behind(runner.loaded.topic.groups, floors)
            counts = {partition: await count_below(runner, partition, floors[partition]) for partition in left}
            leave = await runner.call(partial(self._take_leave, survey, index, counts))
            if leave is None:
                return False
            if isinstance(leave, _Leave):
                break
        await self._make_durable(leave.journal, leave.unit)
        await runner.reads_done()
        if not await runner.io.run(self._delete, survey, segment.number, leave.starts):
            return False
        topic = runner.loaded.topic
        topic.live.drop(segment.number)
        for partition, floor in floors.items():
            topic.counts[partition].forget_below(floor, leave.known[partition])
        topic.following.dropped(segment.number)
        self.segments_total += 1
        self.bytes_total += segment.nbytes
        return True

    def _take_leave(self, survey: Survey, index: int, counts: dict[int, int], now: Now) -> _Leave | bool | None:
        """Block positions below the segment's end from now on, and move the groups there past it. Runs in a turn.
        Return None if the segment is needed after all, or False if a new group has rows that were not counted."""
        runner = self._runner
        topic, following, floors = runner.loaded.topic, runner.loaded.topic.following, dict(survey.ends(index))
        asking, count = self._look(survey, index, now)
        if asking or count:
            return None
        if not behind(topic.groups, floors) <= counts.keys():
            return False
        for name, partition, event in decide_move_on(following, floors, counts):
            group = topic.groups.by_name[name]
            if isinstance(event, GroupReset):
                self.groups_moved_on_total += 1
                log.warning(
                    "group moved forward; the journal starts after its offset",
                    topic=runner.name,
                    group=name,
                    partition=partition,
                    offset=event.offset,
                    unread=group.partitions[partition].lag(event.count),
                )
            self._streams.emit(group, partition, event, now)
        for partition, floor in floors.items():
            following.floors[partition] = max(floor, following.floors[partition])
        unit = runner.loaded.journal.open_unit_number - (not topic.open_frames)
        known = [(p.state.offset, topic.counts[p.number].total) for p in topic.partitions]
        return _Leave(runner.loaded.journal, unit, known, starts_without(topic, survey, index))

    def _delete(self, survey: Survey, segment: int, starts: list[int]) -> bool:
        runner = self._runner
        holder = runner.loaded.journal.reclaim(segment, survey, starts, runner.wall_ms())
        if holder:
            log.info("segment held", topic=runner.name, segment=segment, by=holder)
        return not holder

    # -- rewriting -------------------------------------------------------------------------------------------------

    def _worth_rewriting(self, survey: Survey, index: int) -> bool:
        """Return whether to rewrite the segment. Only the journal's start can be deleted, so it may pin empty ones."""
        runner = self._runner
        topic, now, wall = runner.loaded.topic, runner.steady.now().steady, runner.wall_ms()
        live, size, behind_it = topic.live, topic.config.segment_bytes, 0
        total = live.bytes(survey.segments[index].number)
        for other, segment in enumerate(survey.below(runner.loaded.journal.snapshots.older_unit)):
            if other > index:
                if held(topic, survey, other, now, wall):
                    break
                behind_it += 1
                total += live.bytes(segment.number)
        share = live.bytes(survey.segments[index].number) / size
        return min(share, total / (size * (1 + behind_it))) < runner.config.rewrite_below

    async def _rewrite(self, segment: int) -> None:
        runner = self._runner
        layout = runner.loaded.topic.layout
        while True:
            letters = layout.byte_offset(letters_in(runner.loaded.topic, segment, runner.steady.now().steady))
            places = np.union1d(runner.loaded.topic.live.places(segment), letters)[:REWRITE_ROWS]
            if not len(places):
                return
            positions = layout.pack(segment, places, 0)
            records = await runner.load(positions)
            moved = await runner.call(partial(self._move, segment, positions, records))
            self.records_moved_total += moved
            if not moved:
                return  # the remaining records are corrupt: they stay where they are

    def _move(self, segment: int, positions: I64, records: Any, now: Now) -> int:
        """Rewrite the records that are still needed. Runs in a turn."""
        runner = self._runner
        topic = runner.loaded.topic
        spots = topic.layout.spot(letters_in(topic, segment, now.steady))
        needed = topic.live.alive(positions) | np.isin(topic.layout.spot(positions), spots)
        good = [i for i in np.flatnonzero(needed).tolist() if i not in records.bad]
        total = 0
        taken: list[int] = []
        limit = min(REWRITE_BYTES, topic.config.segment_bytes // 4)  # fits into one unit of the smallest segment
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
            topic.reserve(runner.loaded.journal, block.nbytes + 256, now)
            event = Moved(0, 0, len(mine))
            topic.emit_records(runner.loaded.journal, topic.partitions[number], event, rows, block, now)
        return len(taken)


class Maintenance:
    def __init__(self, runner: RunningTopic, streams: StreamServing) -> None:
        self._runner = runner
        self.snapshot_at = 0  # steady ms
        self._lock = asyncio.Lock()
        self.snapshots_total = 0
        self.reclaimer = SegmentReclaimer(runner, streams, self._make_durable)

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
                await self.expire_dead_letters()  # last: if it fails, reclaiming has run
            except Exception as error:  # one failure must not end maintenance
                log.warning("maintenance failed; will retry", topic=runner.name, error=repr(error))

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

    async def expire_dead_letters(self) -> None:
        """Delete dead letters that are too old or too many, oldest first, in slices. Each deletion is an event."""
        runner, count = self._runner, 0
        if any(len(partition.entries.dead) for partition in runner.loaded.topic.partitions):
            while found := await runner.call(self._expire_slice):
                count += found
        if count:
            log.info("dead letters expired", topic=runner.name, count=count)

    def _expire_slice(self, now: Now) -> int:
        loaded, config = self._runner.loaded, self._runner.loaded.topic.config
        died_until = now.steady - round(config.dlq_retention * 1000) if config.dlq_retention else -1
        letters = [partition.entries.dead for partition in loaded.topic.partitions]
        found = outdated(letters, died_until, config.dlq_max_letters, config.dlq_max_bytes, EXPIRY_SLICE)
        for partition, ids in zip(loaded.topic.partitions, found, strict=True):
            if ids:
                loaded.emit(partition, partition.decide_dlq_delete(ids, expired=True), now)
        return sum(map(len, found))

    async def snapshot(self) -> None:
        """Write a snapshot of the topic's current state."""
        async with self._lock:
            runner = self._runner
            unit, frozen, journal = await runner.call(self._capture)
            if unit <= max(runner.loaded.snapshot_unit, journal.snapshots.newest_unit):
                return
            await self._make_durable(journal, unit)
            await runner.io.run(self._write, journal, unit, frozen)
            if journal is not runner.loaded.journal:
                return  # reloaded meanwhile; the snapshot has only durable units and stays valid
            runner.loaded.note_snapshot(unit)
            self.snapshot_at = runner.steady.now().steady
            self.snapshots_total += 1

    def _capture(self, now: Now) -> tuple[int, Frozen, TopicLog]:
        """Close the open unit and take references to the state after it. Runs in a turn."""
        runner = self._runner
        runner.loaded.topic.forget_passed(now)
        runner.loaded.topic.seal(runner.loaded.journal, now)
        unit = runner.loaded.journal.open_unit_number - 1
        return unit, freeze(runner.loaded.topic, unit), runner.loaded.journal

    async def _make_durable(self, journal: TopicLog, unit: int) -> None:
        """Sync the journal up to `unit`. Under the relaxed policies, written units may not be durable. A snapshot ahead
        of its journal, or a segment deleted for acks that a power cut undoes, would be corruption."""
        if journal.durable_unit < unit:
            await self._runner.loaded.committer.between_commits(journal.sync)

    @staticmethod
    def _write(journal: TopicLog, unit: int, frozen: Frozen) -> None:
        journal.snapshots.write(unit, frozen.encode(), frozen.blobs)
