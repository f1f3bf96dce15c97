"""The segments of a journal as files: how large they are, when each was closed, and where each partition starts.

A `Survey` is what retention decides by. Blocking: use `Surveyor` in I/O threads. The results for a complete segment are
cached, because it no longer changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import and_
from typing import NamedTuple

import numpy as np

from heapline.journal.disk import Disk
from heapline.journal.reader import LogReader
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import SegmentHeader, segment_path

_GROWING_SEGMENTS = 4  # at the journal's end: segments whose files may still change


class Segment(NamedTuple):
    """A segment file."""

    number: int
    nbytes: int
    closed_at: int | None  # wall ms at which the next one was started; None: it is the last
    last_unit: int  # 0 if it is the last
    firsts: dict[int, int]  # partition -> offset of its first row here


class Survey:
    """The segments of a journal, oldest first, and the partitions' ends at the time of the survey."""

    def __init__(self, segments: Sequence[Segment], ends: Sequence[int]) -> None:
        self.segments, self._ends = segments, ends

    def bytes_from(self, index: int) -> int:
        return sum(segment.nbytes for segment in self.segments[index:])

    def start(self, partition: int, index: int = 0) -> int:
        """Return the partition's first row in this segment or a later one, or its end if it has none there."""
        for segment in self.segments[index:]:
            if partition in segment.firsts:
                return segment.firsts[partition]
        return self._ends[partition]

    def start_from(self, partition: int, number: int) -> int:
        """Like `start`, by the segment's number; a segment that is newer than the survey counts as its end."""
        return self.start(partition, sum(segment.number < number for segment in self.segments))

    def below(self, unit: int) -> list[Segment]:
        """Return the segments from the journal's start that are closed and hold no unit above `unit`."""
        whole = (segment.closed_at is not None and segment.last_unit <= unit for segment in self.segments)
        return [segment for segment, is_whole in zip(self.segments, accumulate(whole, and_), strict=True) if is_whole]

    def ends(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield (partition, end of its rows in this segment) for each partition with rows there."""
        return ((partition, self.start(partition, index + 1)) for partition in self.segments[index].firsts)

    def is_read_below(self, starts: Sequence[int], lease: int) -> bool:
        """Return whether a reader that holds the journal from segment `lease` on has rows below these starts to read.
        `starts` are offsets by partition; 0 means no restriction."""
        return any(start and start > self.start_from(p, lease) for p, start in enumerate(starts))


class Surveyor:
    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._directory = disk, directory
        self._known: dict[int, Segment] = {}
        self._sizes: dict[str, int] = {}  # by file name, as of the last `usage`

    def usage(self) -> tuple[int, int]:
        """Return bytes and number of segments."""
        disk, known, sizes = self._disk, self._sizes, dict[str, int]()
        names = sorted(name for name in disk.listdir(self._directory) if name.endswith(".seg"))
        for name in names:
            if name not in known or name in names[-_GROWING_SEGMENTS:]:
                with contextlib.suppress(FileNotFoundError):  # reclaimed just now
                    sizes[name] = _size(disk, f"{self._directory}/{name}")
            else:
                sizes[name] = known[name]
        self._sizes = sizes
        return sum(sizes.values()), len(sizes)

    def look(self, reader: LogReader, offsets: Sequence[int], older_unit: int | None = None) -> Survey:
        """Return all segments, or none, without further reads, if the first has units above `older_unit`: then nothing
        can be deleted. `offsets` are the partitions' ends; all rows below them are written."""
        disk, directory = self._disk, self._directory
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


def _look_at(disk: Disk, directory: str, reader: LogReader, number: int, follower: SegmentHeader | None) -> Segment:
    nbytes = _size(disk, segment_path(directory, number))
    if follower is not None:
        return Segment(number, nbytes, follower.created_at, follower.first_unit - 1, _firsts(reader, number))
    is_begun = read_header(disk, directory, number) is not None  # otherwise it is only preallocated
    return Segment(number, nbytes, None, 0, _firsts(reader, number) if is_begun else {})


def _firsts(reader: LogReader, number: int) -> dict[int, int]:
    entries = reader.index(number).entries()
    partitions, at = np.unique(entries["partition"], return_index=True)  # each has an entry for its first row here
    return dict(zip(partitions.tolist(), entries["first_offset"][at].tolist(), strict=True))


def _size(disk: Disk, path: str) -> int:
    file = disk.open(path)
    try:
        return file.size()
    finally:
        file.close()
