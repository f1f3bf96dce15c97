"""Recovery: all units of a journal directory in order, each one checked, up to the last complete one.

Theory of operation. Segments are numbered without gaps from the first existing one (earlier ones were reclaimed). Each
header repeats what the previous segment ended with, unit number and chain, so a missing, swapped or shortened segment
is detected. A header also says whether a segment follows, so a missing last one is detected. After the last segment
with a header only files of zeros may follow: prepared segments. In the last segment, and only there, the last unit may
be torn (tail.py). A following segment proves everything before it durable, under every policy, because the writer syncs
a segment before it starts the next.

`Scan` only reads. Opening for writing adds two steps. `cut` zeros a torn unit. `settle` rewrites units that are not
known to be durable before anything builds on them, because after a failed fsync the page cache may show bytes that
never reached the disk.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator

import msgspec

from heapline.contract.errors import BadRequest, JournalCorrupt
from heapline.journal.disk import SECTOR, Disk, File
from heapline.journal.index import SegmentIndex
from heapline.journal.log_bounds import Watermark, watermark_or_closest, watermark_path
from heapline.journal.sectors import all_zeros
from heapline.journal.segment import (
    CHUNK_BYTES,
    FIRST_UNIT_AT,
    SegmentHeader,
    SegmentWalk,
    index_path,
    numbered,
    parse_segment_header,
    segment_path,
    size_is_legal,
)
from heapline.journal.tail import Tail, is_torn
from heapline.journal.unit import FLAG_RELAXED, Unit, crc_seed

HEADER_READS = 8  # attempts


class Torn(msgspec.Struct, frozen=True):
    """A torn write: everything from `offset` to the end of the segment's file has to be zeroed."""

    segment: int
    offset: int
    unit: int


def check_beginning(disk: Disk, directory: str) -> None:
    """Raise JournalCorrupt if the first units are missing. Only a snapshot could replace them."""
    first = list_segments(disk, directory)[0]
    header = read_header(disk, directory, first)
    if header is not None and header.first_unit > 1:
        detail = f"units 1 to {header.first_unit - 1} are missing, and no intact snapshot covers them"
        raise JournalCorrupt(segment_path(directory, first), 0, detail)


def list_segments(disk: Disk, directory: str) -> list[int]:
    """Return the segment numbers. Raise JournalCorrupt if there are none or one is missing between them."""
    present = numbered(disk.listdir(directory), ".seg")
    if not present:
        raise JournalCorrupt(segment_path(directory, 1), 0, "the journal has no segment")
    for number, follower in itertools.pairwise(present):
        if follower != number + 1:
            raise JournalCorrupt(segment_path(directory, number + 1), 0, "the segment is missing")
    return present


def read_header(disk: Disk, directory: str, number: int) -> SegmentHeader | None:
    """Return a segment's header, or None if it is all zeros. Retries briefly, in case it is being rewritten."""
    path = segment_path(directory, number)
    file = disk.open(path)
    try:
        header = _parse_header(file, path)
    finally:
        file.close()
    if header is not None and header.number != number:
        raise JournalCorrupt(path, 0, f"the file holds segment {header.number}")
    return header


def _parse_header(file: File, path: str) -> SegmentHeader | None:
    for _ in range(HEADER_READS - 1):
        with contextlib.suppress(JournalCorrupt):  # a read beside a write may see a part of it
            return parse_segment_header(file.pread(SECTOR, 0), path)
    return parse_segment_header(file.pread(SECTOR, 0), path)


