"""The recorded events of a topic on a broker that has no journal, in the form that a reader of logs expects.

Such a topic has one partition, and its offsets take the place of units: a task reads a range of offsets, and the index
divides ranges by their numbers. Nothing can be held: events are kept for the topic's `retention`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.client.transports.blocking_calls import BlockingCalls
from heapline.contract import log
from heapline.contract.errors import BadRequest, TopicNotFound
from heapline.contract.message import LogFrame
from heapline.contract.topics import GetTopic
from heapline.engine.state_rows import StateRows
from heapline.journal.records import Records
from heapline.journal.unit import Unit
from heapline.spark.arrow import I64
from heapline.spark.topic_log import INDEX_ENTRY, DataLost, LogIndex, Ranges, TopicRef, UnitPosition

REFRESH_SECONDS = 0.2
PIECE_EVENTS = 1 << 20  # per task


class EventLog:
    def __init__(self, ref: TopicRef, calls: BlockingCalls) -> None:
        self.ref = ref
        self._calls = calls
        self._bounds: log.Offsets | None = None
        self._refreshed_at = 0.0

    def refresh(self) -> bool:
        """Forget the known bounds. They are read when they are needed: the views of the state do not need them."""
        if time.monotonic() - self._refreshed_at >= REFRESH_SECONDS:
            self._bounds = None
        return self._bounds is None

    def _read_bounds(self) -> log.Offsets:
        if self._bounds is None:
            try:
                incarnation = self._calls.do(GetTopic(self.ref.topic)).incarnation
                self._bounds = self._calls.do(log.GetOffsets(self.ref.topic))
            except TopicNotFound:
                raise DataLost(f"topic {self.ref.topic!r} was deleted") from None
            if incarnation != self.ref.incarnation:
                raise DataLost(f"topic {self.ref.topic!r} was deleted and created again; start a new query on it")
            self._refreshed_at = time.monotonic()
        return self._bounds

    def ends(self) -> dict[int, int]:
        return dict(enumerate(self._read_bounds().ends))

    def starts(self) -> dict[int, int]:
        return dict(enumerate(self._read_bounds().starts))

    def last_unit(self) -> int:
        return self.ends()[0] - 1

    def index(self) -> EventIndex:
        return EventIndex(self._first_frame)

    def _first_frame(self) -> LogFrame | None:
        """Return the first readable event."""
        start, end = self.starts()[0], self.ends()[0]
        return next(self.frames(start, start + 1), None) if start < end else None

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        """Return the offset of the first event at or after this time, by bisection."""
        low, high = self.starts()[0], self.ends()[0]
        end = high
        while low < high:
            middle = (low + high) // 2
            frame = next(self.frames(middle, middle + 1), None)
            if frame is None or frame.time_ms < time_ms:
                low = middle + 1
            else:
                high = middle
        return low if low < end else None

    def frames(self, start: int, end: int) -> Iterator[LogFrame]:
        """Yield the frames with events of [start, end)."""
        at = start

        def feed() -> log.ReadLog:
            return log.ReadLog(self.ref.topic, 0, at, end)

        if start >= end:
            return
        try:
            for frame in self._calls.stream(feed):
                if frame.offset + frame.row_count > at:  # otherwise the stream was repeated
                    if frame.offset > at:
                        raise DataLost(_LOST.format(at, frame.offset - 1, self.ref.topic))
                    yield frame
                    at = frame.offset + frame.row_count
        except BadRequest as error:
            raise DataLost(f"{error}. Load again, or increase the topic's retention") from None
        if at < end:
            raise DataLost(_LOST.format(at, end - 1, self.ref.topic))

    # -- what only a journal has -----------------------------------------------------------------------------------

    def units(self, start: UnitPosition | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        raise no_payloads(self.ref.topic)

    def hold(self, start: UnitPosition | None) -> float:
        """Hold nothing: the retention alone decides how long events are kept."""
        return math.inf

    def first_segment(self) -> int:
        return 0

    def state_rows(self, dead: bool) -> StateRows:
        raise no_payloads(self.ref.topic)

    def records(self, positions: I64, segment_bytes: int) -> Records:
        raise no_payloads(self.ref.topic)

    def close(self, *, release: bool = True) -> None:
        self._calls.close()


_LOST = "events {} to {} of topic {!r} do not exist any more; increase its retention, or read more often"


def no_payloads(topic: str) -> BadRequest:
    return BadRequest(
        f"the broker of topic {topic!r} does not keep past messages, so there is no view messages; read its events "
        "(view=events), or what it has now (view=backlog, view=dlq)"
    )


class EventIndex(LogIndex):
    """Divides ranges of offsets. It knows the first event only."""

    def __init__(self, first: Any) -> None:
        super().__init__((), 0)
        self._first = first

    def of(self, partition: int) -> npt.NDArray[Any]:
        frame = self._first() if partition == 0 else None
        entries = np.zeros(0 if frame is None else 1, dtype=INDEX_ENTRY)
        if frame is not None:
            entries["first_offset"], entries["unit"], entries["time"] = frame.offset, frame.unit, frame.time_ms
        return entries

    def span(self, ranges: Ranges, last_unit: int) -> tuple[UnitPosition, int] | None:
        start, end = ranges.get(0, (0, 0))
        return (UnitPosition(start, 0, 0), end) if start < end else None

    def split(self, start: UnitPosition, end: int, piece_bytes: int, pieces_min: int) -> list[tuple[UnitPosition, int]]:
        count = end - start.unit
        pieces = min(count, max(pieces_min, -(-count // PIECE_EVENTS)))
        cuts = [start.unit + count * n // pieces for n in range(pieces + 1)]
        return [(UnitPosition(first, 0, 0), last) for first, last in pairwise(cuts)]
