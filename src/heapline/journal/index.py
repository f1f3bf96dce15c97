"""The sparse index of a segment: from (partition, offset | id | time | wall time) to a unit near it.

INDEX_VERSION 2 (ritual: bump; an index of another version is simply rebuilt). The index is a view of the segment and
can always be made again from it, so it is never synced for its own sake and a damaged one is no damage.

    header: magic, version, segment, incarnation, entry count, highest wall time | crc32c of the header
    | ENTRY rows in unit order | crc32c of all before

About one entry per 64 KiB of journal and partition, and always one for a partition's first frame in the segment: a
frame that has none lies within 64 KiB of one of its partition's. Wall time may jump back, so what is kept of it is the
highest so far, which does not; the header's, with a checksum of its own, tells without the entries whether a moment
can lie in the segment.

Version 1 lacked wall times. It is still read, because of large old journals, for all but seeking by wall time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from heapline.journal.unit import Frame

INDEX_MAGIC = b"HEAPIDX\0"
INDEX_VERSION = 2
ENTRY_EVERY_BYTES = 64 << 10
ENTRY = np.dtype(
    [
        ("partition", "<i8"),
        ("first_offset", "<i8"),
        ("first_id", "<i8"),  # first message id enqueued in the frame, or -1
        ("unit", "<i8"),
        ("at", "<i8"),  # byte offset of the unit in the segment
        ("time", "<i8"),
        ("wall_before", "<i8"),  # the highest wall time of the segment's units before this one
    ]
)
_ENTRY_1 = np.dtype(ENTRY.descr[:-1])
NO_WALL = -(1 << 63)
_HEADER = struct.Struct("<8sB7xQQQqI4x")
_HEADER_1 = struct.Struct("<8sB7xQQQ")
_HEADER_CRC_AT = _HEADER.size - 8
HEADER_BYTES = _HEADER.size
_NEVER = -ENTRY_EVERY_BYTES

Entries = npt.NDArray[Any]


class SegmentIndex:
    """The entries of one segment, gathered as units are written or scanned."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.last_unit = 0
        self.wall_max: int | None = NO_WALL  # None: not known, it is of version 1
        self._rows: list[tuple[int, ...]] = []
        self._last_at: dict[int, int] = {}
        self._last_id_at: dict[int, int] = {}  # of the last entry with an id: frames without one must not hide it
        self._array: Entries | None = None
        self._is_stored = False

    def add(self, unit: int, at: int, time: int, wall: int, frames: Sequence[Frame]) -> None:
        assert self.wall_max is not None
        self.last_unit = unit
        for frame in frames:
            far = at - self._last_at.get(frame.partition, _NEVER) >= ENTRY_EVERY_BYTES
            has_id = frame.first_id >= 0
            if far or (has_id and at - self._last_id_at.get(frame.partition, _NEVER) >= ENTRY_EVERY_BYTES):
                self._last_at[frame.partition] = at
                if has_id:
                    self._last_id_at[frame.partition] = at
                self._rows.append((frame.partition, frame.first_offset, frame.first_id, unit, at, time, self.wall_max))
        self.wall_max = max(self.wall_max, wall)

    def entries(self) -> Entries:
        """The entries so far. Safe to call from another thread than `add`'s."""
        array = self._array
        known = 0 if array is None else len(array)
        if array is None or not (self._is_stored or known == len(self._rows)):
            fresh = np.array(self._rows[known:], ENTRY)
            array = self._array = fresh if array is None else np.concatenate((array, fresh))
        return array

    def of(self, partition: int) -> Entries:
        entries = self.entries()
        found: Entries = entries[entries["partition"] == partition]
        return found

    def pack(self, incarnation: int) -> bytes:
        entries = self.entries()
        count, wall_max = len(entries), NO_WALL if self.wall_max is None else self.wall_max
        header = bytearray(_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, self.segment, incarnation, count, wall_max, 0))
        header[_HEADER_CRC_AT : _HEADER_CRC_AT + 4] = crc32c(bytes(header[:_HEADER_CRC_AT])).to_bytes(4, "little")
        body = bytes(header) + entries.tobytes()
        return body + crc32c(body).to_bytes(4, "little")


def parse_index(data: bytes, segment: int, incarnation: int) -> SegmentIndex | None:
    """The index, or None if these bytes are not the index of this segment: then it is to be rebuilt."""
    body = memoryview(data)[:-4]
    if len(body) < _HEADER_1.size or crc32c(body).to_bytes(4, "little") != data[-4:]:
        return None
    magic, version, number, of, count = _HEADER_1.unpack_from(body)
    if (magic, number, of) != (INDEX_MAGIC, segment, incarnation) or version not in (1, INDEX_VERSION):
        return None
    index = SegmentIndex(segment)
    if version == 1:
        index.wall_max = None
        index._array = _with_no_walls(np.frombuffer(body, _ENTRY_1, count, _HEADER_1.size))
    else:
        index.wall_max = parse_wall_max(data, segment, incarnation)
        index._array = np.frombuffer(body, ENTRY, count, _HEADER.size)
    index._is_stored = True
    return index


def _with_no_walls(old: Entries) -> Entries:
    entries = np.full(len(old), NO_WALL, ENTRY)
    for name in _ENTRY_1.names or ():
        entries[name] = old[name]
    return entries


def parse_wall_max(data: bytes, segment: int, incarnation: int) -> int | None:
    """The highest wall time of the segment, from an index's first bytes; None if they do not tell."""
    if len(data) < _HEADER.size:
        return None
    magic, version, number, of, _, wall_max, crc = _HEADER.unpack_from(data)
    if (magic, version, number, of) != (INDEX_MAGIC, INDEX_VERSION, segment, incarnation):
        return None
    return int(wall_max) if crc == crc32c(data[:_HEADER_CRC_AT]) else None
