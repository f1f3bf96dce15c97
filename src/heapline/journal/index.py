"""The sparse index of a segment: from (partition, offset | id | time) to a unit near it.

INDEX_VERSION 1 (ritual: bump; an index of another version is simply rebuilt). The index is a view of the segment and
can always be made again from it, so it is never synced for its own sake and a damaged one is no damage.

    header: magic, version, segment, incarnation, entry count | ENTRY rows in unit order | crc32c of all before

About one entry per 64 KiB of journal and partition, and always one for a partition's first frame in the segment.
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
    ]
)
_HEADER = struct.Struct("<8sB7xQQQ")
_NEVER = -ENTRY_EVERY_BYTES

Entries = npt.NDArray[Any]


class SegmentIndex:
    """The entries of one segment, gathered as units are written or scanned."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.last_unit = 0
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._last_at: dict[int, int] = {}
        self._last_id_at: dict[int, int] = {}  # of the last entry with an id: frames without one must not hide it
        self._array: Entries | None = None

    def add(self, unit: int, at: int, time: int, frames: Sequence[Frame]) -> None:
        self.last_unit = unit
        for frame in frames:
            far = at - self._last_at.get(frame.partition, _NEVER) >= ENTRY_EVERY_BYTES
            has_id = frame.first_id >= 0
            if far or (has_id and at - self._last_id_at.get(frame.partition, _NEVER) >= ENTRY_EVERY_BYTES):
                self._last_at[frame.partition] = at
                if has_id:
                    self._last_id_at[frame.partition] = at
                self._rows.append((frame.partition, frame.first_offset, frame.first_id, unit, at, time))

    def entries(self) -> Entries:
        """The entries so far. Safe to call from another thread than `add`'s."""
        if self._array is None or len(self._array) != len(self._rows):
            self._array = np.array(list(self._rows), ENTRY)
        return self._array

    def of(self, partition: int) -> Entries:
        entries = self.entries()
        found: Entries = entries[entries["partition"] == partition]
        return found

    def pack(self, incarnation: int) -> bytes:
        entries = self.entries()
        body = _HEADER.pack(INDEX_MAGIC, INDEX_VERSION, self.segment, incarnation, len(entries)) + entries.tobytes()
        return body + crc32c(body).to_bytes(4, "little")


def parse_index(data: bytes, segment: int, incarnation: int) -> SegmentIndex | None:
    """The index, or None if these bytes are not the index of this segment: then it is to be rebuilt."""
    body = data[:-4]
    if len(body) < _HEADER.size or crc32c(body).to_bytes(4, "little") != data[-4:]:
        return None
    magic, version, number, of, count = _HEADER.unpack_from(body)
    if (magic, version, number, of) != (INDEX_MAGIC, INDEX_VERSION, segment, incarnation):
        return None
    index = SegmentIndex(segment)
    index._array = np.frombuffer(body, ENTRY, count, _HEADER.size)
    index._rows = index._array.tolist()
    return index
