"""Finding places in the log by time, wall time, offset and id, reading little of it.

Theory of operation. Three steps, each of which looks at a few kilobytes:

1. *Which segment.* Journal time never goes back, so the times of the segments' first units are searched by halves.
   Wall time may jump; there the segments are passed one by one, each by the highest wall time in its index's header,
   which is remembered. Offsets and ids are searched by halves over the indexes.
2. *Which unit.* The index's entries of that segment, then units from the entry on: a unit that has no entry lies within
   64 KiB of one.
3. *Which frame of the partition.* `frames_of` goes through a partition's frames only: whatever the index tells to hold
   none of them is passed over, be it most of a segment or hundreds of segments, for a partition may be silent for long.

*A moment of wall time* is where the wall clock first showed it, or more: one cut through all partitions. So nothing
that was written at or after the moment lies before it, however the clock jumped; if it was set back afterwards, some of
what follows the cut carries earlier times. A clock that was far ahead by mistake, and was set right, makes moments up
to the mistaken one lie there: seek by journal time or offset then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from heapline.journal import index as indexes
from heapline.journal.segment import FIRST_UNIT_AT
from heapline.journal.unit import Frame, Unit

if TYPE_CHECKING:
    from heapline.journal.reader import LogReader

Place = tuple[int, int]  # segment, byte offset of a unit
END: Place = (1 << 62, 0)
CHUNK_BYTES = 256 << 10  # read at a time: what is looked for lies within the first 64 KiB, unless units are large


class Found(NamedTuple):
    """A frame of a partition, and the unit that it lies in."""

    unit: Unit
    frame: Frame

    @property
    def place(self) -> Place:
        return self.unit.segment, self.unit.offset

    @property
    def end(self) -> int:
        return self.frame.first_offset + self.frame.row_count


# A partition's frames.


def frames_of(reader: LogReader, partition: int, start: Place) -> Iterator[Found]:
    """The durable frames of a partition from a unit on, passing over what holds none."""
    for segment in reader.segments():
        if segment < start[0]:
            continue
        starts = reader.index(segment).of(partition)["at"]
        at: int | None = start[1] if segment == start[0] else FIRST_UNIT_AT
        while at is not None and len(starts):
            at = yield from _frames_up_to_a_gap(reader, partition, segment, at, starts)


def _frames_up_to_a_gap(
    reader: LogReader, partition: int, segment: int, at: int, starts: indexes.Entries
) -> Generator[Found, None, int | None]:
    """Returns the byte after the gap, or None if the segment holds no more of them."""
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
    """Whether a unit here would have an entry of its own."""
    return at - entry >= indexes.ENTRY_EVERY_BYTES


def last_before(reader: LogReader, partition: int, limit: Place) -> Found | None:
    """The partition's last frame before a place."""
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


# Places by time.


def first_unit(reader: LogReader, column: Literal["time", "wall"], target: int) -> Unit | None:
    """The first unit written at or after a journal time, or where the wall clock first showed a moment or more."""
    segments = reader.segments()
    by_wall = column == "wall"
    start = _segment_of_wall(reader, segments, target) if by_wall else _segment_of_time(reader, segments, target)
    for segment in segments[start:]:
        entries = reader.index(segment, with_walls=by_wall).entries()
        before = entries["wall_before" if by_wall else "time"]
        near = int(np.searchsorted(before, target, side="left")) - 1
        at = int(entries["at"][near]) if near >= 0 else FIRST_UNIT_AT
        for unit in reader.units_of_segment(segment, at, CHUNK_BYTES):
            if (unit.wall if by_wall else unit.time) >= target:
                return unit
    return None


def _segment_of_time(reader: LogReader, segments: list[int], time: int) -> int:
    """Of the segments, the last one that begins before this journal time, or the first one of all."""
    low, high = 0, len(segments)
    while low < high:
        middle = (low + high) // 2
        begins = reader.first_time(segments[middle])
        if begins is not None and begins < time:
            low = middle + 1
        else:
            high = middle
    return max(0, low - 1)


def _segment_of_wall(reader: LogReader, segments: list[int], wall: int) -> int:
    """Of the segments, the first one in which the wall clock showed this moment or more."""
    mark = reader.watermark()
    return next((at for at, segment in enumerate(segments) if reader.wall_max(segment, mark) >= wall), len(segments))


# Places by what a partition holds.


def floor(reader: LogReader, partition: int, column: Literal["first_offset", "first_id"], target: int) -> Place | None:
    """The last unit with an entry at or below the target; None: there is none."""
    segments = reader.segments()
    low, high, best = 0, len(segments), None
    while low < high:
        middle = (low + high) // 2
        at, entries = middle, _keyed(reader, segments[middle], partition, column)
        # A partition may be silent for many segments: then the nearest earlier one that has it decides.
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


def _keyed(reader: LogReader, segment: int, partition: int, column: str) -> indexes.Entries:
    entries = reader.index(segment).of(partition)
    found: indexes.Entries = entries[entries[column] >= 0]
    return found


def first_where(
    reader: LogReader, partition: int, start: Place | None, is_wanted: Callable[[Found], bool]
) -> Found | None:
    start = (reader.segments()[0], FIRST_UNIT_AT) if start is None else start
    return next((found for found in frames_of(reader, partition, start) if is_wanted(found)), None)


def last_with_id(reader: LogReader, partition: int, start: Place | None, target: int) -> Found | None:
    """The last frame whose first id is at most the target; ids rise within a partition."""
    last = None
    start = (reader.segments()[0], FIRST_UNIT_AT) if start is None else start
    for found in frames_of(reader, partition, start):
        if found.frame.first_id > target:
            break
        if found.frame.first_id >= 0:
            last = found
    return last
