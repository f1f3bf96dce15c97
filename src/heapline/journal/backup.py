"""Copy one topic's directory while an engine may be writing to it.

Theory of operation. The copy must satisfy recovery: a valid snapshot, all segments that it or the units after it refer
to, and every unit up to the end of the copy. The steps, in this order:

1. Take a reader lease on the first segment. From here on no segment is deleted (except one whose deletion has begun).
2. Copy the newest valid snapshot, of unit U. If the engine prunes it meanwhile, take the next one.
3. List the segments. If one of them is deleted before it was copied, start over.
4. Read the watermark last. Bytes up to it are never written again. While an engine runs, it names a unit at or after
   U, because only durable units are in a snapshot, and at or after every ack for which a segment was deleted. It is not
   synced, so after a power cut it may be old, and under the `interval` policy it lags behind the answers.
5. So continue from the watermark as long as complete units follow, as recovery would; that is the end of the copy. A
   unit that is being written fails its checksum and is left out; it was not acknowledged when the copy began.
6. Copy the segments up to that end. The last one is copied up to the end and continues with zeros.

The checkpoints of replays are read first, so that none is ahead of the copied units. The copy is synced. It opens like
the directory of an engine that was killed right after the copy's last unit. Nothing in the source changes except the
lease file, which is removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from heapline.contract.errors import JournalCorrupt, SnapshotCorrupt, UnavailableError
from heapline.journal.disk import Disk, File
from heapline.journal.log_bounds import Watermark, log_start_path, read_watermark, watermark_path
from heapline.journal.reclaim import end_lease, hold_segments
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import FIRST_UNIT_AT, NO_CHAIN, SegmentWalk, index_path, segment_path
from heapline.journal.small_files import checkpoints_of
from heapline.journal.snapshot import SnapshotStore

CHUNK_BYTES = 4 << 20
LEASE_MS = 3600_000  # renewed before each segment is copied
TRIES = 10


class Copied(NamedTuple):
    """The result of a copy."""

    unit: int  # last unit in the copy
    snapshot_unit: int  # 0 if there is no snapshot
    segments: int
    bytes: int


class _Moved(Exception):
    """A file was deleted while it was being copied; start over."""


def copy_topic(disk: Disk, source: str, target: str, wall_ms: Callable[[], int]) -> Copied:
    """Copy a topic. `target` is created and must not exist. Raise FileNotFoundError if the source does not exist."""
    for _ in range(TRIES):
        disk.remove_tree(target)
        disk.listdir(source)
        try:
            return _Copy(disk, source, target, wall_ms).run()
        except _Moved:
            continue
    raise UnavailableError(
        f"{source} changed {TRIES} times while it was being copied; try again when there is less activity"
    )


class _Copy:
    def __init__(self, disk: Disk, source: str, target: str, wall_ms: Callable[[], int]) -> None:
        self._disk, self._source, self._target, self._wall_ms = disk, source, target, wall_ms
        self._name = f"backup-{os.getpid()}"
        self._bytes = 0

    def run(self) -> Copied:
        disk, target = self._disk, self._target
        for directory in (target, f"{target}/snapshots", f"{target}/readers"):
            disk.mkdir(directory)
        checkpoints = checkpoints_of(disk, self._source).read_all()
        try:
            first = list_segments(disk, self._source)[0]
            self._hold(first)
            snapshot_unit = self._copy_snapshot()
            present = list_segments(disk, self._source)
            mark = self._extend_watermark(self._watermark(), present)
            segments = [number for number in present if number <= mark.segment]
            for number in segments:
                self._hold(first)
                self._copy_segment(number, mark)
            with contextlib.suppress(FileNotFoundError):  # most topics have none
                self._copy(log_start_path(self._source), log_start_path(target))
            file = disk.create(watermark_path(target))
            self._finish(file, [mark.pack()])
            checkpoints_of(disk, target).write_all(checkpoints)
        finally:
            end_lease(disk, self._source, self._name)
        for directory in (f"{target}/snapshots", f"{target}/readers", target, os.path.dirname(target)):
            disk.fsync_dir(directory)
        return Copied(mark.visible, snapshot_unit, len(segments), self._bytes)

    def _hold(self, segment: int) -> None:
        hold_segments(self._disk, self._source, self._name, segment, self._wall_ms() + LEASE_MS)

    def _watermark(self) -> Watermark:
        mark = read_watermark(self._disk, self._source)
        if mark is None:
            detail = "it is missing or corrupt; open the topic once to rewrite it"
            raise JournalCorrupt(watermark_path(self._source), 0, detail)
        return mark

    def _extend_watermark(self, mark: Watermark, present: list[int]) -> Watermark:
        """Return the watermark as it would be after the last complete unit."""
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
                    durable = mark.durable if mark.relaxed else unit.number  # every unit in the copy is durable
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
        """Copy the newest snapshot that is valid in the copy, and return its unit."""
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
            if end is not None:
                self._end_copy_at(number)
        except FileNotFoundError:
            raise _Moved from None
        if end is None:
            index = index_path(self._source, number)
            with contextlib.suppress(FileNotFoundError):  # it can be rebuilt
                self._copy(index, index_path(self._target, number))

    def _end_copy_at(self, number: int) -> None:
        """Make this segment the last one of the copy: in the source, the next one may be about to begin.

        The copied header may be a part of one that was being rewritten, so the source's is read again.
        """
        header = read_header(self._disk, self._source, number)
        copy = self._disk.open(segment_path(self._target, number), write=True)
        self._finish(copy, [] if header is None else [replace(header, is_followed=False).pack()])

    def _copy(self, source: str, target: str, end: int | None = None) -> None:
        """Copy a file, or its beginning followed by zeros up to its size."""
        file = self._disk.open(source)
        try:
            size = file.size()
            copy = self._disk.create(target)
            stop = size if end is None else end
            for at in range(0, stop, CHUNK_BYTES):
                copy.pwritev([file.pread(min(CHUNK_BYTES, stop - at), at)], at)
            if size > stop:
                copy.fallocate(stop, size - stop)  # reserves the space, as in the original
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
