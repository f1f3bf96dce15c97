"""Read the log: the durable units of a journal directory, from any position, by this or another process.

A reader stops at the watermark, so everything it yields was acknowledged. It finds positions by partition and offset,
id or time through the sparse indexes, and rebuilds missing ones in memory. It only reads and never judges a tail: units
at or below the watermark must be valid, and bytes above it are ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import numpy as np

from heapline.contract.errors import BadRequest, JournalCorrupt
from heapline.journal import seek
from heapline.journal.disk import SECTOR, Disk
from heapline.journal.index import HEADER_BYTES, SegmentIndex, parse_index, parse_wall_max
from heapline.journal.log_bounds import Watermark, read_log_start, read_watermark, watermark_path
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.seek import Place as Place
from heapline.journal.segment import CHUNK_BYTES, FIRST_UNIT_AT, OpenWalk, SegmentHeader, index_path, segment_path
from heapline.journal.unit import Unit, crc_seed, parse_header

_INDEXES_MAX = 64
_LOOKS_MAX = 8
Answer = TypeVar("Answer")


class LogReader:
    """One reader of one directory; not shared between threads. `active` is the writer's index, in the same process."""

    def __init__(self, disk: Disk, directory: str, active: Callable[[], SegmentIndex | None] | None = None) -> None:
        self.disk, self.directory = disk, directory
        self._active = active
        self._headers: dict[int, SegmentHeader] = {}
        self._indexes: dict[int, SegmentIndex] = {}
        self._growing: SegmentIndex | None = None
        self._first_times: dict[int, int] = {}
        self._wall_maxes: dict[int, int] = {}  # full segments only

    def watermark(self) -> Watermark:
        mark = read_watermark(self.disk, self.directory)
        if mark is None:
            detail = "it is missing or corrupt; open the topic once to rewrite it"
            raise JournalCorrupt(watermark_path(self.directory), 0, detail)
        return mark

    def log_start(self) -> dict[int, int]:
        """Return, per partition, the first offset that may be read, even if an earlier segment still exists."""
        return dict(enumerate(read_log_start(self.disk, self.directory)))

    def first_offsets(self, partitions: int) -> list[int | None]:
        """Return the first readable offset of each partition, or None if it has none."""
        starts: list[int | None] = [None] * partitions
        missing = set(range(partitions))
        for segment in self.segments():
            index = self.index(segment)
            for partition in sorted(missing):
                entries = index.of(partition)
                if len(entries):
                    starts[partition] = int(entries["first_offset"][0])
                    missing.discard(partition)
            if not missing:
                break
        raised = self.log_start()
        return [start if start is None else max(start, raised.get(p, 0)) for p, start in enumerate(starts)]

    def _header(self, number: int) -> SegmentHeader:
        header = self._headers.get(number) or read_header(self.disk, self.directory, number)
        if header is None:
            raise JournalCorrupt(segment_path(self.directory, number), 0, "the segment header is missing")
        self._headers[number] = header
        return header

    def _segments(self, mark: Watermark) -> list[int]:
        return [n for n in list_segments(self.disk, self.directory) if n <= mark.segment]

    def segments(self) -> list[int]:
        """Return the segments that hold durable units."""
        return self._segments(self.watermark())

    # Units.

    def read_units(
        self, *, start_unit: int = 0, place: Place | None = None, durable_only: bool = True
    ) -> Iterator[Unit]:
        """Yield units in order, from a number or from a position returned by `locate`, up to the watermark.

        With durable_only=False, also yield complete units beyond the watermark. Raise BadRequest if the start was
        reclaimed.
        """
        mark = self.watermark()
        segments = self._segments(mark)
        if place is None:
            place = self._place_of_unit(start_unit, segments)
        if place[0] < segments[0]:
            raise BadRequest(f"segment {place[0]} was reclaimed; the journal starts at segment {segments[0]}")
        try:
            yield from self._from_place(place, mark, start_unit, durable_only)
        except FileNotFoundError as error:
            raise BadRequest(f"{error.filename} was reclaimed during the read; start again") from None

    def _from_place(self, place: Place, mark: Watermark, start_unit: int, durable_only: bool) -> Iterator[Unit]:
        segment, at = place
        previous: tuple[int, int] | None = None  # number and chain that the next unit must have
        while segment <= mark.segment:
            is_last = segment == mark.segment
            stop = mark.byte_end if is_last and durable_only else None
            walk = self._walk(segment, at, stop, previous)
            yield from (unit for unit in walk if unit.number >= start_unit)
            if not (is_last and not durable_only):
                self._check_end(walk, segment, stop)
            previous = (walk.number, walk.chain) if walk.number else None
            segment, at = segment + 1, FIRST_UNIT_AT

    def units_of_segment(self, segment: int, at: int, chunk: int = CHUNK_BYTES) -> Iterator[Unit]:
        """Yield the durable units of one segment from a byte offset on, reading `chunk` bytes at a time."""
        mark = self.watermark()
        stop = mark.byte_end if segment == mark.segment else None
        walk = self._walk(segment, at, stop, None, chunk)
        yield from walk
        self._check_end(walk, segment, stop)

    def _check_end(self, walk: OpenWalk, segment: int, stop: int | None) -> None:
        if walk.broken or (stop is not None and walk.at < stop):
            detail = walk.broken or "durable units are missing here"
            raise JournalCorrupt(segment_path(self.directory, segment), walk.at, detail)

    def _walk(
        self, segment: int, at: int, stop: int | None, previous: tuple[int, int] | None, chunk: int = CHUNK_BYTES
    ) -> OpenWalk:
        header = self._header(segment)
        if at == FIRST_UNIT_AT:
            if previous is not None and previous != (header.first_unit, header.chain):
                path = segment_path(self.directory, segment)
                raise JournalCorrupt(path, 0, f"the segment does not follow from unit {previous[0] - 1}")
            previous = (header.first_unit, header.chain)
        return OpenWalk(self.disk, self.directory, header, at, stop, previous, chunk)

    def _place_of_unit(self, unit: int, segments: list[int]) -> Place:
        if unit <= 0:
            return segments[0], FIRST_UNIT_AT
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            if self._header(segments[middle]).first_unit <= unit:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            first = self._header(segments[0]).first_unit
            raise BadRequest(f"unit {unit} was reclaimed; the journal starts at unit {first}")
        entries = self.index(segments[low - 1]).entries()
        near = int(np.searchsorted(entries["unit"], unit, side="right")) - 1
        return segments[low - 1], int(entries["at"][near]) if near >= 0 else FIRST_UNIT_AT

    # Positions.

    def locate(
        self, partition: int, *, offset: int | None = None, id: int | None = None, time: int | None = None
    ) -> Place | None:
        """Return the unit at which to start reading, or None if it does not exist yet. Exactly one of:

        - offset: the first unit that holds a row of the partition at or after this offset;
        - time: the first unit of the partition written at or after this journal time;
        - id: the last unit of the partition whose first enqueued id is at most this one: it holds the message's record.
        """
        if sum(given is not None for given in (offset, id, time)) != 1:
            raise BadRequest("locate takes exactly one of offset, id and time")
        return self._unless_reclaimed(lambda: self._locate(partition, offset, id, time))

    def _locate(self, partition: int, offset: int | None, id: int | None, time: int | None) -> Place | None:
        found: seek.Found | None
        if time is not None:
            found = self._first_from(partition, seek.first_unit(self, "time", time))
        elif offset is not None:
            start = seek.floor(self, partition, "first_offset", offset)
            found = seek.first_where(self, partition, start, lambda found: found.end > offset)
        else:
            assert id is not None
            found = seek.last_with_id(self, partition, seek.floor(self, partition, "first_id", id), id)
        return None if found is None else found.place

    def offset_at(self, partition: int, *, time: int | None = None, wall: int | None = None) -> int:
        """Return the offset of the partition's first row at or after a journal time or a wall time, exactly one of
        them.

        Returns the partition's end if there is no such row yet, and 0 if the journal holds nothing of it. A wall time
        is where the clock first showed it or more, at one point for all partitions (seek.py). No row written at or
        after it is before the offset, even if the clock was set back later.
        """
        if (time is None) == (wall is None):
            raise BadRequest("offset_at takes exactly one of time and wall")
        column: Literal["time", "wall"] = "time" if wall is None else "wall"
        target = time if wall is None else wall
        assert target is not None
        return self._unless_reclaimed(lambda: self._offset_at(partition, column, target))

    def _offset_at(self, partition: int, column: Literal["time", "wall"], target: int) -> int:
        while True:
            unit = seek.first_unit(self, column, target)
            found = self._first_from(partition, unit)
            if found is not None:
                return found.frame.first_offset
            limit = seek.END if unit is None else (unit.segment, unit.offset)
            last = seek.last_before(self, partition, limit)
            if last is None:
                return 0
            if unit is not None or (last.unit.time if column == "time" else last.unit.wall) < target:
                return last.end  # otherwise it was written during the search

    def _unless_reclaimed(self, look: Callable[[], Answer]) -> Answer:
        """Search again if a segment was deleted meanwhile: the position is in the remaining ones, or is their start."""
        for _ in range(_LOOKS_MAX):
            with contextlib.suppress(FileNotFoundError):
                return look()
        raise BadRequest("the journal is reclaimed faster than it can be searched; try again")

    def _first_from(self, partition: int, unit: Unit | None) -> seek.Found | None:
        return None if unit is None else next(seek.frames_of(self, partition, (unit.segment, unit.offset)), None)

    # Indexes.

    def index(self, segment: int) -> SegmentIndex:
        """Return the sparse index of a segment: the writer's, a stored one, or one built now."""
        active = self._active() if self._active is not None else None
        if active is not None and active.segment == segment:
            return active
        mark = self.watermark()
        if segment == mark.segment:
            return self._index_so_far(mark)
        found = self._indexes.get(segment) or self._stored(segment, mark)
        if found is None:
            found = self.build_index(segment, None)
        self._indexes[segment] = found
        if len(self._indexes) > _INDEXES_MAX:
            self._indexes.pop(next(iter(self._indexes)))
        return found

    def _index_so_far(self, mark: Watermark) -> SegmentIndex:
        """Return an index of the segment that another process is writing. Kept apart, because it lacks later units."""
        found = self._growing
        if found is None or found.segment != mark.segment or found.last_unit < mark.visible:
            found = self._growing = self.build_index(mark.segment, mark.byte_end)
        return found

    def _stored(self, segment: int, mark: Watermark) -> SegmentIndex | None:
        try:
            data = self.disk.read_file(index_path(self.directory, segment))
        except FileNotFoundError:
            return None
        return parse_index(data, segment, mark.incarnation)

    def build_index(self, segment: int, stop: int | None) -> SegmentIndex:
        """Build an index from the units themselves, up to byte `stop`."""
        index = SegmentIndex(segment)
        for unit in self._walk(segment, FIRST_UNIT_AT, stop, None):
            index.add(unit.number, unit.offset, unit.time, unit.wall, unit.frames)
        return index

    def first_time(self, segment: int) -> int | None:
        """Return the journal time of a segment's first unit, or None if it has none yet."""
        known = self._first_times.get(segment)
        if known is None:
            file = self.disk.open(path := segment_path(self.directory, segment))
            try:
                sector = file.pread(SECTOR, FIRST_UNIT_AT)
            finally:
                file.close()
            first = parse_header(sector, 0, crc_seed(self._header(segment).incarnation, segment), path)
            if first is None:
                return None
            known = self._first_times[segment] = first.time
        return known

    def first_unit(self) -> Unit | None:
        """Return the first unit that is left of the log, or None if the log is empty."""
        return self._unless_reclaimed(self._first_unit)

    def _first_unit(self) -> Unit | None:
        return next(iter(self.units_of_segment(self.segments()[0], FIRST_UNIT_AT, seek.CHUNK_BYTES)), None)

    def wall_max(self, segment: int, mark: Watermark) -> int:
        """Return the highest wall time of a segment's units, usually from the first bytes of its stored index."""
        known = self._wall_maxes.get(segment)
        if known is None and segment != mark.segment:
            known = self._stored_wall_max(segment, mark)
        if known is None:
            known = self.index(segment).wall_max
        if segment != mark.segment:
            self._wall_maxes[segment] = known
        return known

    def _stored_wall_max(self, segment: int, mark: Watermark) -> int | None:
        try:
            file = self.disk.open(index_path(self.directory, segment))
        except FileNotFoundError:
            return None
        try:
            return parse_wall_max(file.pread(HEADER_BYTES, 0), segment, mark.incarnation)
        finally:
            file.close()
