"""The I/O half of the journal: writes sealed units to disk, in order, and prepares space before they come.

Called in one committer thread, never concurrently. What is synced when, and what a kill leaves behind:

- `commit`: one write, one fdatasync (under the `commit` policy), then the watermark, unsynced. A kill before the sync
  returns leaves a torn or complete last unit that was not acknowledged. The file, its size and its name were durable
  before.
- `prepare`: grows files and creates new ones, all synced before `commit` may rely on them. A kill here leaves a longer
  file of zeros, or a temporary file that the next open removes.
- Under the relaxed policies a segment is still synced before the next one begins, so that a following segment always
  proves the one before it.
- A segment's header says that the next one's file exists, durably, before that file holds a unit. It says so from its
  first write, or is rewritten when the file is prepared; `_roll` does it if a kill came between.

Space: only growing can fail with "no space". Then a spare is used: as the next segment, or, in the middle of a segment,
as a fully reserved copy of it under the same name, so that positions already handed out stay valid. Any other error,
and any error in `commit`, poisons the writer, because the page cache can no longer be trusted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

from heapline.contract.errors import JournalCorrupt, StorageFull, TopicReloading
from heapline.journal.disk import File, is_no_space
from heapline.journal.index import SegmentIndex
from heapline.journal.log_bounds import Watermark, watermark_path
from heapline.journal.recovery import Scan
from heapline.journal.segment import (
    CHUNK_BYTES,
    FIRST_UNIT_AT,
    SegmentFile,
    SegmentHeader,
    index_path,
    segment_path,
    set_followed,
)
from heapline.journal.spares import SparePool
from heapline.journal.unit import FLAG_RELAXED, SealedUnit, crc_seed

SyncPolicy = Literal["commit", "interval", "os"]
POLICIES = ("commit", "interval", "os")


class SegmentWriter:
    """Writes units at their planned positions."""

    def __init__(self, scan: Scan, policy: SyncPolicy, spares: SparePool | None, name: str) -> None:
        """Continue where the finished scan ended."""
        capacity = scan.capacity
        if policy not in POLICIES:
            raise ValueError(f"the sync policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if spares is not None and spares.segment_bytes < capacity:
            raise ValueError(f"spares of {spares.segment_bytes} bytes cannot serve segments of {capacity}")
        self.disk, self.directory, self.name = scan.disk, scan.directory, name
        self.incarnation, self.capacity, self.policy, self.spares = scan.incarnation, capacity, policy, spares
        self.written_unit = scan.last_unit
        self.durable_unit = scan.last_unit
        self.chain = scan.chain
        self.poisoned: BaseException | None = None
        self.short_of_space = False
        self.index: SegmentIndex | None = None  # index of the segment being written
        self.on_replaced: Callable[[int], None] = lambda segment: None
        self.on_written: Callable[[SealedUnit], None] = lambda unit: None
        self._segments: dict[int, SegmentFile] = {}
        self._active: SegmentFile | None = None
        self.finished: list[SegmentIndex] = []  # indexes of full segments, to be written by `prepare`
        self._mark: File | None = None
        self._seed = 0
        self._followed = 0  # the last segment whose header is known to announce the next one

    def check(self) -> None:
        if self.poisoned is not None:
            raise TopicReloading(self.name, str(self.poisoned))

    # Opening: continue from what is on disk.

    def adopt(self, number: int, file: File, filled: int) -> None:
        self._segments[number] = SegmentFile(file, number, self.capacity, filled)

    def begin(self, segment: int, end: int, time: int, index: SegmentIndex, finished: list[SegmentIndex]) -> None:
        """Start writing after `end`. The first watermark is synced, so that the policy in it is durable, too."""
        self.finished = finished
        self._active = self._segments[segment]
        self._seed = crc_seed(self.incarnation, segment)
        self.index = index
        path, mark = watermark_path(self.directory), self._watermark(segment, end, time)
        try:
            self.disk.write_file_atomic(path, mark)
        except OSError as error:
            # A full disk must also open, to be drained: then write in place; a single sector survives a crash intact.
            if not (is_no_space(error) and self.disk.exists(path)):
                raise
            file = self.disk.open(path, write=True)
            file.pwritev([mark], 0)
            file.fdatasync()
            file.close()
        self._mark = self.disk.open(path, write=True)

    # Space.

    def filled(self, segment: int) -> int:
        """Return up to where a segment is ready to be written, or 0 if it has no file yet. Callable from any thread."""
        found = self._segments.get(segment)
        return found.filled if found is not None else 0

    def reach(self, segment: int, need: int, spare_below: int | None = None) -> bool:
        """Prepare `segment` up to `need` bytes. Return False if there is no space.

        Without space a spare is taken, but only if the segment is not even ready up to `spare_below` (default: need).
        """
        need = min(need, self.capacity)
        found = self._segments.get(segment)
        if found is not None and found.filled >= need:
            return True
        try:
            if found is None:
                found = SegmentFile.create(self.disk, self.directory, segment, self.capacity)
                self._segments[segment] = found
                self._mark_followed(segment - 1)
            if found.filled < need:
                found.grow(need)
        except OSError as error:
            if not is_no_space(error):
                self.poisoned = error
                raise
            filled = found.filled if found is not None else 0
            must = need if spare_below is None else min(spare_below, self.capacity)
            return filled < must and self._reach_with_spare(segment, found)
        return True

    def _mark_followed(self, segment: int) -> None:
        """Announce the next segment, durably, in the header of this one, if it is being written."""
        active = self._active
        if active is None or active.number != segment or self._followed == segment:
            return
        try:
            if set_followed(active.file, True):
                active.file.fdatasync()
        except JournalCorrupt as error:  # the header was damaged since the journal was opened
            self.poisoned = error
            raise
        self._followed = segment

    def _reach_with_spare(self, segment: int, found: SegmentFile | None) -> bool:
        path = self.spares.take() if self.spares is not None else None
        if path is None:
            return False
        try:
            self._segments[segment] = self._replace(segment, path, found)
            self._mark_followed(segment - 1)
        except OSError as error:
            self.poisoned = error
            raise
        return True

    def _replace(self, segment: int, spare: str, old: SegmentFile | None) -> SegmentFile:
        """Make the spare this segment's file. It leaves the pool first: a partial copy must never pass for a spare."""
        assert self.spares is not None
        final = segment_path(self.directory, segment)
        temporary = final + ".tmp"
        self.disk.rename(spare, temporary)
        self.disk.fsync_dir(self.directory)
        self.disk.fsync_dir(self.spares.directory)
        file = self.disk.open(temporary, write=True)
        if self.spares.segment_bytes != self.capacity:
            file.truncate(self.capacity)
        for at in range(0, old.filled if old is not None else 0, CHUNK_BYTES):
            assert old is not None
            file.pwritev([old.file.pread(min(CHUNK_BYTES, old.filled - at), at)], at)
        file.fdatasync()
        self.disk.rename(temporary, final)
        self.disk.fsync_dir(self.directory)
        file.path = final
        new = SegmentFile(file, segment, self.capacity, self.capacity)
        if old is not None:
            if self._active is old:
                self._active = new
            old.close()
            self.on_replaced(segment)
        return new

    def write_finished_indexes(self) -> None:
        """Store the indexes of full segments. They can be rebuilt, so a full disk is not an error."""
        while self.finished:
            index = self.finished.pop(0)
            with contextlib.suppress(OSError):
                self.disk.write_file_atomic(index_path(self.directory, index.segment), index.pack(self.incarnation))

    # Writing.

    def commit(self, unit: SealedUnit) -> None:
        self.check()
        if unit.number != self.written_unit + 1:
            raise ValueError(f"unit {self.written_unit + 1} must be committed before unit {unit.number}")
        try:
            if self.filled(unit.segment) < unit.end and not self.reach(unit.segment, unit.end):
                raise StorageFull
            self._write(unit)
        except BaseException as error:
            self.poisoned = error
            raise

    def _write(self, unit: SealedUnit) -> None:
        assert self._active is not None
        assert self.index is not None
        if unit.segment != self._active.number:
            self._roll(unit.segment)
        file = self._active.file
        flags = 0 if self.policy == "commit" else FLAG_RELAXED
        parts, crc = unit.encode(prev_crc=self.chain, durable_end=self.durable_unit, flags=flags, seed=self._seed)
        if unit.offset == FIRST_UNIT_AT:
            header = self._header(unit)
            file.pwritev([header.pack(), *parts], 0)
        else:
            file.pwritev(parts, unit.offset)
        if self.policy == "commit":
            file.fdatasync()
            self.durable_unit = unit.number
        self.chain = crc
        self.written_unit = unit.number
        self.index.add(unit.number, unit.offset, unit.time, unit.wall, unit.frames)
        self.on_written(unit)
        self._last = unit
        if self.policy != "interval":
            self._put_watermark(unit)

    def _header(self, unit: SealedUnit) -> SegmentHeader:
        """Return the header of the segment that this unit begins."""
        number = unit.segment
        if is_followed := number + 1 in self._segments:
            self._followed = number
        return SegmentHeader(
            number, self.capacity, self.incarnation, unit.number, self.chain, unit.wall, is_followed=is_followed
        )

    def _roll(self, segment: int) -> None:
        assert self._active is not None
        assert self.index is not None
        self._mark_followed(segment - 1)
        if self.durable_unit < self.written_unit:
            self._active.file.fdatasync()
            self.durable_unit = self.written_unit
        self.finished.append(self.index)
        self._segments.pop(self._active.number).close()
        self._active = self._segments[segment]
        self._seed = crc_seed(self.incarnation, segment)
        self.index = SegmentIndex(segment)

    def sync(self) -> None:
        """Make durable what the relaxed policies have written."""
        self.check()
        if self.durable_unit == self.written_unit or self._active is None:
            return
        try:
            self._active.file.fdatasync()
            self.durable_unit = self.written_unit
            self._put_watermark(self._last)
        except BaseException as error:
            self.poisoned = error
            raise

    def _put_watermark(self, unit: SealedUnit) -> None:
        assert self._mark is not None
        self._mark.pwritev([self._watermark(unit.segment, unit.end, unit.time)], 0)

    def _watermark(self, segment: int, end: int, time: int) -> bytes:
        return Watermark(
            self.durable_unit, self.written_unit, segment, end, time, self.incarnation, self.policy != "commit"
        ).pack()

    def close(self) -> None:
        """Close the files without writing anything."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        self._active = None
