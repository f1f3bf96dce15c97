"""A message's record: the fixed row in front of it, and its position in 63 bits.

*Row* (ROW): a numpy dtype of 80 bytes, little endian. Version 1. To change it after a release, add a dtype beside this
one, chosen by the version in the unit; never edit this one. The row's own checksum and the payload's make a record
readable on its own, without its unit.

*Position*: the record's location, packed with the facts that a pop needs without reading the record.

    segment (the rest) | place in the segment, in 16-byte steps | size class (5) | attempts (8)

The split between segment and place follows the topic's segment size, so that a topic of 64 MiB segments can write 2²⁸
of them (16 PiB over its lifetime) before the numbers end. Attempts count deliveries so far. The size class bounds a
message's bytes from above by half powers of two (128·2^(c/2)), so that a pop can bound its response in bytes before it
reads anything. Positions are plain int64 columns; every function here works on both arrays and ints.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, TypeVar

import numpy as np

from heapline.core.events import I64

ROW = np.dtype(
    [
        ("crc", "<u4"),  # crc32c of the row from byte 4 on, then of the small part
        ("payload_crc", "<u4"),
        ("payload_at", "<u4"),  # distance in bytes from the row's start to its payload
        ("payload_len", "<u4"),
        ("small_at", "<u4"),  # distance to the small part: key, fairness key, then headers as msgpack
        ("small_len", "<u4"),
        ("key_len", "<u2"),
        ("flags", "<u2"),
        ("max_retries", "<u2"),
        ("fairness_len", "<u2"),  # bytes of the fairness key
        ("id", "<i8"),
        ("priority", "<i8"),
        ("enqueued_at", "<i8"),  # ms
        ("due", "<i8"),  # ms; 0 = immediately
        ("ttl_ms", "<i8"),  # 0 = none
        ("turn", "<i8"),  # among the messages of its priority; 0 on topics where keys do not take turns
    ]
)
assert ROW.itemsize == 80

FLAG_KEY = 1
FLAG_HEADERS = 2
FLAG_WALL = 4  # due is wall time
FLAG_FAIRNESS = 8
DEFAULT_RETRIES = 0xFFFF  # the topic's max_retries_default


IntOrArray = TypeVar("IntOrArray", int, I64)

ATTEMPTS_BITS = 8
SIZE_BITS = 5
ATTEMPTS_MAX = (1 << ATTEMPTS_BITS) - 1
LOW_BITS = ATTEMPTS_BITS + SIZE_BITS
ALIGN = 16
_ATTEMPTS_MASK = ATTEMPTS_MAX
_SIZE_MASK = (1 << SIZE_BITS) - 1

#: Upper bound in bytes of each size class.
SIZE_BOUNDS: I64 = np.floor(128 * 2 ** (np.arange(1 << SIZE_BITS) / 2)).astype(np.int64)
_BOUND_LIST: list[int] = SIZE_BOUNDS.tolist()


def size_class(sizes: Any) -> I64:
    """Return the class of each size; a size over the last bound gets the last class."""
    found = np.searchsorted(SIZE_BOUNDS, sizes, side="left")
    classes: I64 = np.minimum(found, _SIZE_MASK).astype(np.int64)
    return classes


def size_class_of(size: int) -> int:
    """Return the class of one size; costs less than `size_class` of a column of one."""
    return min(bisect_left(_BOUND_LIST, size), _SIZE_MASK)


def size_bound(positions: I64) -> I64:
    bounds: I64 = SIZE_BOUNDS[(positions >> ATTEMPTS_BITS) & _SIZE_MASK]
    return bounds


def attempts_of(position: IntOrArray) -> IntOrArray:
    return position & _ATTEMPTS_MASK


def with_attempts(position: IntOrArray, attempts: Any) -> IntOrArray:
    counted: IntOrArray = (position & ~_ATTEMPTS_MASK) | attempts
    return counted


def after_delivery(positions: I64) -> I64:
    """Return the positions with one more attempt, up to the largest number that fits."""
    counted: I64 = positions + ((positions & _ATTEMPTS_MASK) < _ATTEMPTS_MASK)
    return counted


def attempts_column(positions: I64) -> bytes:
    """Return the attempts of each position, a byte per row."""
    return positions.astype(np.uint8).tobytes()  # the attempts are the lowest byte


class PositionLayout:
    """The bit layout of one topic's positions; fixed by its segment size when the topic is created."""

    def __init__(self, segment_bytes: int) -> None:
        self.place_bits = max(1, (segment_bytes // ALIGN - 1).bit_length())
        self.segment_shift = LOW_BITS + self.place_bits
        self._place_mask = (1 << self.place_bits) - 1

    def pack(self, segment: int, byte_offsets: Any, size_classes: Any, attempts: Any = 0) -> Any:
        places = byte_offsets // ALIGN
        return (segment << self.segment_shift) | (places << LOW_BITS) | (size_classes << ATTEMPTS_BITS) | attempts

    def segment(self, position: IntOrArray) -> IntOrArray:
        return position >> self.segment_shift

    def place(self, position: IntOrArray) -> IntOrArray:
        """Return the byte offset in the segment, a multiple of 16."""
        return (position >> LOW_BITS) & self._place_mask

    def byte_offset(self, position: IntOrArray) -> IntOrArray:
        return self.place(position) * ALIGN

    def spot(self, position: IntOrArray) -> IntOrArray:
        """Return segment and place without attempts and size: they identify a record."""
        return position >> LOW_BITS
