"""Giving segments back, from the journal's start on, and writing what still lives in them again at its end.

A segment goes when it lies below the older of two verified snapshots, nobody asks for it (retention.py), none of its
records is needed, and no reader of the directory holds it. One that is mostly dead has its living messages and the dead
letters of groups written again at the journal's end (`Moved`); it goes when two snapshots have passed that.

*Commits.* A prepared message is shown at the row of its commit, which may stand segments behind its record. Live or
not, who keeps rows keeps their records: retention, groups, and readers by the segment that their lease names. If nobody
does, the record goes with its segment, and readers are told that the log starts behind the commit (log_start.py).
So every row from that start on can be shown. The start is raised before the leases are looked at for the last time: a
reader that takes its lease first and looks at the start then either is heard or sees the new start.

*Killed anywhere:* a record is durable in its new place before anything can forget the old one, since the segment goes
two snapshots later. What was decided so that the segment can go (an ack, a group's progress, a group moved on to behind
it) is durable before it is deleted, also under the relaxed policies. Deleting itself is one unlink.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from heapline.core.events import I64, GroupReset, Moved
from heapline.core.ids import partition_of
from heapline.core.position import ALIGN
from heapline.core.record import ROW
from heapline.engine.retention import (
    Held,
    Survey,
    behind,
    decide_move_on,
    held,
    letters_in,
    read_with,
    starts_without,
)
from heapline.engine.streams.places import count_below
from heapline.engine.surveying import Surveyor
from heapline.journal.block import make_block
from heapline.journal.log_start import raise_log_start
from heapline.journal.reclaim import delete_segment, held_by, read_leases
from heapline.logs import Log
from heapline.model import Now

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner
    from heapline.journal.journal import Journal

log = Log("heapline.engine")
REWRITE_BYTES = 1 << 20  # rewritten in one turn, so that a rewrite delays nobody for long
REWRITE_ROWS = 4096


class _Leave(NamedTuple):
    """What was decided about a segment that seems to be free."""

    journal: Journal
    unit: int  # by which that is recorded
    known: list[tuple[int, int]]  # by partition: its end, and how many stream rows it has had
    starts: list[int]  # by partition: from where on the log can be shown then; 0: as its files say


class SegmentReclaimer:
    def __init__(self, runner: TopicRunner, make_durable: Callable[[Journal, int], Awaitable[None]]) -> None:
        self._runner = runner
        self._make_durable = make_durable
        self._surveyor = Surveyor()
        # Since this process opened the topic:
        self.segments_total = 0
        self.bytes_total = 0
        self.records_moved_total = 0
        self.groups_moved_on_total = 0  # places of groups, by partition, that the journal's start has overtaken

    async def reclaim(self) -> None:
        """Give back segments that nothing needs; rewrite the few living messages of those that are mostly dead."""
        runner = self._runner
        if not runner.snapshots.older_unit:
            return  # then nothing can go
        survey = await self._survey()
        for index, segment in enumerate(survey.below(runner.snapshots.older_unit)):
            # Asked in a turn, so that the answer waits until what emptied the segment is durable: an ack that is
            # only decided may yet be undone by a crash or a failed write.
            asking, count = await runner.call(partial(self._look, survey, index))
            if asking:
                log.info("segment held", topic=runner.name, segment=segment.number, by=asking.by)
                return
            if count:
                if self._worth_rewriting(survey, index):
                    await self._rewrite(segment.number)  # it goes when two snapshots have passed the rewriting
                return
            if not await self._give_back(survey, index):
                return

    async def _survey(self) -> Survey:
        runner = self._runner
        # As they are once this is answered: then all rows below are written, and the files tell where.
        offsets = await runner.call(lambda now: [partition.offset for partition in runner.topic.partitions])
        older_unit = runner.snapshots.older_unit
        loader, reader = runner.loader, runner.journal.reader()
        return await runner.io.run(self._surveyor.look, loader.disk, loader.directory, reader, offsets, older_unit)

    def _look(self, survey: Survey, index: int, now: Now) -> tuple[Held, int]:
        """In a turn: who asks for a segment, and how many of its records must be written again."""
        topic, number = self._runner.topic, survey.segments[index].number
        letters = letters_in(topic, number, now.steady)
        count = topic.live.count(number) + int(np.count_nonzero(~topic.live.alive(letters)))
        return held(topic, survey, index, now.steady, self._runner.wall_ms()), count

    # -- deleting --------------------------------------------------------------------------------------------------

    async def _give_back(self, survey: Survey, index: int) -> bool:
        """Delete a segment that nobody needs. Groups whose place is there go on behind it, durably before it goes."""
        runner, segment = self._runner, survey.segments[index]
        floors = dict(survey.ends(index))
        while True:
            left = behind(runner.topic.groups, floors)
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
        topic = runner.topic
        topic.live.drop(segment.number)
        for partition, floor in floors.items():
            topic.counts[partition].forget_below(floor, leave.known[partition])
        topic.following.dropped(segment.number)
        self.segments_total += 1
        self.bytes_total += segment.nbytes
        return True

    def _take_leave(self, survey: Survey, index: int, counts: dict[int, int], now: Now) -> _Leave | bool | None:
        """In a turn: nothing may be put below the segment's end from here on, and groups that are go on behind it.
        None: it is needed after all. False: a group has come meanwhile whose rows were not counted."""
        runner = self._runner
        topic, following, floors = runner.topic, runner.topic.following, dict(survey.ends(index))
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
                    "group moved on: the journal starts behind its place", topic=runner.name, group=name,
                    partition=partition, offset=event.offset, unread=group.partitions[partition].lag(event.count),
                )  # fmt: skip
            runner.streams.emit(group, partition, event, now)
        for partition, floor in floors.items():
            following.floors[partition] = max(floor, following.floors[partition])
        unit = runner.journal.open_unit_number - (not topic.has_open_unit)
        known = [(p.offset, topic.counts[p.number].total) for p in topic.partitions]
        return _Leave(runner.journal, unit, known, starts_without(topic, survey, index))

    def _delete(self, survey: Survey, segment: int, starts: list[int]) -> bool:
        runner = self._runner
        disk, directory = runner.loader.disk, runner.loader.directory
        older_unit, durable_unit = runner.snapshots.older_unit, runner.journal.durable_unit
        now = runner.wall_ms()

        def holder() -> str:
            found = held_by(disk, directory, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
            reading = (lease for lease in read_leases(disk, directory, now) if any(starts) and not found)
            names = [f"reader {lease.name!r}" for lease in reading if read_with(starts, survey, lease.segment)]
            return found or ", ".join(names)

        by = holder()
        if not by and any(starts):
            raise_log_start(disk, directory, starts)
            by = holder()
        if by:
            log.info("segment held", topic=runner.name, segment=segment, by=by)
            return False
        delete_segment(disk, directory, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
        runner.journal.records.forget(segment)
        return True

    # -- rewriting -------------------------------------------------------------------------------------------------

    def _worth_rewriting(self, survey: Survey, index: int) -> bool:
        """Segments go from the journal's start only, so a full one there may pin many empty ones behind it."""
        runner = self._runner
        topic, now, wall = runner.topic, runner.steady.now().steady, runner.wall_ms()
        live, size, behind_it = topic.live, topic.config.segment_bytes, 0
        total = live.bytes(survey.segments[index].number)
        for other, segment in enumerate(survey.below(runner.snapshots.older_unit)):
            if other > index:
                if held(topic, survey, other, now, wall):
                    break
                behind_it += 1
                total += live.bytes(segment.number)
        share = live.bytes(survey.segments[index].number) / size
        return min(share, total / (size * (1 + behind_it))) < runner.config.rewrite_below

    async def _rewrite(self, segment: int) -> None:
        runner = self._runner
        layout = runner.topic.layout
        while True:
            letters = layout.byte_offset(letters_in(runner.topic, segment, runner.steady.now().steady))
            places = np.union1d(runner.topic.live.places(segment), letters)[:REWRITE_ROWS]
            if not len(places):
                return
            positions = layout.pack(segment, places, 0)
            records = await runner.load(positions)
            moved = await runner.call(partial(self._move, segment, positions, records))
            self.records_moved_total += moved
            if not moved:
                return  # what is left does not check: it stays where it is

    def _move(self, segment: int, positions: I64, records: Any, now: Now) -> int:
        """In a turn: write these records again, those that are still needed."""
        runner = self._runner
        topic = runner.topic
        spots = topic.layout.spot(letters_in(topic, segment, now.steady))
        needed = topic.live.alive(positions) | np.isin(topic.layout.spot(positions), spots)
        good = [i for i in np.flatnonzero(needed).tolist() if i not in records.bad]
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
