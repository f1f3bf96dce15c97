"""The journal of one topic in one process: the durable order of everything that happens to its messages.

It has two halves, connected by a queue of sealed units. The building half (`room`, `add_block`, `add_frames`, `seal`)
is pure memory and runs on the event loop. The I/O half (`commit`, `prepare`, `sync`) runs in one committer thread,
never concurrently with itself. Across threads, only integers are read. One turn of an engine:

    journal.room(block.nbytes + len(events)); journal.add_block(block); journal.add_frames(...)
    journal.seal(now, wall); units = journal.take_sealed()
    # in the committer thread:
    if journal.wants_prepare: journal.prepare()
    for unit in units: journal.commit(unit)
    # now everything decided up to here may be answered

After an error in the I/O half the journal is poisoned: every call raises, nothing uncommitted is answered, and the
topic is opened again from disk. The meaning of rows and events is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from heapline.core.events import I64
from heapline.core.record import PositionLayout
from heapline.journal.block import Block
from heapline.journal.disk import Disk, is_no_space
from heapline.journal.log_bounds import Watermark, raise_log_start, watermark_path
from heapline.journal.reader import LogReader
from heapline.journal.reclaim import delete_segment, end_lease, held_by, hold_segments, read_leases
from heapline.journal.records import CacheBudget, RecordCache, RecordReader, Records
from heapline.journal.recovery import Scan
from heapline.journal.segment import (
    FILL_STEP_MAX,
    SegmentFile,
    SegmentHeader,
    check_capacity,
    numbered,
    segment_path,
)
from heapline.journal.small_files import checkpoints_of
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.spares import SparePool
from heapline.journal.survey import Survey, Surveyor
from heapline.journal.unit import Frame, SealedUnit, Unit
from heapline.journal.unit_planner import UnitPlanner
from heapline.journal.writer import SegmentWriter, SyncPolicy

READ_AGAIN = 2  # attempts
#: Zero-filled space to keep ahead of the writer is as much as is in use, and at most this.
AHEAD_BYTES_MAX = FILL_STEP_MAX // 2


class Journal:
    """The journal of a topic. Created by `create`, opened by `open`.

    It is writable after the iterator from `open` has ended.
    """

    def __init__(
        self,
        scan: Scan,
        policy: SyncPolicy,
        spares: SparePool | None,
        name: str,
        budget: CacheBudget | None,
        snapshots: SnapshotStore | None,
    ) -> None:
        self.disk, self.path, self.name = scan.disk, scan.directory, name or scan.directory
        self.incarnation, self.segment_bytes = scan.incarnation, scan.capacity
        self.layout = PositionLayout(scan.capacity)
        self.cache = RecordCache(self.layout, budget)
        self.records = RecordReader(scan.disk, scan.directory, self.layout)
        self.snapshots = snapshots or SnapshotStore(scan.disk, f"{scan.directory}/snapshots")
        self.checkpoints = checkpoints_of(scan.disk, scan.directory)
        self._surveyor = Surveyor(scan.disk, scan.directory)
        self._policy: SyncPolicy = policy
        self._spares = spares
        self._planner: UnitPlanner | None = None
        self.last_wall: int | None = None  # wall time of the last unit when it was opened
        self._writer: SegmentWriter | None = None

    @staticmethod
    def create(disk: Disk, path: str, *, incarnation: int, segment_bytes: int, created_at: int = 0) -> None:
        """Create an empty journal, atomically and durably."""
        check_capacity(segment_bytes)
        if disk.exists(path):
            raise FileExistsError(path)
        temporary = path + ".new"
        disk.remove_tree(temporary)
        for directory in (temporary, f"{temporary}/snapshots", f"{temporary}/readers"):
            disk.mkdir(directory)
        header = SegmentHeader(1, segment_bytes, incarnation, 1, 0, created_at)
        SegmentFile.create(disk, temporary, 1, segment_bytes, header.pack()).close()
        mark = Watermark(0, 0, 1, 512, 0, incarnation)
        disk.write_file_atomic(watermark_path(temporary), mark.pack())
        disk.rename(temporary, path)
        disk.fsync_dir(os.path.dirname(path) or ".")

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: str,
        *,
        incarnation: int | None = None,
        segment_bytes: int | None = None,
        after_unit: int = 0,
        snapshots: SnapshotStore | None = None,
        policy: SyncPolicy = "commit",
        spares: SparePool | None = None,
        cache_budget: CacheBudget | None = None,
        name: str = "",
    ) -> tuple[Journal, Iterator[Unit]]:
        """Return the journal and the units above `after_unit` (the snapshot's unit) to apply.

        `snapshots` is the store that this snapshot was loaded from.
        Run the iterator to its end: that cuts a torn tail and makes the journal writable. It raises JournalCorrupt on
        damage. The caller holds the directory's lock.
        """
        expected = {"incarnation": incarnation, "segment_bytes": segment_bytes}
        scan = Scan(disk, path, after_unit=after_unit, known_durable=after_unit, **expected)
        journal = cls(scan, policy, spares, name, cache_budget, snapshots)
        return journal, journal._recover(scan)

    def _recover(self, scan: Scan) -> Iterator[Unit]:
        yield from scan
        scan.cut()
        scan.settle()
        self._remove_leftovers(scan.first_segment)
        self._take_over(scan)

    def _remove_leftovers(self, first_segment: int) -> None:
        """Remove temporary files of a killed run, and indexes of reclaimed segments."""
        names = self.disk.listdir(self.path)
        doomed = [n for n in names if n.endswith(".tmp")]
        doomed += [f"{n:010d}.idx" for n in numbered(names, ".idx") if n < first_segment]
        for name in doomed:
            self.disk.unlink(f"{self.path}/{name}")

    def _take_over(self, scan: Scan) -> None:
        writer = SegmentWriter(scan, self._policy, self._spares, self.name)
        self._writer = writer  # from here on `close` closes its files
        for number in (scan.segment, *scan.ready_segments):
            file = self.disk.open(segment_path(self.path, number), write=True)
            start, size = scan.end if number == scan.segment else 0, file.size()
            try:
                # A crash during growth may have left a hole, which could run out of space later.
                file.fallocate(start, size - start)
            except OSError as error:
                if not is_no_space(error):
                    raise
                size = start
            writer.adopt(number, file, size)
        writer.begin(scan.segment, scan.end, scan.last_time, scan.index, scan.finished_indexes)
        writer.on_written = lambda unit: self.cache.mark_written(unit.number)
        writer.on_replaced = self.records.forget
        self._planner = UnitPlanner(self.segment_bytes, scan.segment, scan.end, scan.last_unit + 1, scan.last_time)
        self.last_wall = scan.last_wall

    def _plan(self) -> UnitPlanner:
        if self._planner is None or self._writer is None:
            raise RuntimeError("first run the iterator returned by Journal.open to its end")
        if self._writer.poisoned is not None:
            self._writer.check()
        return self._planner

    def _io(self) -> SegmentWriter:
        self._plan()
        assert self._writer is not None
        return self._writer

    # Building: event loop, no I/O.

    def fits(self, nbytes: int) -> bool:
        """Return whether the open unit can take this many more bytes, including the entries for blocks and frames."""
        return self._plan().fits(nbytes)

    def room(self, nbytes: int, *, blocks: int = 1, frames: int = 1, time: int = 0, wall: int = 0) -> None:
        """Call before adding data that must be in one unit; see UnitPlanner.room."""
        self._plan().room(nbytes, blocks=blocks, frames=frames, time=time, wall=wall)

    def add_block(self, block: Block) -> tuple[int, int]:
        """Return segment and byte offset of the block's first row. Its records can be read from memory immediately."""
        planner = self._plan()
        segment, offset = planner.add_block(block)
        self.cache.add(segment, offset, block, planner.open_unit_number)
        return segment, offset

    def add_frames(self, frames: Sequence[Frame]) -> None:
        self._plan().add_frames(frames)

    def seal(self, time: int = 0, wall: int = 0) -> SealedUnit | None:
        """Fix the open unit, queue it and return it, or None if it is empty. Earlier units may be queued before it."""
        return self._plan().seal(time, wall)

    def take_sealed(self) -> list[SealedUnit]:
        """Return all sealed units, to be committed in this order."""
        planner = self._plan()
        sealed, planner.sealed = planner.sealed, []
        return sealed

    @property
    def open_bytes(self) -> int:
        return self._plan().open_bytes

    @property
    def open_unit_number(self) -> int:
        """The number of the unit that is being built."""
        return self._plan().open_unit_number

    @property
    def last_time(self) -> int:
        """Journal time of the last sealed unit; later units are never earlier."""
        return self._plan().time

    @property
    def next_unit(self) -> int:
        """The number after the last one in use."""
        planner = self._plan()
        return planner.open_unit_number + bool(planner.open_bytes)

    # I/O: the committer thread.

    def commit(self, unit: SealedUnit) -> None:
        """Write the unit. Under the `commit` policy it is durable on return. Any error poisons the journal."""
        self._io().commit(unit)

    def sync(self) -> None:
        """Make written data durable, under the `interval` policy."""
        self._io().sync()

    @property
    def wants_prepare(self) -> bool:
        """Whether `prepare` has something to do. Cheap."""
        planner, writer = self._plan(), self._writer
        assert writer is not None
        end = planner.offset + planner.open_bytes
        if writer.filled(planner.segment) < min(self.segment_bytes, end + min(AHEAD_BYTES_MAX, end)):
            return True
        if end > self.segment_bytes // 2 and not writer.filled(planner.segment + 1):
            return True
        return not self.can_grow or bool(writer.finished)

    def prepare(self) -> bool:
        """Make space ahead of time, so that no commit has to. Returns `can_grow`.

        Without disk space a spare is taken, but only for units that are already planned; anything later waits.
        """
        planner, writer = self._plan(), self._io()
        segment, end = planner.segment, planner.offset + planner.open_bytes
        ready = writer.reach(segment, end + min(AHEAD_BYTES_MAX, end), spare_below=end)
        if end > self.segment_bytes // 2:
            ready = writer.reach(segment + 1, 1, spare_below=0) and ready
        writer.short_of_space = not ready
        if self._spares is not None:
            self._spares.fill()
        writer.write_finished_indexes()
        return self.can_grow

    @property
    def can_grow(self) -> bool:
        """False while disk space is short: refuse enqueues, continue with acks and reclaiming."""
        self._plan()
        assert self._writer is not None
        return not self._writer.short_of_space and (self._spares is None or self._spares.plenty)

    @property
    def durable_unit(self) -> int:
        """The last unit that survives a power cut. Available even if the journal is poisoned."""
        return self._writer.durable_unit if self._writer is not None else 0

    @property
    def written_unit(self) -> int:
        """The last committed unit; above `durable_unit` only under the relaxed policies."""
        return self._writer.written_unit if self._writer is not None else 0

    @property
    def poisoned(self) -> BaseException | None:
        return self._writer.poisoned if self._writer is not None else None

    # Reading.

    def cached(self, positions: I64) -> tuple[Records, I64]:
        """Return the records in memory, and the indexes of those that are not. No I/O."""
        return self.cache.cached(positions)

    def load(self, positions: I64) -> Records:
        """Read and check records from disk, off the event loop.

        Corrupt ones are read again, in case the fault was transient.
        """
        records = self.records.load(positions)
        for _ in range(READ_AGAIN):
            if not records.bad:
                break
            doubtful = np.array(sorted(records.bad), dtype=np.int64)
            records.bad = {}
            records.fill(doubtful, self.records.load(positions[doubtful]))
        return records

    def read(self, positions: I64) -> Records:
        """Read records from memory where possible, else from disk."""
        records, missing = self.cache.cached(positions)
        if len(missing):
            records.fill(missing, self.records.load(positions[missing]))
        return records

    def reader(self) -> LogReader:
        """Return a reader of this journal's durable units. Use one reader per thread."""
        return LogReader(self.disk, self.path, active=lambda: self._io().index)

    def close(self) -> None:
        """Close the files. Nothing is written: uncommitted data is lost, as after a kill.

        The records in memory belong to the event loop, which drops them with `cache.clear`.
        """
        if self._writer is not None:
            self._writer.close()
        self.records.close()

    # Statistics, readers and reclaiming: in I/O threads.

    def usage(self) -> tuple[int, int]:
        """Return bytes and number of segments."""
        return self._surveyor.usage()

    def survey(self, ends: Sequence[int]) -> Survey:
        """Return the segments for retention; see `Surveyor.look`."""
        return self._surveyor.look(self.reader(), ends, self.snapshots.older_unit)

    def hold(self, name: str, segment: int, until: int) -> None:
        """Keep segments from this one on until a wall time in ms, under a reader's name."""
        hold_segments(self.disk, self.path, name, segment, until)

    def release(self, name: str) -> None:
        end_lease(self.disk, self.path, name)

    def reclaim(self, segment: int, survey: Survey, starts: Sequence[int], now: int) -> str:
        """Delete the first segment, durably, or return what still holds it.

        `starts` are the first readable offsets by partition afterwards; 0 means where the files start. The log's start
        is raised before the last check of the leases, so a reader that takes its lease first and then reads the start
        is either respected or sees the new start.
        """
        older_unit, durable_unit = self.snapshots.older_unit, self.durable_unit

        def holder() -> str:
            found = held_by(self.disk, self.path, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
            reading = (lease for lease in read_leases(self.disk, self.path, now) if any(starts) and not found)
            names = [f"reader {lease.name!r}" for lease in reading if survey.is_read_below(starts, lease.segment)]
            return found or ", ".join(names)

        by = holder()
        if not by and any(starts):
            raise_log_start(self.disk, self.path, starts)
            by = holder()
        if not by:
            delete_segment(self.disk, self.path, segment, older_unit=older_unit, durable_unit=durable_unit, now=now)
            self.records.forget(segment)
        return by
