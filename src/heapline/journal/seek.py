"""Find positions in the log by time, wall time, offset and id while reading little of it.

Theory of operation. There are three steps, each of which reads a few kilobytes:

1. *The segment.* Journal time never goes back, so the segments' first units are searched by bisection over time. Wall
   time may jump, so the segments are checked one by one, by the highest wall time in the header of each index, which is
   cached. Offsets and ids are searched by bisection over the indexes.
2. *The unit.* The index entries of that segment, then the units from that entry on: a unit without an entry is within
   64 KiB of one.
3. *The frame of the partition.* `frames_of` visits only frames of one partition. It skips whatever the index shows to
   hold none, be it most of a segment or hundreds of segments, because a partition may be silent for long.

*A wall time* is the position where the wall clock first showed that time or more: one cut through all partitions. So
nothing written at or after that time is before the cut, however the clock jumped. If the clock was set back later, some
rows after the cut carry earlier times. If the clock was far ahead by mistake and then corrected, all times up to the
mistaken one are at that position; seek by journal time or offset in that case.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Literal, NamedTuple, Protocol

import numpy as np

from heapline.journal import index as indexes
from heapline.journal.log_bounds import Watermark
from heapline.journal.segment import FIRST_UNIT_AT
from heapline.journal.unit import Frame, Unit

Place = tuple[int, int]  # segment, byte offset of a unit
END: Place = (1 << 62, 0)
CHUNK_BYTES = 256 << 10  # read at a time; the target is within the first 64 KiB unless units are large


class Segments(Protocol):
    """The segments of one journal directory and their indexes, as `LogReader` reads them."""

    def watermark(self) -> Watermark: ...
    def segments(self) -> list[int]: ...
    def units_of_segment(self, segment: int, at: int, chunk: int) -> Iterator[Unit]: ...
    def index(self, segment: int) -> indexes.SegmentIndex: ...
    def first_time(self, segment: int) -> int | None: ...
    def wall_max(self, segment: int, mark: Watermark) -> int: ...


class Found(NamedTuple):
    """A frame of a partition and its unit."""

    unit: Unit
    frame: Frame

    @property
    def place(self) -> Place:
        return self.unit.segment, self.unit.offset

    @property
    def end(self) -> int:
        return self.frame.first_offset + self.frame.row_count


# A partition's frames.


def frames_of(reader: Segments, partition: int, start: Place) -> Iterator[Found]:
    """Yield the durable frames of a partition from a unit on, skipping parts that hold none."""
    for segment in reader.segments():
        if segment < start[0]:
            continue
        starts = reader.index(segment).of(partition)["at"]
        at: int | None = start[1] if segment == start[0] else FIRST_UNIT_AT
        while at is not None and len(starts):
            at = yield from _frames_up_to_a_gap(reader, partition, segment, at, starts)


def _frames_up_to_a_gap(
    reader: Segments, partition: int, segment: int, at: int, starts: indexes.Entries
) -> Generator[Found, None, int | None]:
    """Yield frames up to a gap. Return the byte after the gap, or None if the segment has no more of them."""
    next_entry = int(np.searchsorted(starts, at, side="right"))
    if not next_entry or _is_past(at, int(starts[next_entry - 1])):
        if next_entry == len(starts):
            return None
        at = int(starts[next_entry])
    for unit in reader.units_of_segment(segment, at, CHUNK_BYTES):
        for frame in unit.frames:
            if frame.partition == partition:
                yield Found(unit, frame)
        next_entry = int(np.searchsorted(starts, unit.end, side="right"))
        near, ahead = int(starts[next_entry - 1]), int(starts[next_entry]) if next_entry < len(starts) else None
        if _is_past(unit.end, near) and (ahead is None or ahead >= unit.end + CHUNK_BYTES):
            return ahead
    return None


def _is_past(at: int, entry: int) -> bool:
    """Return whether a unit here would have an entry of its own."""
    return at - entry >= indexes.ENTRY_EVERY_BYTES


def last_before(reader: Segments, partition: int, limit: Place) -> Found | None:
    """Return the partition's last frame before a position."""
    for segment in reversed(reader.segments()):
        starts = reader.index(segment).of(partition)["at"].tolist() if segment <= limit[0] else []
        below = [at for at in starts if (segment, at) < limit]
        if not below:
            continue
        last = None
        for found in frames_of(reader, partition, (segment, below[-1])):
            if found.place >= limit:
                break
            last = found
        if last is not None:
            return last
    return None


# Positions by time.


def first_unit(reader: Segments, column: Literal["time", "wall"], target: int) -> Unit | None:
    """The first unit written at or after a journal time, or where the wall clock first showed a moment or more."""
    segments = reader.segments()
    by_wall = column == "wall"
    start = _segment_of_wall(reader, segments, target) if by_wall else _segment_of_time(reader, segments, target)
    for segment in segments[start:]:
        entries = reader.index(segment).entries()
        before = entries["wall_before" if by_wall else "time"]
        near = int(np.searchsorted(before, target, side="left")) - 1
        at = int(entries["at"][near]) if near >= 0 else FIRST_UNIT_AT
        for unit in reader.units_of_segment(segment, at, CHUNK_BYTES):
            if (unit.wall if by_wall else unit.time) >= target:
                return unit
    return None


def _segment_of_time(reader: Segments, segments: list[int], time: int) -> int:
    """Return the last of the segments that begins before this journal time, or the first one."""
    low, high = 0, len(segments)
    while low < high:
        middle = (low + high) // 2
        begins = reader.first_time(segments[middle])
        if begins is not None and begins < time:
            low = middle + 1
        else:
            high = middle
    return max(0, low - 1)


def _segment_of_wall(reader: Segments, segments: list[int], wall: int) -> int:
    """Return the first of the segments in which the wall clock showed this time or more."""
    mark = reader.watermark()
    return next((at for at, segment in enumerate(segments) if reader.wall_max(segment, mark) >= wall), len(segments))


# Positions by a partition's content.


def floor(reader: Segments, partition: int, column: Literal["first_offset", "first_id"], target: int) -> Place | None:
    """Return the last unit with an entry at or below the target, or None."""
    segments = reader.segments()
    low, high, best = 0, len(segments), None
    while low < high:
        middle = (low + high) // 2
        at, entries = middle, _keyed(reader, segments[middle], partition, column)
        # A partition may be silent for many segments; then the nearest earlier one that has it decides.
        while not len(entries) and at > low:
            at -= 1
            entries = _keyed(reader, segments[at], partition, column)
        near = int(np.searchsorted(entries[column], target, side="right")) - 1
        if near >= 0:
            best = (segments[at], int(entries["at"][near]))
        if near >= 0 or not len(entries):
            low = middle + 1
        else:
            high = at
    return best


def _keyed(reader: Segments, segment: int, partition: int, column: str) -> indexes.Entries:
    entries = reader.index(segment).of(partition)
    found: indexes.Entries = entries[entries[column] >= 0]
    return found


def first_where(
    reader: Segments, partition: int, start: Place | None, is_wanted: Callable[[Found], bool]
) -> Found | None:
    start = (reader.segments()[0], FIRST_UNIT_AT) if start is None else start
    return next((found for found in frames_of(reader, partition, start) if is_wanted(found)), None)


def last_with_id(reader: Segments, partition: int, start: Place | None, target: int) -> Found | None:
    """Return the last frame whose first id is at most the target. Ids rise within a partition."""
    last = None
    start = (reader.segments()[0], FIRST_UNIT_AT) if start is None else start
    for found in frames_of(reader, partition, start):
        if found.frame.first_id > target:
            break
        if found.frame.first_id >= 0:
            last = found
    return last
