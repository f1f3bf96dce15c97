"""Reading the log: the durable units of a journal directory, from any place, by this or another process.

Stops at the watermark, so what it yields was answered for. Finds places by partition and offset, id or time through
the sparse indexes, rebuilding in memory those that are absent. Only reads; never judges a tail: what lies at or
below the watermark must check, and what lies above is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from heapline.errors import BadRequest, JournalCorrupt
from heapline.journal.disk import Disk
from heapline.journal.index import Entries, SegmentIndex, parse_index
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import FIRST_UNIT_AT, SegmentHeader, index_path, segment_path
from heapline.journal.unit import Unit
from heapline.journal.walk import SegmentWalk
from heapline.journal.watermark import Watermark, read_watermark, watermark_path

Place = tuple[int, int]  # segment, byte offset of a unit
_INDEXES_MAX = 64


class LogReader:
    """One reader of one directory; not shared between threads. `active`: the writer's own index, if in its process."""

    def __init__(self, disk: Disk, directory: str, active: Callable[[], SegmentIndex | None] | None = None) -> None:
        self.disk, self.directory = disk, directory
        self._active = active
        self._headers: dict[int, SegmentHeader] = {}
        self._indexes: dict[int, SegmentIndex] = {}

    def watermark(self) -> Watermark:
        mark = read_watermark(self.disk, self.directory)
        if mark is None:
            detail = "it is missing or does not check: open the topic once to have it written anew"
            raise JournalCorrupt(watermark_path(self.directory), 0, detail)
        return mark

    def _header(self, number: int) -> SegmentHeader:
        header = self._headers.get(number) or read_header(self.disk, self.directory, number)
        if header is None:
            raise JournalCorrupt(segment_path(self.directory, number), 0, "the segment header is missing")
        self._headers[number] = header
        return header

    def _segments(self, mark: Watermark) -> list[int]:
        return [n for n in list_segments(self.disk, self.directory) if n <= mark.segment]

    def segments(self) -> list[int]:
        """The segments that hold something durable."""
        return self._segments(self.watermark())

    # Units.

    def read_units(
        self, *, start_unit: int = 0, place: Place | None = None, durable_only: bool = True
    ) -> Iterator[Unit]:
        """Units in order, from a number or from a place that `locate` gave; ends at the watermark.

        With durable_only=False it also yields what is written and whole beyond the watermark. BadRequest if the start
        has been reclaimed.
        """
        mark = self.watermark()
        segments = self._segments(mark)
        if place is None:
            place = self._place_of_unit(start_unit, segments)
        if place[0] < segments[0]:
            raise BadRequest(f"segment {place[0]} was reclaimed: the journal starts at segment {segments[0]}")
        try:
            yield from self._from_place(place, mark, start_unit, durable_only)
        except FileNotFoundError as error:
            raise BadRequest(f"{error.filename} was reclaimed while it was to be read: start again") from None

    def _from_place(self, place: Place, mark: Watermark, start_unit: int, durable_only: bool) -> Iterator[Unit]:
        segment, at = place
        previous: tuple[int, int] | None = None  # number and chain that must follow
        while segment <= mark.segment:
            is_last = segment == mark.segment
            stop = mark.byte_end if is_last and durable_only else None
            walk = self._walk(segment, at, stop, previous)
            yield from (unit for unit in walk if unit.number >= start_unit)
            if (walk.broken and not (is_last and not durable_only)) or (stop is not None and walk.at < stop):
                detail = walk.broken or "durable units are missing here"
                raise JournalCorrupt(segment_path(self.directory, segment), walk.at, detail)
            previous = (walk.number, walk.chain) if walk.number else None
            segment, at = segment + 1, FIRST_UNIT_AT

    def _walk(self, segment: int, at: int, stop: int | None, previous: tuple[int, int] | None) -> _OpenWalk:
        header = self._header(segment)
        if at == FIRST_UNIT_AT:
            if previous is not None and previous != (header.first_unit, header.chain):
                path = segment_path(self.directory, segment)
                raise JournalCorrupt(path, 0, f"the segment does not follow from unit {previous[0] - 1}")
            previous = (header.first_unit, header.chain)
        return _OpenWalk(self.disk, self.directory, header, at, stop, previous)

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
            raise BadRequest(f"unit {unit} was reclaimed: the journal starts at unit {first}")
        entries = self.index(segments[low - 1]).entries()
        near = int(np.searchsorted(entries["unit"], unit, side="right")) - 1
        return segments[low - 1], int(entries["at"][near]) if near >= 0 else FIRST_UNIT_AT

    # Places.

    def locate(
        self, partition: int, *, offset: int | None = None, id: int | None = None, time: int | None = None
    ) -> Place | None:
        """The unit to start reading at, or None if there is none yet. Exactly one of the three:

        - offset: the first unit that holds a row of the partition at or after this offset;
        - time: the first unit of the partition written at or after this journal time;
        - id: the last unit of the partition whose first enqueued id is at most this one: it holds the message's record.
        """
        given = [(k, v) for k, v in (("first_offset", offset), ("first_id", id), ("time", time)) if v is not None]
        if len(given) != 1:
            raise BadRequest("locate takes exactly one of offset, id and time")
        column, target = given[0]
        start = self._floor(partition, column, target)
        if column == "first_id":
            return self._last_with_id(partition, start, target)
        return self._first_where(partition, start, column, target)

    def _floor(self, partition: int, column: str, target: int) -> Place | None:
        """The nearest indexed unit from which a forward search cannot miss; None: from the start of the journal."""
        segments = self._segments(self.watermark())
        # Journal time repeats from unit to unit, so an entry of the very time is not yet a floor.
        side: Literal["left", "right"] = "left" if column == "time" else "right"
        low, high, best = 0, len(segments), None
        while low < high:
            middle = (low + high) // 2
            at, entries = middle, self._keyed(segments[middle], partition, column)
            # A partition may be silent for many segments: then the nearest earlier one that has it decides.
            while not len(entries) and at > low:
                at -= 1
                entries = self._keyed(segments[at], partition, column)
            near = int(np.searchsorted(entries[column], target, side=side)) - 1
            if near >= 0:
                best = (segments[at], int(entries["at"][near]))
            if near >= 0 or not len(entries):
                low = middle + 1
            else:
                high = at
        return best

    def _keyed(self, segment: int, partition: int, column: str) -> Entries:
        entries = self.index(segment).of(partition)
        found: Entries = entries[entries[column] >= 0]
        return found

    def _first_where(self, partition: int, start: Place | None, column: str, target: int) -> Place | None:
        for unit in self.read_units(place=start):
            for frame in unit.frames:
                if frame.partition != partition:
                    continue
                if unit.time >= target if column == "time" else frame.first_offset + frame.row_count > target:
                    return unit.segment, unit.offset
        return None

    def _last_with_id(self, partition: int, start: Place | None, target: int) -> Place | None:
        found = None
        for unit in self.read_units(place=start):
            ids = [f.first_id for f in unit.frames if f.partition == partition and f.first_id >= 0]
            if any(i <= target for i in ids):
                found = unit.segment, unit.offset
            if any(i > target for i in ids):
                break
        return found

    # Indexes.

    def index(self, segment: int) -> SegmentIndex:
        """The sparse index of a segment: the writer's, a stored one, or one built now."""
        active = self._active() if self._active is not None else None
        if active is not None and active.segment == segment:
            return active
        mark = self.watermark()
        found = self._indexes.get(segment)
        if found is None and segment < mark.segment:
            found = self._stored(segment)
        if found is None or (segment == mark.segment and found.last_unit < mark.visible):
            found = self.build_index(segment, mark.byte_end if segment == mark.segment else None)
        self._indexes[segment] = found
        if len(self._indexes) > _INDEXES_MAX:
            self._indexes.pop(next(iter(self._indexes)))
        return found

    def _stored(self, segment: int) -> SegmentIndex | None:
        try:
            data = self.disk.read_file(index_path(self.directory, segment))
        except FileNotFoundError:
            return None
        return parse_index(data, segment, self._header(segment).incarnation)

    def build_index(self, segment: int, stop: int | None) -> SegmentIndex:
        """An index from the units themselves, up to byte `stop`."""
        index = SegmentIndex(segment)
        for unit in self._walk(segment, FIRST_UNIT_AT, stop, None):
            index.add(unit.number, unit.offset, unit.time, unit.frames)
        return index


class _OpenWalk:
    """A SegmentWalk that opens its file when iterated and closes it at the end.

    The writer may replace a segment's file by a copy when space runs out, so if units seem to be missing the file is
    opened once more before anybody is told.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        header: SegmentHeader,
        at: int,
        stop: int | None,
        previous: tuple[int, int] | None,
    ) -> None:
        self._disk, self._path, self._header, self._stop = disk, segment_path(directory, header.number), header, stop
        self.at = at
        self.number, self.chain = previous if previous is not None else (0, -1)
        self.broken: str | None = None

    def __iter__(self) -> Iterator[Unit]:
        for _ in range(2):
            file = self._disk.open(self._path)
            try:
                # fmt: off
                walk = SegmentWalk(file, self._header.incarnation, self._header.number,
                                   number=self.number, chain=self.chain, at=self.at, stop=self._stop)
                # fmt: on
                for unit in walk:
                    self.at, self.number, self.chain = walk.at, walk.number, walk.chain
                    yield unit
                self.broken = walk.broken
            finally:
                file.close()
            if self._stop is None or self.at >= self._stop:
                return
