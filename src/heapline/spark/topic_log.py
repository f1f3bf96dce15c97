"""The log of a topic as a reader sees it: the contract of a source, the log's sparse index, and holds on the journal.

An index entry describes a unit and one of its frames. A partition has an entry at least every 64 KiB of journal in
which it has frames, and one for its first frame in each segment. So any frame of a partition is close behind one of the
partition's entries. Nothing here knows about files or servers.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest
from heapline.engine.state_rows import StateRows
from heapline.journal.index import ENTRY
from heapline.journal.records import Records
from heapline.journal.segment import FIRST_UNIT_AT
from heapline.journal.unit import Unit
from heapline.spark.arrow import I64

Ranges = Mapping[int, tuple[int, int]]  # partition -> [start, end)
INDEX_ENTRY = np.dtype([*ENTRY.descr, ("segment", "<i8")])


class DataLost(BadRequest):
    """Requested rows are no longer in the journal, or never were in this topic."""


def lost_after_planning(error: BadRequest) -> DataLost:
    return DataLost(f"{error}. Rows were reclaimed after the read was planned; load again, or increase leaseSeconds")


# -- the contract ------------------------------------------------------------------------------------------------------


class TopicRef(NamedTuple):
    """One topic, as it is passed to tasks."""

    topic: str
    incarnation: int
    partitions: int
    folder: str = ""  # of its journal, if that is read from a directory
    id_suffix: int = 0  # the low bits of its messages' ULIDs; 0 if its catalog is missing
    has_journal: bool = True  # False: its broker pages through messages and records events (event_log.py)


class UnitPosition(NamedTuple):
    """The position of a unit in the journal."""

    unit: int
    segment: int
    at: int


class TopicLog(Protocol):
    """The log of one topic. All answers describe what was durable at the last refresh."""

    ref: TopicRef

    def refresh(self) -> bool:
        """Find the current end of the log; return whether anything changed. Cheap if nothing did."""

    def ends(self) -> dict[int, int]:
        """Return the offset after the last row of every partition."""

    def starts(self) -> dict[int, int]:
        """Return the first readable offset of every partition, or its end if it has no rows."""

    def last_unit(self) -> int: ...

    def index(self) -> LogIndex: ...

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        """Return the offset of the first row committed at or after this time, or None if there is none yet."""

    def units(self, start: UnitPosition | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        """Yield the units from `start`, or from the start of the log, up to but not including number `end`.

        Raises DataLost if units are missing. From time `hold_from` on (as time.time() counts) this call holds the
        journal itself; before that, the caller of `hold` does.
        """

    def hold(self, start: UnitPosition | None) -> float:
        """Hold the journal from `start`, or from its beginning, also for other processes that will read it.

        Returns the time from which on those processes must hold it themselves.
        """

    def first_segment(self) -> int:
        """Return the number of the journal's first segment."""

    def state_rows(self, dead: bool) -> StateRows:
        """Return the waiting (or dead) messages at about the current time. Hold the complete log before."""

    def records(self, positions: I64, segment_bytes: int) -> Records:
        """Return the records at these positions. A missing or corrupt record is all zeros."""

    def close(self, *, release: bool = True) -> None:
        """Close the log. With release=False, a hold stays in force until it expires."""


class Source(Protocol):
    """A directory or a server that stores topics. Small and picklable, because tasks receive a copy."""

    def topics(self) -> list[TopicRef]: ...

    def open(self, topic: TopicRef) -> TopicLog: ...


class JournalHold:
    """Protects a topic's segments, from some number on, from being reclaimed while they are read.

    The hold expires unless it is renewed, so a killed reader holds nothing for long. `write(name, segment, seconds)`
    takes or renews it; with 0 seconds it ends it.
    """

    def __init__(self, write: Callable[[str, int, float], None], seconds: float) -> None:
        self._write, self._seconds = write, seconds
        self._name = f"spark-{os.getpid()}-{secrets.token_hex(6)}"
        self._segment: int | None = None
        self._renew_at = 0.0

    def keep(self, segment: int) -> float:
        """Hold this segment and all later ones. Cheap to call often.

        Returns the time from which on processes that rely on this hold must take their own.
        """
        now = time.time()
        if segment != self._segment or now >= self._renew_at:
            self._write(self._name, segment, self._seconds)
            self._segment, self._renew_at = segment, now + self._seconds / 3
        return self._renew_at

    def end(self) -> None:
        if self._segment is not None:
            self._write(self._name, self._segment, 0.0)
            self._segment = None


# -- the index ---------------------------------------------------------------------------------------------------------