class Scan:
    """Iterate once over the units above `after_unit`; afterwards the attributes describe where the journal ends.

    `known_durable` is a unit number proved durable by something else (a snapshot). `incarnation` and
    `segment_bytes` are what the topic must have; None accepts those of the first segment.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        after_unit: int = 0,
        from_segment: int | None = None,
        known_durable: int = 0,
        incarnation: int | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        self.disk = disk
        self.directory = directory
        self._after = after_unit
        self._segments = list_segments(disk, directory)
        self._mark = watermark_or_closest(disk, directory)
        self._written = self._written_segments()
        self._check_follower()
        self._start = self._start_segment(after_unit, from_segment)
        first = self._header(self._start)
        self.incarnation = first.incarnation if incarnation is None else incarnation
        self.capacity = first.capacity
        if segment_bytes not in (None, self.capacity):
            detail = f"its segments have {self.capacity} bytes, the topic's config says {segment_bytes}"
            raise JournalCorrupt(segment_path(directory, self.first_segment), 0, detail)
        self._check_watermark(self._mark)
        self.known_durable = max(known_durable, self._mark.durable if self._mark else 0)
        self.relaxed = bool(self._mark and self._mark.relaxed)
        # The end of the journal; final once the iteration has ended.
        self.finished = False
        self.last_unit = first.first_unit - 1
        self.last_time = self._mark.time if self._mark else 0
        self.last_wall: int | None = None  # wall time of the last unit
        self.chain = first.chain
        self.segment = self._start  # segment and byte of the next unit
        self.end = FIRST_UNIT_AT
        self.torn: Torn | None = None
        self.index = SegmentIndex(self._start)  # index of the last segment
        self.finished_indexes: list[SegmentIndex] = []  # full segments without a stored index
        self._unsure: deque[tuple[int, int, int, int]] = deque()  # units not known durable: number, segment, start, end

    @property
    def ready_segments(self) -> list[int]:
        """Prepared files of zeros after the last written segment."""
        return [n for n in self._segments if n > self.segment]

    @property
    def first_segment(self) -> int:
        return self._segments[0]

    def __iter__(self) -> Iterator[Unit]:
        for number in self._written[self._written.index(self._start) :]:
            yield from self._segment(number, last=number == self._written[-1])
        self._judge_unwritten()
        if self.last_unit < self.known_durable:
            path = segment_path(self.directory, self.segment)
            raise JournalCorrupt(path, self.end, f"units {self.last_unit + 1} to {self.known_durable} are missing")
        self.finished = True

    def _path(self, number: int) -> str:
        return segment_path(self.directory, number)

    def _header(self, number: int) -> SegmentHeader:
        header = read_header(self.disk, self.directory, number)
        if header is None:
            raise JournalCorrupt(self._path(number), 0, "the segment header is missing")
        return header

    def _written_segments(self) -> list[int]:
        """Return the segments up to the last one with a header. Missing headers before it are found during the scan."""
        last = len(self._segments)
        while last > 1 and read_header(self.disk, self.directory, self._segments[last - 1]) is None:
            last -= 1
        return self._segments[:last]

    def _check_follower(self) -> None:
        """Raise JournalCorrupt if the last segment was removed, though the one before it says that it exists."""
        last = self._written[-1]
        if last == self._segments[-1] and self._header(last).is_followed:
            raise JournalCorrupt(self._path(last + 1), 0, "the segment is missing")

    def _start_segment(self, after_unit: int, from_segment: int | None) -> int:
        if from_segment is not None:
            if from_segment not in self._written:
                raise BadRequest(f"the journal has no segment {from_segment}; it starts at segment {self._segments[0]}")
            return from_segment
        if after_unit == 0:
            return self._written[0]
        for number in reversed(self._written):
            if self._header(number).first_unit <= after_unit + 1:
                return number
        raise JournalCorrupt(self._path(self._segments[0] - 1), 0, f"the segment with unit {after_unit + 1} is missing")

    def _check_watermark(self, mark: Watermark | None) -> None:
        if mark is not None and mark.incarnation != self.incarnation:
            raise JournalCorrupt(
                watermark_path(self.directory), 0, "the watermark belongs to another topic incarnation"
            )

    def _segment(self, number: int, last: bool) -> Iterator[Unit]:
        self._check_header(number)
        file = self.disk.open(path := self._path(number))
        try:
            if not size_is_legal(size := file.size(), self.capacity):
                raise JournalCorrupt(path, size, f"the file was truncated or extended: it has {size} bytes")
            self._enter(number)
            walk = SegmentWalk(file, self.incarnation, number, number=self.last_unit + 1, chain=self.chain)
            for unit in walk:
                self._passed(unit)
                if unit.number > self._after:
                    yield unit
            rest = _read_all(file, walk.at, size)
            if last:
                self._judge_rest(walk, rest)
            elif walk.broken or not all_zeros(rest):
                detail = walk.broken or f"there are bytes after unit {self.last_unit}, the last of the segment"
                raise JournalCorrupt(file.path, walk.at, detail)
        finally:
            file.close()

    def _enter(self, number: int) -> None:
        if number != self.index.segment:
            if not self.disk.exists(index_path(self.directory, self.index.segment)):
                self.finished_indexes.append(self.index)
            self.index = SegmentIndex(number)
        self.segment, self.end = number, FIRST_UNIT_AT

    def _check_header(self, number: int) -> None:
        header, path = self._header(number), self._path(number)
        if header.incarnation != self.incarnation:
            raise JournalCorrupt(path, 0, f"the segment belongs to topic incarnation {header.incarnation}")
        if header.capacity != self.capacity:
            raise JournalCorrupt(
                path, 0, f"the segment's capacity ({header.capacity}) differs from that of earlier segments"
            )
        if header.first_unit != self.last_unit + 1:
            detail = f"it ends with unit {self.last_unit}, but segment {number} starts with unit {header.first_unit}"
            raise JournalCorrupt(self._path(self.segment), self.end, detail)
        if header.chain != self.chain:
            raise JournalCorrupt(path, 0, f"the segment does not follow from unit {self.last_unit}")

    def _passed(self, unit: Unit) -> None:
        self.last_unit, self.last_time, self.chain = unit.number, max(self.last_time, unit.time), unit.header.body_crc
        self.end, self.last_wall = unit.end, unit.wall
        self.index.add(unit.number, unit.offset, unit.time, unit.wall, unit.frames)
        if self._mark is None:
            self.relaxed = bool(unit.header.flags & FLAG_RELAXED)
        durable = max(self.known_durable, unit.header.durable_end)
        self._unsure.append((unit.number, unit.segment, unit.offset, unit.end))
        while self._unsure and (self._unsure[0][0] <= durable or self._unsure[0][1] != unit.segment):
            self._unsure.popleft()

    def _judge_rest(self, walk: SegmentWalk, rest: bytes) -> None:
        if is_torn(self._tail(walk.segment, walk.at, rest)):
            self.torn = Torn(walk.segment, walk.at, self.last_unit + 1)

    def _judge_unwritten(self) -> None:
        """Check the files after the last header: zeros, except that the first may hold a torn first write."""
        for number in (n for n in self._segments if n > self._written[-1]):
            file = self.disk.open(self._path(number))
            try:
                size = file.size()
                if not size_is_legal(size, self.capacity):
                    raise JournalCorrupt(file.path, size, f"the file was truncated or extended: it has {size} bytes")
                rest = _read_all(file, FIRST_UNIT_AT, size)
            finally:
                file.close()
            if all_zeros(rest):
                continue
            if number != self._written[-1] + 1 or self.torn is not None:
                raise JournalCorrupt(file.path, 0, "there are bytes, but no segment header")
            if is_torn(self._tail(number, FIRST_UNIT_AT, rest, header_lost=True)):
                self.torn = Torn(number, 0, self.last_unit + 1)

    def _tail(self, number: int, at: int, rest: bytes, header_lost: bool = False) -> Tail:
        return Tail(
            self._path(number),
            at,
            rest,
            crc_seed(self.incarnation, number),
            self.last_unit + 1,
            self.chain,
            self.known_durable,
            self.relaxed,
            header_lost,
        )

    # The two steps of opening for writing. Each can be repeated after a crash.

    def cut(self) -> None:
        """Zero the torn write, durably. If interrupted, the unit has more zeros and is still torn."""
        if self.torn is None:
            return
        file = self.disk.open(self._path(self.torn.segment), write=True)
        try:
            file.zero(self.torn.offset, file.size() - self.torn.offset)
            file.fdatasync()
        finally:
            file.close()

    def settle(self) -> None:
        """Rewrite and sync the units that exist but are not known to be durable."""
        if not self._unsure:
            return
        (_, segment, start, _), end = self._unsure[0], self._unsure[-1][3]
        file = self.disk.open(self._path(segment), write=True)
        try:
            if start == FIRST_UNIT_AT:
                start = 0  # the segment's header was lost with its first unit
            for at in range(start, end, CHUNK_BYTES):
                file.pwritev([file.pread(min(CHUNK_BYTES, end - at), at)], at)
            file.fdatasync()
        finally:
            file.close()


def _read_all(file: File, start: int, end: int) -> bytes:
    return file.pread(end - start, start) if end > start else b""


def scan(
    disk: Disk, directory: str, *, after_unit: int = 0, from_segment: int | None = None, known_durable: int = 0
) -> Iterator[Unit]:
    """Yield the units above `after_unit` in order, read-only, up to the last complete one.

    Raise JournalCorrupt on damage.
    """
    found = Scan(disk, directory, after_unit=after_unit, from_segment=from_segment, known_durable=known_durable)
    return iter(found)
