"""Which segments hold the records of rows of the stream that lie further on in the journal.

The record of a message that came without delay lies beside its row, so whoever keeps the rows from an offset on keeps
it too. A message that fired was recorded long before, perhaps in a segment that is dead but for it: a worker may pop
and ack it before a slow group comes to its place. Such a segment is needed until nobody needs the last of its rows;
so the position in a fired row can be read for as long as a group may come to it, moved or not in the meantime.
The same goes for rows that a commit made visible, whose records were prepared before.

One number a segment. Which groups there are, how far they have come and what retention keeps is passed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class SegmentPins:
    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # segment -> offset of the last row whose record lies there and not beside it

    def add(self, offsets: I64, segments: I64) -> None:
        """Stream rows that were just recorded, in their order, and where their records lie."""
        if not len(offsets):
            return
        found, at = np.unique(segments[::-1], return_index=True)
        self._last.update(zip(found.tolist(), offsets[::-1][at].tolist(), strict=True))

    def add_all(self, last: int, segment: int) -> None:
        """The same for rows up to `last` whose records all lie in one segment."""
        self._last[segment] = last

    def needed(self, segment: int, start: int) -> bool:
        """Whether a row at or above this offset has its record there."""
        return self._last.get(segment, -1) >= start

    def last(self, segment: int) -> int:
        """The last row whose record lies there and not beside it; -1: there is none."""
        return self._last.get(segment, -1)

    def drop(self, segment: int) -> None:
        """The segment is gone, as all before it."""
        self._last = {number: last for number, last in self._last.items() if number > segment}

    def to_state(self) -> list[Any]:
        return list(self._last.items())

    @classmethod
    def from_state(cls, state: list[Any]) -> SegmentPins:
        pins = cls()
        pins._last = dict(state)
        return pins
