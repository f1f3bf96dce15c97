"""Read logs from a running server: the same units as in its directory, decoded by the reader.

The server is asked for the end of a log at most every REFRESH_SECONDS. Units are checked like units from files
(numbers, chain and checksums), so what arrives is what was written.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.client.target import ClientTls
from heapline.client.transports.blocking_calls import BlockingCalls
from heapline.contract import log
from heapline.contract.admin import Describe
from heapline.contract.errors import BadRequest, HeaplineError, JournalCorrupt, TopicNotFound
from heapline.contract.topics import ListTopics
from heapline.core.events import I64
from heapline.core.record import ROW
from heapline.engine.state_rows import STATE, StateRows
from heapline.journal.index import ENTRY, ENTRY_EVERY_BYTES
from heapline.journal.records import Records
from heapline.journal.unit import BadUnit, Unit, crc_seed, decode, parse_header
from heapline.spark.event_log import EventLog
from heapline.spark.topic_log import (
    DataLost,
    JournalHold,
    LogIndex,
    TopicLog,
    TopicRef,
    UnitPosition,
    lost_after_planning,
)

REFRESH_SECONDS = 0.05
HOLD_SECONDS_MAX = 3600.0
_NO_ENTRIES = 1 << 62  # a unit after all others: the response has no index entries


@dataclass(frozen=True)
class RemoteSource:
    """A running server."""

    endpoints: tuple[str, ...]
    credential: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    lease_seconds: float = 600.0

    def _calls(self) -> BlockingCalls:
        return BlockingCalls(self.endpoints, self.credential, self.tls)

    def topics(self) -> list[TopicRef]:
        with contextlib.closing(self._calls()) as calls:
            infos = calls.every(ListTopics())
            has_journal = "log" in calls.do(Describe()).features
        return [
            TopicRef(i.name, i.incarnation, i.config.partitions, id_suffix=i.id_suffix, has_journal=has_journal)
            for i in infos
        ]

    def open(self, topic: TopicRef) -> TopicLog:
        if not topic.has_journal:
            return EventLog(topic, self._calls())
        return RemoteLog(topic, self._calls(), min(self.lease_seconds, HOLD_SECONDS_MAX))


class RemoteLog:
    def __init__(self, ref: TopicRef, calls: BlockingCalls, lease_seconds: float) -> None:
        self.ref = ref
        self._calls = calls
        self._response: Any = None  # the last LogIndex response
        self._refreshed_at = 0.0
        self._entries = np.zeros(0, dtype=ENTRY)
        self._segments: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._hold = JournalHold(self._write_hold, lease_seconds)

    # -- the end of the log ----------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        now = time.monotonic()
        if self._response is not None and now - self._refreshed_at < REFRESH_SECONDS:
            return False
        return self._fetch_index(None)

    def _fetch_index(self, hold: Any) -> bool:
        before = self._response
        after = 0 if before is None else before.last_unit
        try:
            response = self._calls.do(log.GetLogIndex(self.ref.topic, after, hold))
        except TopicNotFound:
            raise DataLost(f"topic {self.ref.topic!r} was deleted") from None
        self._refreshed_at = time.monotonic()
        if response.incarnation != self.ref.incarnation:
            raise DataLost(f"topic {self.ref.topic!r} was deleted and created again; start a new query on it")
        if response.last_unit < after:
            raise DataLost(
                f"the log of topic {self.ref.topic!r} ends before rows that were already read; it may have been "
                "restored from a backup. Start a new query on it"
            )
        self._entries = np.concatenate((self._entries, np.frombuffer(response.marks, dtype=ENTRY)))
        self._segments = np.concatenate((self._segments, np.frombuffer(response.mark_segments, dtype="<i8")))
        there = self._segments >= response.first_segment
        self._entries, self._segments = self._entries[there], self._segments[there]
        self._response = response
        ends = (response.last_unit, response.first_segment)
        return before is None or ends != (before.last_unit, before.first_segment)

    def ends(self) -> dict[int, int]:
        return dict(enumerate(self._response.ends))

    def starts(self) -> dict[int, int]:
        return dict(enumerate(self._response.starts))

    def last_unit(self) -> int:
        last: int = self._response.last_unit
        return last

    def index(self) -> LogIndex:
        cuts = np.flatnonzero(np.diff(self._segments)) + 1
        parts = [part for part in np.split(self._entries, cuts) if len(part)]
        owners = [int(part[0]) for part in np.split(self._segments, cuts) if len(part)]
        return LogIndex(zip(owners, parts, strict=True), self._response.segment_bytes)

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        return self.index().offset_at(partition, time_ms, self._near)

    def _near(self, position: UnitPosition) -> Iterator[Unit]:
        """Yield the units after an index entry that can contain its partition's frames before the next entry."""
        for unit in self.units(position, self.last_unit() + 1):
            if unit.segment != position.segment or unit.offset - position.at >= ENTRY_EVERY_BYTES:
                return
            yield unit

    # -- reading ---------------------------------------------------------------------------------------------------

    def units(self, start: UnitPosition | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        checked = _Checked(self.ref, 0 if start is None else start.unit)

        def feed() -> log.ReadUnits:
            return log.ReadUnits(self.ref.topic, checked.number, end)

        try:
            for response in self._calls.stream(feed):
                for raw in response.units:
                    unit = checked.next(raw)
                    if time.time() >= hold_from:
                        self._hold.keep(unit.segment)
                    yield unit
        except BadRequest as error:
            raise lost_after_planning(error) from None
        if checked.number < end:
            raise JournalCorrupt(self.ref.topic, 0, f"the server did not send unit {checked.number}")

    def hold(self, start: UnitPosition | None) -> float:
        return self._hold.keep(self._response.first_segment if start is None else start.segment)

    def _write_hold(self, name: str, segment: int, seconds: float) -> None:
        hold = log.Hold(name, segment, seconds)
        if self._response is not None and seconds:
            self._fetch_index(hold)
        else:  # a task that only reads, or the end of a hold: the index is not needed
            self._calls.do(log.GetLogIndex(self.ref.topic, _NO_ENTRIES, hold))

    # -- the state of the queue ------------------------------------------------------------------------------------

    def first_segment(self) -> int:
        self._fetch_index(None)
        first: int = self._response.first_segment
        return first

    def state_rows(self, dead: bool) -> StateRows:
        at, parts = log.PinnedState(), [b""]
        for item in self._calls.stream(lambda: log.PinState(self.ref.topic, dead)):
            if item.incarnation:  # the beginning, or the stream started again after a broken connection
                at, parts = item, []
            parts.append(item.rows)
        rows = np.frombuffer(b"".join(parts), dtype=STATE)
        if len(rows) != at.count:
            raise JournalCorrupt(self.ref.topic, 0, f"the server sent {len(rows)} of {at.count} rows of its state")
        return StateRows(at.incarnation, at.wall_ms, at.segment_bytes, at.ends, rows, at.texts)

    def records(self, positions: I64, segment_bytes: int) -> Records:
        ref = self.ref
        wanted = memoryview(np.ascontiguousarray(positions, dtype=np.int64).data).cast("B")
        response = self._calls.do(log.ReadRecords(ref.topic, ref.incarnation, wanted))
        rows = np.frombuffer(response.rows, dtype=ROW)
        return Records(rows, [response.payloads], [response.smalls])

    def close(self, *, release: bool = True) -> None:
        if release:
            with contextlib.suppress(HeaplineError):  # the hold expires anyway
                self._hold.end()
        self._calls.close()


class _Checked:
    """A sequence of units in which each must continue the one before."""

    def __init__(self, ref: TopicRef, number: int) -> None:
        self._ref = ref
        self.number = number  # of the next unit; 0: any
        self._chain: int | None = None

    def next(self, raw: Any) -> Unit:
        header = parse_header(raw.data, 0, crc_seed(self._ref.incarnation, raw.segment), self._ref.topic)
        if header is None or header.nbytes != len(raw.data):
            raise JournalCorrupt(self._ref.topic, raw.at, "the received bytes are not a unit of this topic")
        if self.number and header.number != self.number:
            raise JournalCorrupt(self._ref.topic, raw.at, f"expected unit {self.number}, received {header.number}")
        if self._chain is not None and header.prev_crc != self._chain:
            raise JournalCorrupt(self._ref.topic, raw.at, f"unit {header.number} does not continue the previous one")
        try:
            unit = decode(memoryview(raw.data), header, raw.segment, raw.at, self._ref.topic)
        except BadUnit as error:
            raise JournalCorrupt(self._ref.topic, raw.at, str(error)) from None
        self.number, self._chain = header.number + 1, header.body_crc
        return unit
