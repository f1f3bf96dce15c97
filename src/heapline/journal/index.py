"""The sparse index of a segment: from (partition, offset | id | time | wall time) to a unit near it.

INDEX_VERSION 1. To change the layout, bump it: an index of another version is rebuilt. The index can always be rebuilt
from its segment, so it is never synced for its own sake, and a corrupt one is replaced.

    header: magic, version, segment, incarnation, entry count, highest wall time | crc32c of the header
    | ENTRY rows in unit order | crc32c of all before

There is about one entry per 64 KiB of journal and partition, and always one for a partition's first frame in the
segment, so a frame without an entry is within 64 KiB of one of its partition. Wall time may jump back, so an entry
holds the highest wall time so far, which does not. The header's, with its own checksum, shows without the entries
whether the segment can contain a given time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.checksum import crc32c
from heapline.journal.unit import Frame

INDEX_MAGIC = b"HEAPIDX\0"
INDEX_VERSION = 1
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
NO_WALL = -(1 << 63)
_HEADER = struct.Struct("<8sB7xQQQqI4x")
_HEADER_CRC_AT = _HEADER.size - 8
HEADER_BYTES = _HEADER.size
_NEVER = -ENTRY_EVERY_BYTES

Entries = npt.NDArray[Any]


class SegmentIndex:
    """The entries of one segment, gathered as units are written or scanned."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.last_unit = 0
        self.wall_max = NO_WALL
        self._rows: list[tuple[int, ...]] = []
        self._last_at: dict[int, int] = {}
        self._last_id_at: dict[int, int] = {}  # at the last entry with an id; frames without one must not hide it
        self._array: Entries | None = None
        self._is_stored = False

    def add(self, unit: int, at: int, time: int, wall: int, frames: Sequence[Frame]) -> None:
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
        """Return the entries so far. Safe to call from another thread than `add`."""
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
        fields = (self.segment, incarnation, len(entries), self.wall_max, 0)
        header = bytearray(_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, *fields))
        header[_HEADER_CRC_AT : _HEADER_CRC_AT + 4] = crc32c(bytes(header[:_HEADER_CRC_AT])).to_bytes(4, "little")
        body = bytes(header) + entries.tobytes()
        return body + crc32c(body).to_bytes(4, "little")


def parse_index(data: bytes, segment: int, incarnation: int) -> SegmentIndex | None:
    """Return the index, or None if these bytes are not a valid index of this segment; then it has to be rebuilt."""
    wall_max = parse_wall_max(data, segment, incarnation)
    body = memoryview(data)[:-4]
    if wall_max is None or crc32c(body).to_bytes(4, "little") != data[-4:]:
        return None
    index = SegmentIndex(segment)
    index.wall_max = wall_max
    index._array = np.frombuffer(body, ENTRY, _HEADER.unpack_from(data)[4], _HEADER.size)
    index._is_stored = True
    return index


def parse_wall_max(data: bytes, segment: int, incarnation: int) -> int | None:
    """Return the highest wall time of the segment from an index's first bytes, or None if they are not valid."""
    if len(data) < _HEADER.size:
        return None
    magic, version, number, of, _, wall_max, crc = _HEADER.unpack_from(data)
    if (magic, version, number, of) != (INDEX_MAGIC, INDEX_VERSION, segment, incarnation):
        return None
    return int(wall_max) if crc == crc32c(data[:_HEADER_CRC_AT]) else None
