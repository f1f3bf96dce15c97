"""Live records of the journal: one bit per 16-byte place, in one bitmap per segment.

A record is live from the event that wrote it until its message is removed (or moved). The map tells whether an entry
found elsewhere is still valid, what a segment holds that must be kept, and when it can be deleted. It keeps a count and
an upper bound on the bytes of live records per segment, so that reclaiming can choose without scanning. Maps grow with
the highest place used: at most 512 KiB for a segment of 64 MiB.

Callers add a record once and remove it once; with `check=True` (for tests) anything else raises. Only the segment, the
place and the size class of a position matter here; attempts may differ between calls.

`SegmentPins`: segments that hold records of stream rows further on in the journal. The record of a message enqueued
without a delay is next to its row, so keeping the rows from an offset on also keeps the record. A message that fired
was recorded much earlier, perhaps in a segment with no other live record. A worker may pop and ack it before a slow
group reaches its row. Such a segment is kept until no group needs the last of its rows. So the position in a fired row
stays readable until every group has passed it, even if the record was moved. The same applies to rows made visible by a
commit, because their records were prepared earlier. The groups, their progress and what retention keeps are passed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest
from heapline.core.events import I64, Mask
from heapline.core.record import ALIGN, ATTEMPTS_BITS, LOW_BITS, SIZE_BITS, SIZE_BOUNDS, PositionLayout

U8 = npt.NDArray[np.uint8]

_BYTES_AT_FIRST = 1024
_BIT: U8 = np.array([1 << i for i in range(8)], dtype=np.uint8)
_HOLE: U8 = ~_BIT
_SIZE_MASK = (1 << SIZE_BITS) - 1
_BOUND: list[int] = SIZE_BOUNDS.tolist()
#: Up to this many rows a plain loop (0.7 us per row) beats the fixed cost of the numpy calls.
_LOOP_ROWS_MAX = 16
#: A batch whose places span fewer than this many places per row is set through a boolean scratch array (about 8 ns per
#: row; ufunc.at takes 18). A wider one is not worth the scratch array.
_SPAN_PER_ROW_MAX = 48


class _Segment:
    __slots__ = ("bits", "bytes", "count")

    def __init__(self) -> None:
        self.bits: U8 = np.zeros(_BYTES_AT_FIRST, dtype=np.uint8)
        self.count = 0
        self.bytes = 0


class LiveMap:
    """The live records of all segments of one topic."""

    def __init__(self, layout: PositionLayout, *, check: bool = False) -> None:
        self._check = check
        self._shift = layout.segment_shift
        self._place_mask = (1 << layout.place_bits) - 1
        self._bytes_max = max(1, (1 << layout.place_bits) >> 3)
        self._maps: dict[int, _Segment] = {}

    def add(self, positions: I64) -> None:
        if self._check and (self.alive(positions).any() or self._repeats(positions)):
            raise BadRequest("a record that is live already was added")
        self._change(positions, live=True)

    def remove(self, positions: I64) -> None:
        if self._check and (not self.alive(positions).all() or self._repeats(positions)):
            raise BadRequest("a record that is not live was removed")
        self._change(positions, live=False)

    def alive(self, positions: I64) -> Mask:
        if len(positions) <= _LOOP_ROWS_MAX:
            return np.array([self.is_alive(p) for p in positions.tolist()], dtype=np.bool_)
        low, high = int(positions.min()), int(positions.max())
        if low >> self._shift == high >> self._shift:
            return self._alive_in(low >> self._shift, positions, high)
        return self._alive_in_many(positions)

    def is_alive(self, position: int) -> bool:
        entry = self._maps.get(position >> self._shift)
        if entry is None:
            return False
        place = (position >> LOW_BITS) & self._place_mask
        bits = entry.bits
        return place >> 3 < len(bits) and bits.item(place >> 3) >> (place & 7) & 1 == 1

    def count(self, segment: int) -> int:
        entry = self._maps.get(segment)
        return entry.count if entry else 0

    def bytes(self, segment: int) -> int:
        """Return an upper bound of the bytes of the segment's live records."""
        entry = self._maps.get(segment)
        return entry.bytes if entry else 0

    def segments(self) -> list[int]:
        return sorted(self._maps)

    def places(self, segment: int) -> I64:
        """Return the byte offsets of the segment's live records, ascending."""
        entry = self._maps.get(segment)
        if entry is None:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(np.unpackbits(entry.bits, bitorder="little")) * ALIGN

    def places_from(self, segment: int, offset: int, nbytes: int) -> tuple[I64, int | None]:
        """Return the live records' offsets within about `nbytes` from an offset on, and where the rest begins; None if
        there is no rest. For steps of bounded length: a complete segment of 64 MiB takes 10 ms."""
        entry, first = self._maps.get(segment), offset // (8 * ALIGN)
        if entry is None:
            return np.zeros(0, dtype=np.int64), None
        bits = entry.bits[first : first + nbytes // (8 * ALIGN)]
        places = (np.flatnonzero(np.unpackbits(bits, bitorder="little")) + 8 * first) * ALIGN
        end = first + len(bits)
        return places[places >= offset], end * 8 * ALIGN if end < len(entry.bits) else None

    def drop(self, segment: int) -> None:
        """Forget the segment, including its live records."""
        self._maps.pop(segment, None)

    @property
    def nbytes(self) -> int:
        return sum(entry.bits.nbytes for entry in self._maps.values())

    def to_state(self) -> list[tuple[Any, ...]]:
        """Return (segment, bitmap, count, bytes) of each segment with live records, for snapshots."""
        return [(n, e.bits.tobytes(), e.count, e.bytes) for n, e in self._maps.items() if e.count]

    def load_state(self, state: list[tuple[Any, ...]]) -> None:
        for number, bits, count, nbytes in state:
            entry = self._maps[number] = _Segment()
            entry.bits = np.frombuffer(bits, dtype=np.uint8).copy()
            entry.count, entry.bytes = count, nbytes

    def _change(self, positions: I64, live: bool) -> None:
        if len(positions) <= _LOOP_ROWS_MAX:
            for position in positions.tolist():
                self._change_one(position, live)
            return
        low, high = int(positions.min()), int(positions.max())
        if low >> self._shift == high >> self._shift:
            self._change_segment(positions, low, high, live)
        else:
            self._change_many(positions, live)

    def _change_one(self, position: int, live: bool) -> None:
        place = (position >> LOW_BITS) & self._place_mask
        bound = _BOUND[(position >> ATTEMPTS_BITS) & _SIZE_MASK]
        if live:
            segment = position >> self._shift
            found = self._maps.get(segment)
            entry = found if found is not None and place >> 3 < len(found.bits) else self._reach(segment, place)
            entry.bits[place >> 3] |= _BIT[place & 7]
            entry.count += 1
            entry.bytes += bound
        else:
            entry = self._maps[position >> self._shift]
            entry.bits[place >> 3] &= _HOLE[place & 7]
            entry.count -= 1
            entry.bytes -= bound

    def _change_segment(self, positions: I64, low: int, high: int, live: bool) -> None:
        """Change rows of one segment, the common case; `low` and `high` are the outermost positions."""
        first, last = (low >> LOW_BITS) & self._place_mask, (high >> LOW_BITS) & self._place_mask
        entry = self._reach(low >> self._shift, last) if live else self._maps[low >> self._shift]
        places = (positions >> LOW_BITS) & self._place_mask
        if last - first < _SPAN_PER_ROW_MAX * len(positions):
            start = first >> 3
            scratch = np.zeros(last + 1 - start * 8, dtype=np.bool_)
            scratch[places - start * 8] = True
            packed = np.packbits(scratch, bitorder="little")
            here = entry.bits[start : start + len(packed)]
            np.bitwise_or(here, packed, out=here) if live else np.bitwise_and(here, ~packed, out=here)
        else:
            _mark(entry.bits, places >> 3, places & 7, live)
        bound = int(_bounds(positions).sum())
        entry.count += len(positions) if live else -len(positions)
        entry.bytes += bound if live else -bound

    def _change_many(self, positions: I64, live: bool) -> None:
        """Change rows of several segments. Columns are computed once, so that a segment costs few numpy calls."""
        spots = positions >> LOW_BITS
        order = spots.argsort()
        spots = spots[order]
        places = spots & self._place_mask
        index, bit = places >> 3, places & 7
        stretches = list(_stretches(spots >> (self._shift - LOW_BITS)))
        bounds = np.add.reduceat(_bounds(positions[order]), [start for _, start, _ in stretches]).tolist()
        for (segment, start, end), bound in zip(stretches, bounds, strict=True):
            entry = self._reach(segment, int(places[end - 1])) if live else self._maps[segment]
            _mark(entry.bits, index[start:end], bit[start:end], live)
            entry.count += end - start if live else start - end
            entry.bytes += bound if live else -bound

    def _reach(self, segment: int, place: int) -> _Segment:
        """Return the segment's map, grown until `place` has a bit: doubling, but never past what a segment can need."""
        entry = self._maps.get(segment)
        if entry is None:
            entry = self._maps[segment] = _Segment()
        size = len(entry.bits)
        if place >> 3 >= size:
            grown = np.zeros(max(min(size * 2, self._bytes_max), (place >> 3) + 1), dtype=np.uint8)
            grown[:size] = entry.bits
            entry.bits = grown
        return entry

    def _alive_in(self, segment: int, positions: I64, high: int) -> Mask:
        entry = self._maps.get(segment)
        if entry is None:
            return np.zeros(len(positions), dtype=np.bool_)
        if (high >> LOW_BITS) & self._place_mask >= len(entry.bits) * 8:
            return self._alive_in_many(positions)
        places = (positions >> LOW_BITS) & self._place_mask
        answer: Mask = (entry.bits[places >> 3] & _BIT[places & 7]) != 0
        return answer

    def _alive_in_many(self, positions: I64) -> Mask:
        spots = positions >> LOW_BITS
        order = spots.argsort()
        spots = spots[order]
        places = spots & self._place_mask
        index = places >> 3
        found = np.zeros(len(positions), dtype=np.uint8)
        for segment, start, end in _stretches(spots >> (self._shift - LOW_BITS)):
            entry = self._maps.get(segment)
            if entry is not None:
                if index[end - 1] >= len(entry.bits):  # nothing is live past the end of the map
                    end = start + int(index[start:end].searchsorted(len(entry.bits)))
                found[start:end] = entry.bits[index[start:end]]
        answer = np.empty(len(positions), dtype=np.bool_)
        answer[order] = (found & _BIT[places & 7]) != 0
        return answer

    def _repeats(self, positions: I64) -> bool:
        return len(np.unique(positions >> LOW_BITS)) < len(positions)


def _mark(bits: U8, index: I64, bit: I64, live: bool) -> None:
    if live:
        np.bitwise_or.at(bits, index, _BIT[bit])
    else:
        np.bitwise_and.at(bits, index, _HOLE[bit])


def _bounds(positions: I64) -> I64:
    bounds: I64 = SIZE_BOUNDS[(positions >> ATTEMPTS_BITS) & _SIZE_MASK]
    return bounds


def _stretches(sorted_values: I64) -> Iterator[tuple[int, int, int]]:
    """Yield value, start and end of each range of equal values."""
    starts = np.concatenate(([0], np.flatnonzero(sorted_values[1:] != sorted_values[:-1]) + 1))
    values = sorted_values[starts].tolist()
    cuts = starts.tolist()
    return zip(values, cuts, [*cuts[1:], len(sorted_values)], strict=True)


class SegmentPins:
    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # segment -> offset of the last row whose record is in it, not next to the row

    def add(self, offsets: I64, segments: I64) -> None:
        """Add stream rows that were just recorded, in order, and the segments of their records."""
        if not len(offsets):
            return
        found, at = np.unique(segments[::-1], return_index=True)
        self._last.update(zip(found.tolist(), offsets[::-1][at].tolist(), strict=True))

    def add_all(self, last: int, segment: int) -> None:
        """Add rows up to `last` whose records are all in one segment."""
        self._last[segment] = last

    def needed(self, segment: int, start: int) -> bool:
        """Whether a row at or above this offset has its record in the segment."""
        return self._last.get(segment, -1) >= start

    def last(self, segment: int) -> int:
        """Return the last row whose record is in the segment and not next to the row; -1 if there is none."""
        return self._last.get(segment, -1)

    def drop(self, segment: int) -> None:
        """Forget the segment. It was deleted, like all segments before it."""
        self._last = {number: last for number, last in self._last.items() if number > segment}

    def to_state(self) -> list[Any]:
        return list(self._last.items())

    @classmethod
    def from_state(cls, state: list[Any]) -> SegmentPins:
        pins = cls()
        pins._last = dict(state)
        return pins
