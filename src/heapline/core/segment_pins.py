"""Segments that hold records of stream rows further on in the journal.

The record of a message enqueued without a delay is next to its row, so keeping the rows from an offset on also keeps
the record. A message that fired was recorded much earlier, perhaps in a segment with no other live record. A worker may
pop and ack it before a slow group reaches its row. Such a segment is kept until no group needs the last of its rows. So
the position in a fired row stays readable until every group has passed it, even if the record was moved. The same
applies to rows made visible by a commit, because their records were prepared earlier.

It stores one number per segment. The groups, their progress and what retention keeps are passed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


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
