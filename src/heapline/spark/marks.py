"""The sparse index of a whole log, and what can be told from it: where to start reading, where to stop, where to cut.

A mark is a unit and one of its frames. A partition has one at least every 64 KiB of journal in which it has frames, and
one for its first frame in each segment. So between two of its marks a partition's frames lie close behind the first:
whoever looks for one never looks far. Knows nothing of files or servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.journal.index import ENTRY
from heapline.journal.segment import FIRST_UNIT_AT
from heapline.spark.buffers import I64

MARK = np.dtype([*ENTRY.descr, ("segment", "<i8")])


class Place(NamedTuple):
    """Where a unit begins."""

    unit: int
    segment: int
    at: int


class Marks:
    def __init__(self, segments: Iterable[tuple[int, npt.NDArray[Any]]], segment_bytes: int) -> None:
        """`segments`: number and index entries of each, in order."""
        parts = []
        for number, entries in segments:
            part = np.zeros(len(entries), dtype=MARK)
            for name in ENTRY.names or ():
                part[name] = entries[name]
            part["segment"] = number
            parts.append(part)
        self.all = np.concatenate([np.zeros(0, dtype=MARK), *parts])
        self._segment_bytes = segment_bytes
        self._of: dict[int, npt.NDArray[Any]] = {}

    def of(self, partition: int) -> npt.NDArray[Any]:
        found = self._of.get(partition)
        if found is None:
            found = self._of[partition] = self.all[self.all["partition"] == partition]
        return found

    def first_offset(self, partition: int) -> int | None:
        """Of the first row that the log still has."""
        marks = self.of(partition)
        return int(marks["first_offset"][0]) if len(marks) else None

    def before(self, partition: int, column: str, value: int, *, strictly: bool = False) -> int:
        """The number, among the partition's, of the last mark at or before the value; -1 if there is none."""
        marks = self.of(partition)
        return int(np.searchsorted(marks[column], value, side="left" if strictly else "right")) - 1

    def before_id(self, partition: int, message_id: int) -> Place | None:
        """A unit at or before the one in which a message was first recorded; None: from the start of the log.

        Records that were moved carry old ids among the new, so what rises is only the highest id so far.
        """
        marks = self.of(partition)
        marks = marks[marks["first_id"] >= 0]
        if not len(marks):
            return None
        highest = np.maximum.accumulate(marks["first_id"])
        near = int(np.searchsorted(highest, message_id, side="right")) - 1
        return None if near < 0 else place_of(marks[int(np.searchsorted(highest, highest[near], side="left"))])

    def span(self, ranges: dict[int, tuple[int, int]], last_unit: int) -> tuple[Place, int] | None:
        """(where to start, number of the unit to stop before) to read these ranges; None: there is nothing to read."""
        places: list[Place] = []
        end = 0
        for partition, (start, stop) in ranges.items():
            marks = self.of(partition)
            if start >= stop or not len(marks):
                continue
            places.append(place_of(marks[max(0, self.before(partition, "first_offset", start))]))
            after = self.before(partition, "first_offset", stop - 1) + 1
            end = max(end, int(marks["unit"][after]) if after < len(marks) else last_unit + 1)
        return (min(places), end) if places else None

    def cut(self, start: Place, end: int, piece_bytes: int, pieces_min: int) -> list[tuple[Place, int]]:
        """The units from `start` to before number `end` in pieces of about so many bytes, or smaller ones."""
        inner = self.all[(self.all["unit"] > start.unit) & (self.all["unit"] < end)]
        _, which = np.unique(inner["unit"], return_index=True)
        places = inner[which]
        at = self._bytes(places)
        first = self._bytes_at(start.segment, start.at)
        total = (int(at[-1]) if len(at) else first) - first
        pieces = max(1, pieces_min, -(-total // piece_bytes))
        goals = first + total * np.arange(1, pieces) / pieces
        chosen: list[int] = np.unique(np.searchsorted(at, goals)).tolist()
        cuts = [place_of(places[i]) for i in chosen if i < len(places)]
        ends = [*(cut.unit for cut in cuts), end]
        return list(zip([start, *cuts], ends, strict=True))

    def _bytes(self, marks: npt.NDArray[Any]) -> I64:
        at: I64 = marks["segment"] * self._segment_bytes + marks["at"]
        return at

    def _bytes_at(self, segment: int, at: int) -> int:
        return segment * self._segment_bytes + at


def place_of(mark: Any) -> Place:
    return Place(int(mark["unit"]), int(mark["segment"]), int(mark["at"]))


def first_place(first_unit: int, segment: int) -> Place:
    return Place(first_unit, segment, FIRST_UNIT_AT)


def share_out(limit: int, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Ends that together are at most `limit` rows after the starts, each partition by its share of what waits.

    As Kafka's source does it; but the sum is exact, and whoever has something to give gets on by a row at least as long
    as the limit reaches.
    """
    waiting = [max(0, end - start) for start, end in zip(starts, ends, strict=True)]
    total = sum(waiting)
    if total <= limit:
        return [max(start, end) for start, end in zip(starts, ends, strict=True)]
    given = [limit * rows // total for rows in waiting]
    left = limit - sum(given)
    # What rounding left over goes to those with the largest remainders, the first ones first.
    order = sorted(range(len(waiting)), key=lambda i: (-(limit * waiting[i] % total), i))
    for i in order[:left]:
        given[i] += 1
    return [start + rows for start, rows in zip(starts, given, strict=True)]
