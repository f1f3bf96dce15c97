"""A copy of one topic's folder, taken while an engine may be writing to it.

Theory of operation. What must hold of the copy is what recovery asks for: a snapshot that checks, all segments that it
or the units after it refer to, and every unit up to where the copy ends. So, in this order:

1. A reader lease on the first segment: from here on no segment goes (one that was being deleted just now may).
2. The newest snapshot that checks, of unit U. The engine may prune it meanwhile; then the next one is taken.
3. Which segments there are; if one of them goes before it was copied, all begins again.
4. The watermark, last. What lies at or before it is never written again. Where an engine runs it names a unit at or
   after U, since a snapshot is only made of durable units, and at or after every ack for which a segment went. But it
   is not synced, so after a power cut it may be old, and under the `interval` policy it follows behind the answers.
5. Therefore the copy goes on from there as far as whole units follow, as recovery would: that is the end. A unit that
   is being written just now does not check and is left out whole; it was answered to nobody when the copy began.
6. The segments up to that end. Of the last one only what lies before the end, zeros after it.

The copy is synced; it opens like the directory of an engine that was killed right after the last unit in it.
Nothing in the source is changed but the lease file, which is removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from heapline.errors import JournalCorrupt, SnapshotCorrupt, UnavailableError
from heapline.journal.disk import Disk, File
from heapline.journal.log_start import log_start_path
from heapline.journal.reclaim import ReaderLease, end_lease, write_lease
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import FIRST_UNIT_AT, index_path, segment_path
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.walk import NO_CHAIN, SegmentWalk
from heapline.journal.watermark import Watermark, read_watermark, watermark_path

CHUNK_BYTES = 4 << 20
LEASE_MS = 3600_000  # renewed before every segment
TRIES = 10


class Copied(NamedTuple):
    unit: int  # the last one in the copy
    snapshot_unit: int  # 0: without a snapshot
    segments: int
    bytes: int


class _Moved(Exception):
    """Something went while it was being copied: begin again."""


def copy_topic(disk: Disk, source: str, target: str, wall_ms: Callable[[], int]) -> Copied:
    """`target` is made, and must not be there. FileNotFoundError if the source itself is not there (any more)."""
    for _ in range(TRIES):
        disk.remove_tree(target)
        disk.listdir(source)
        try:
            return _Copy(disk, source, target, wall_ms).run()
        except _Moved:
            continue
    raise UnavailableError(f"{source} changed {TRIES} times while it was being copied: try again when less goes on")


class _Copy:
    def __init__(self, disk: Disk, source: str, target: str, wall_ms: Callable[[], int]) -> None:
        self._disk, self._source, self._target, self._wall_ms = disk, source, target, wall_ms
        self._name = f"backup-{os.getpid()}"
        self._bytes = 0

    def run(self) -> Copied:
        disk, target = self._disk, self._target
        for directory in (target, f"{target}/snapshots", f"{target}/readers"):
            disk.mkdir(directory)
        try:
            first = list_segments(disk, self._source)[0]
            self._hold(first)
            snapshot_unit = self._copy_snapshot()
            present = list_segments(disk, self._source)
            mark = self._go_on(self._watermark(), present)
            segments = [number for number in present if number <= mark.segment]
            for number in segments:
                self._hold(first)
                self._copy_segment(number, mark)
            with contextlib.suppress(FileNotFoundError):  # most have none
                self._copy(log_start_path(self._source), log_start_path(target))
            file = disk.create(watermark_path(target))
            self._finish(file, [mark.pack()])
        finally:
            end_lease(disk, self._source, self._name)
        for directory in (f"{target}/snapshots", f"{target}/readers", target, os.path.dirname(target)):
            disk.fsync_dir(directory)
        return Copied(mark.visible, snapshot_unit, len(segments), self._bytes)

    def _hold(self, segment: int) -> None:
        lease = ReaderLease(self._name, os.getpid(), segment, self._wall_ms() + LEASE_MS)
        write_lease(self._disk, self._source, lease)

    def _watermark(self) -> Watermark:
        mark = read_watermark(self._disk, self._source)
        if mark is None:
            detail = "it is missing or does not check: open the topic once to have it written anew"
            raise JournalCorrupt(watermark_path(self._source), 0, detail)
        return mark

    def _go_on(self, mark: Watermark, present: list[int]) -> Watermark:
        """The watermark as it would be after the last whole unit."""
        number, chain, at = mark.visible + 1, NO_CHAIN, mark.byte_end
        for segment in [n for n in present if n >= mark.segment]:
            try:
                if at == FIRST_UNIT_AT and read_header(self._disk, self._source, segment) is None:
                    break
                file = self._disk.open(segment_path(self._source, segment))
            except FileNotFoundError:
                raise _Moved from None
            try:
                walk = SegmentWalk(file, mark.incarnation, segment, number=number, chain=chain, at=at)
                for unit in walk:
                    durable = mark.durable if mark.relaxed else unit.number  # in the copy it is
                    mark = replace(
                        mark, durable=durable, visible=unit.number, segment=segment, byte_end=unit.end, time=unit.time
                    )
            finally:
                file.close()
            number, chain, at = walk.number, walk.chain, FIRST_UNIT_AT
            if walk.broken:
                break
        return mark

    def _copy_snapshot(self) -> int:
        """The unit of the newest one that checks where it has been copied to."""
        source = SnapshotStore(self._disk, f"{self._source}/snapshots")
        target = SnapshotStore(self._disk, f"{self._target}/snapshots")
        units = source.units()
        for unit in reversed(units):
            try:
                for name in source.files_of(unit):
                    self._copy(f"{source.directory}/{name}", f"{target.directory}/{name}")
                target.load(unit)
            except (SnapshotCorrupt, FileNotFoundError):
                self._disk.remove_tree(target.directory)
                self._disk.mkdir(target.directory)
                continue
            return unit
        if units != source.units():
            raise _Moved
        return 0

    def _copy_segment(self, number: int, mark: Watermark) -> None:
        end = mark.byte_end if number == mark.segment else None
        try:
            self._copy(segment_path(self._source, number), segment_path(self._target, number), end)
        except FileNotFoundError:
            raise _Moved from None
        index = index_path(self._source, number)
        if end is None:
            with contextlib.suppress(FileNotFoundError):  # it can be made again
                self._copy(index, index_path(self._target, number))

    def _copy(self, source: str, target: str, end: int | None = None) -> None:
        """All of a file, or its beginning with zeros after it up to its size."""
        file = self._disk.open(source)
        try:
            size = file.size()
            copy = self._disk.create(target)
            stop = size if end is None else end
            for at in range(0, stop, CHUNK_BYTES):
                copy.pwritev([file.pread(min(CHUNK_BYTES, stop - at), at)], at)
            if size > stop:
                copy.fallocate(stop, size - stop)  # as in the original: a full disk is noticed before a write
        finally:
            file.close()
        self._bytes += stop
        self._finish(copy, [])

    def _finish(self, file: File, parts: list[bytes]) -> None:
        try:
            if parts:
                file.pwritev(parts, 0)
            file.fdatasync()
        finally:
            file.close()