class LogIndex:
    """The sparse index of a complete log: where to start reading, where to stop, and where to split."""

    def __init__(self, segments: Iterable[tuple[int, npt.NDArray[Any]]], segment_bytes: int) -> None:
        """`segments` has the number and the index entries of each segment, in order."""
        parts = []
        for number, entries in segments:
            part = np.zeros(len(entries), dtype=INDEX_ENTRY)
            for name in ENTRY.names or ():
                part[name] = entries[name]
            part["segment"] = number
            parts.append(part)
        self.entries = np.concatenate([np.zeros(0, dtype=INDEX_ENTRY), *parts])
        self._segment_bytes = segment_bytes
        self._of: dict[int, npt.NDArray[Any]] = {}

    def of(self, partition: int) -> npt.NDArray[Any]:
        found = self._of.get(partition)
        if found is None:
            found = self._of[partition] = self.entries[self.entries["partition"] == partition]
        return found

    def first_offset(self, partition: int) -> int | None:
        """Return the offset of the first row that the log still has."""
        entries = self.of(partition)
        return int(entries["first_offset"][0]) if len(entries) else None

    def last_before(self, partition: int, column: str, value: int, *, strictly: bool = False) -> int:
        """Return the index, among the partition's entries, of the last one at or before the value, or -1."""
        entries = self.of(partition)
        return int(np.searchsorted(entries[column], value, side="left" if strictly else "right")) - 1

    def before_id(self, partition: int, message_id: int) -> UnitPosition | None:
        """Return a unit at or before the one that first recorded a message, or None for the start of the log.

        Moved records have old ids among the new ones, so only the highest id so far increases steadily.
        """
        entries = self.of(partition)
        entries = entries[entries["first_id"] >= 0]
        if not len(entries):
            return None
        highest = np.maximum.accumulate(entries["first_id"])
        near = int(np.searchsorted(highest, message_id, side="right")) - 1
        return None if near < 0 else position_of(entries[int(np.searchsorted(highest, highest[near], side="left"))])

    def offset_at(
        self, partition: int, time_ms: int, units_from: Callable[[UnitPosition], Iterable[Any]]
    ) -> int | None:
        """Return the offset of the first row committed at or after this time, or None if there is none.

        `units_from` yields the units, or their heads, from an entry on in which the partition's frames are.
        """
        entries, near = self.of(partition), self.last_before(partition, "time", time_ms, strictly=True)
        if near >= 0:
            for unit in units_from(position_of(entries[near])):
                for frame in unit.frames:
                    if frame.partition == partition and unit.time >= time_ms:
                        return int(frame.first_offset)
        return int(entries["first_offset"][near + 1]) if near + 1 < len(entries) else None

    def span(self, ranges: Ranges, last_unit: int) -> tuple[UnitPosition, int] | None:
        """Return the first position and the end unit (exclusive) for these ranges, or None if they are empty."""
        positions: list[UnitPosition] = []
        end = 0
        for partition, (start, stop) in ranges.items():
            entries = self.of(partition)
            if start >= stop or not len(entries):
                continue
            positions.append(position_of(entries[max(0, self.last_before(partition, "first_offset", start))]))
            after = self.last_before(partition, "first_offset", stop - 1) + 1
            end = max(end, int(entries["unit"][after]) if after < len(entries) else last_unit + 1)
        return (min(positions), end) if positions else None

    def split(self, start: UnitPosition, end: int, piece_bytes: int, pieces_min: int) -> list[tuple[UnitPosition, int]]:
        """Split the units from `start` to before number `end` into pieces of about `piece_bytes` bytes or less."""
        inner = self.entries[(self.entries["unit"] > start.unit) & (self.entries["unit"] < end)]
        _, which = np.unique(inner["unit"], return_index=True)
        candidates = inner[which]
        at: I64 = candidates["segment"] * self._segment_bytes + candidates["at"]
        first = start.segment * self._segment_bytes + start.at
        total = (int(at[-1]) if len(at) else first) - first
        pieces = max(1, pieces_min, -(-total // piece_bytes))
        goals = first + total * np.arange(1, pieces) / pieces
        chosen: list[int] = np.unique(np.searchsorted(at, goals)).tolist()
        cuts = [position_of(candidates[i]) for i in chosen if i < len(candidates)]
        ends = [*(cut.unit for cut in cuts), end]
        return list(zip([start, *cuts], ends, strict=True))


def position_of(entry: Any) -> UnitPosition:
    return UnitPosition(int(entry["unit"]), int(entry["segment"]), int(entry["at"]))


def first_position(first_unit: int, segment: int) -> UnitPosition:
    return UnitPosition(first_unit, segment, FIRST_UNIT_AT)


def share_out(limit: int, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return ends that are together at most `limit` rows after the starts, in proportion to the waiting rows.

    Kafka's source does the same. Here the sum is exact, and a partition with waiting rows advances by at least one row
    as long as the limit allows.
    """
    waiting = [max(0, end - start) for start, end in zip(starts, ends, strict=True)]
    total = sum(waiting)
    if total <= limit:
        return [max(start, end) for start, end in zip(starts, ends, strict=True)]
    given = [limit * rows // total for rows in waiting]
    left = limit - sum(given)
    # Rows left over by rounding go to the partitions with the largest remainders, the first ones first.
    order = sorted(range(len(waiting)), key=lambda i: (-(limit * waiting[i] % total), i))
    for i in order[:left]:
        given[i] += 1
    return [start + rows for start, rows in zip(starts, given, strict=True)]
