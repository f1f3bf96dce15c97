"""Survey a journal's files for retention. Blocking: use it in I/O threads.

The results for a complete segment are cached, because it does not change any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heapline.engine.retention import Segment, Survey
from heapline.journal.disk import Disk
from heapline.journal.reader import LogReader
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import SegmentHeader, segment_path

_GROWING_SEGMENTS = 4  # at the journal's end: segments whose files may still change


class Surveyor:
    def __init__(self) -> None:
        self._known: dict[int, Segment] = {}

    def look(
        self, disk: Disk, directory: str, reader: LogReader, offsets: Sequence[int], older_unit: int | None = None
    ) -> Survey:
        """Return all segments, or none, without further reads, if the first has units above `older_unit`: then nothing
        can be deleted. `offsets` are the partitions' ends; all rows below them are written."""
        numbers = list_segments(disk, directory)
        self._known = {number: segment for number, segment in self._known.items() if number >= numbers[0]}
        segments: list[Segment] = []
        for at, number in enumerate(numbers):
            segment = self._known.get(number)
            if segment is None:
                follower = read_header(disk, directory, number + 1) if number < numbers[-1] else None
                if at == 0 and older_unit is not None and _is_above(follower, older_unit):
                    return Survey([], offsets)
                segment = _look_at(disk, directory, reader, number, follower)
                if at < len(numbers) - _GROWING_SEGMENTS:
                    self._known[number] = segment
            segments.append(segment)
        return Survey(segments, offsets)


def _is_above(follower: SegmentHeader | None, older_unit: int) -> bool:
    return follower is None or follower.first_unit - 1 > older_unit


def _look_at(
    disk: Disk, directory: str, reader: LogReader, number: int, follower: SegmentHeader | None
) -> Segment:  # fmt: skip
    file = disk.open(segment_path(directory, number))
    try:
        nbytes = file.size()
    finally:
        file.close()
    if follower is not None:
        return Segment(number, nbytes, follower.created_at, follower.first_unit - 1, _firsts(reader, number))
    is_begun = read_header(disk, directory, number) is not None  # otherwise it is only preallocated
    return Segment(number, nbytes, None, 0, _firsts(reader, number) if is_begun else {})


def _firsts(reader: LogReader, number: int) -> dict[int, int]:
    entries = reader.index(number).entries()
    partitions, at = np.unique(entries["partition"], return_index=True)  # each has an entry for its first row here
    return dict(zip(partitions.tolist(), entries["first_offset"][at].tolist(), strict=True))
