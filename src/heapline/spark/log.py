"""What a source of rows must be able to do, wherever the log is: the seam between planning and directory or server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from heapline.core.events import I64
from heapline.engine.state_rows import StateRows
from heapline.errors import BadRequest
from heapline.journal.records import Records
from heapline.journal.unit import Unit
from heapline.spark.marks import Marks, Place


class DataLost(BadRequest):
    """Rows that were asked for are no longer in the journal, or never were in this topic."""


def lost_since_planned(told: BadRequest) -> DataLost:
    return DataLost(f"{told}. What was planned to be read is gone: load it again, or hold it longer with leaseSeconds")


class TopicRef(NamedTuple):
    """One topic, as tasks are told of it."""

    topic: str
    incarnation: int
    partitions: int
    folder: str = ""  # of its journal, if that is read from a directory


class TopicLog(Protocol):
    """The log of one topic. All that it tells holds for what was durable when it last looked."""

    ref: TopicRef

    def look(self) -> bool:
        """Look how far the log goes by now; whether anything changed. Cheap if nothing did."""

    def ends(self) -> dict[int, int]:
        """The offset after the last row of every partition."""

    def starts(self) -> dict[int, int]:
        """The first offset that can be read of every partition; its end if there is none."""

    def last_unit(self) -> int: ...

    def marks(self) -> Marks: ...

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        """The first offset whose row was committed at or after this time; None: there is none yet."""

    def units(self, start: Place | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        """All units from a place, or from the start of the log, to before number `end`. DataLost if some are gone.

        From `hold_from` on (as time.time() counts) it sees to it by itself that nothing is reclaimed meanwhile: before
        that somebody else does.
        """

    def hold(self, start: Place | None) -> float:
        """Keep the log from here, or from where it begins, for a while, also for other processes that are to read it.
        Says from when on these should hold it themselves."""

    def first_segment(self) -> int:
        """The first that is there now."""

    def pin(self, dead: bool) -> StateRows:
        """What waits, or lies dead, at one moment about now. Hold all of the log before."""

    def records(self, positions: I64, segment_bytes: int) -> Records:
        """The records at these positions; what is not there or does not check is zeros."""

    def close(self, *, let_go: bool = True) -> None:
        """With let_go=False what is held stays held, until its time is over."""


class Source(Protocol):
    """Where topics are: a directory or a server. Small and picklable: tasks get a copy."""

    def topics(self) -> list[TopicRef]: ...

    def open(self, topic: TopicRef) -> TopicLog: ...
