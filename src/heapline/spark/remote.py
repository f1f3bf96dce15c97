"""Logs read from a running server: the same units as in its directory, decoded by the reader.

How far a log goes is asked at most every LOOK_SECONDS. Units are checked as they are when they are read from files:
numbers, chain and checksums, so what arrives is what was written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.client.log_calls import LogCalls
from heapline.client.target import ClientTls
from heapline.core.events import I64
from heapline.core.record import ROW
from heapline.engine.state_rows import STATE, StateRows
from heapline.errors import BadRequest, HeaplineError, JournalCorrupt, TopicNotFound
from heapline.journal.index import ENTRY, ENTRY_EVERY_BYTES
from heapline.journal.records import Records
from heapline.journal.unit import BadUnit, Unit, crc_seed, decode, parse_header
from heapline.spark.log import DataLost, TopicRef, lost_since_planned
from heapline.spark.marks import Marks, Place, place_of
from heapline.wire.columns import ints, read_ints
from heapline.wire.schema import pb

LOOK_SECONDS = 0.05
HOLD_SECONDS_MAX = 3600.0
_ALL_KNOWN = 1 << 62  # a unit after all others: no marks are wanted


@dataclass(frozen=True)
class RemoteSource:
    endpoints: tuple[str, ...]
    credential: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    lease_seconds: float = 600.0

    def _calls(self) -> LogCalls:
        return LogCalls(self.endpoints, self.credential, self.tls)

    def topics(self) -> list[TopicRef]:
        calls = self._calls()
        try:
            heaps = calls("ListHeaps", pb.Nothing()).heaps
        finally:
            calls.close()
        return [TopicRef(h.topic, h.incarnation, json.loads(h.config_json)["partitions"]) for h in heaps]

    def open(self, topic: TopicRef) -> RemoteLog:
        return RemoteLog(topic, self._calls(), min(self.lease_seconds, HOLD_SECONDS_MAX))


class RemoteLog:
    def __init__(self, ref: TopicRef, calls: LogCalls, lease_seconds: float) -> None:
        self.ref = ref
        self._calls, self._lease_seconds = calls, lease_seconds
        self._told: Any = None  # the last answer
        self._looked_at = 0.0
        self._entries = np.zeros(0, dtype=ENTRY)
        self._segments: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._name = f"spark-{os.getpid()}-{secrets.token_hex(6)}"
        self._held: int | None = None
        self._renew_at = 0.0

    # -- how far it goes -------------------------------------------------------------------------------------------

    def look(self) -> bool:
        now = time.monotonic()
        if self._told is not None and now - self._looked_at < LOOK_SECONDS:
            return False
        return self._ask(None)

    def _ask(self, hold: Any) -> bool:
        before = self._told
        after = 0 if before is None else before.last_unit
        try:
            told = self._calls("LogIndex", pb.LogIndexRequest(topic=self.ref.topic, after_unit=after, hold=hold))
        except TopicNotFound:
            raise DataLost(f"topic {self.ref.topic!r} was deleted") from None
        self._looked_at = time.monotonic()
        if told.incarnation != self.ref.incarnation:
            raise DataLost(f"topic {self.ref.topic!r} was deleted and made again: start a new query on it")
        if told.last_unit < after:
            raise DataLost(f"the log of topic {self.ref.topic!r} ends before what was read of it: was it restored?")
        self._entries = np.concatenate((self._entries, np.frombuffer(told.marks, dtype=ENTRY)))
        self._segments = np.concatenate((self._segments, read_ints(told.mark_segments)))
        there = self._segments >= told.first_segment
        self._entries, self._segments = self._entries[there], self._segments[there]
        self._told = told
        return before is None or (told.last_unit, told.first_segment) != (before.last_unit, before.first_segment)

    def ends(self) -> dict[int, int]:
        return dict(enumerate(read_ints(self._told.ends).tolist()))

    def starts(self) -> dict[int, int]:
        return dict(enumerate(read_ints(self._told.starts).tolist()))

    def last_unit(self) -> int:
        last: int = self._told.last_unit
        return last

    def marks(self) -> Marks:
        cuts = np.flatnonzero(np.diff(self._segments)) + 1
        parts = [part for part in np.split(self._entries, cuts) if len(part)]
        owners = [int(part[0]) for part in np.split(self._segments, cuts) if len(part)]
        return Marks(zip(owners, parts, strict=True), self._told.segment_bytes)

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        marks = self.marks()
        mine, near = marks.of(partition), marks.before(partition, "time", time_ms, strictly=True)
        if near >= 0:
            place = place_of(mine[near])
            for unit in self.units(place, self.last_unit() + 1):
                if unit.segment != place.segment or unit.offset - place.at >= ENTRY_EVERY_BYTES:
                    break
                for frame in unit.frames:
                    if frame.partition == partition and unit.time >= time_ms:
                        return frame.first_offset
        return int(mine["first_offset"][near + 1]) if near + 1 < len(mine) else None

    # -- reading ---------------------------------------------------------------------------------------------------

    def units(self, start: Place | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        checked = _Checked(self.ref, 0 if start is None else start.unit)
        request = lambda: pb.ReadUnitsRequest(topic=self.ref.topic, start_unit=checked.number, end_unit=end)  # noqa: E731
        try:
            for answer in self._calls.stream("ReadUnits", request):
                for raw in answer.units:
                    unit = checked.next(raw)
                    if time.time() >= hold_from:
                        self._keep(unit.segment)
                    yield unit
        except BadRequest as error:
            raise lost_since_planned(error) from None
        if checked.number < end:
            raise JournalCorrupt(self.ref.topic, 0, f"the server gave no unit {checked.number}")

    def hold(self, start: Place | None) -> float:
        return self._keep(self._told.first_segment if start is None else start.segment)

    def _keep(self, segment: int) -> float:
        now = time.time()
        if self._held == segment and now < self._renew_at:
            return self._renew_at
        hold = pb.LogHold(name=self._name, segment=segment, seconds=self._lease_seconds)
        if self._told is None:  # a task that only reads: it need not know the marks
            request = pb.LogIndexRequest(topic=self.ref.topic, after_unit=_ALL_KNOWN, hold=hold)
            self._calls("LogIndex", request)
        else:
            self._ask(hold)
        self._held, self._renew_at = segment, now + self._lease_seconds / 3
        return self._renew_at

    # -- the state of a moment -------------------------------------------------------------------------------------

    def first_segment(self) -> int:
        self._ask(None)
        first: int = self._told.first_segment
        return first

    def pin(self, dead: bool) -> StateRows:
        request = pb.PinStateRequest(topic=self.ref.topic, dead=dead)
        at, parts = pb.PinnedAt(), [b""]
        for answer in self._calls.stream("PinState", lambda: request):
            if answer.HasField("at"):  # the beginning, or once more from there after the connection broke
                at, parts = answer.at, []
            parts.append(answer.rows)
        rows = np.frombuffer(b"".join(parts), dtype=STATE)
        if len(rows) != at.count:
            raise JournalCorrupt(self.ref.topic, 0, f"the server gave {len(rows)} of {at.count} rows of its state")
        ends = read_ints(at.ends).tolist()
        return StateRows(at.incarnation, at.wall_ms, at.segment_bytes, ends, rows, list(at.texts))

    def records(self, positions: I64, segment_bytes: int) -> Records:
        request = pb.ReadRecordsRequest(
            topic=self.ref.topic, incarnation=self.ref.incarnation, positions=ints(positions)
        )  # fmt: skip
        told = self._calls("ReadRecords", request)
        rows = np.frombuffer(told.rows, dtype=ROW)
        return Records(rows, [told.payloads], [told.smalls])

    def close(self, *, let_go: bool = True) -> None:
        if self._held is not None and let_go:
            hold = pb.LogHold(name=self._name, segment=self._held, seconds=0.0)
            with contextlib.suppress(HeaplineError):  # then it ends by itself
                self._calls("LogIndex", pb.LogIndexRequest(topic=self.ref.topic, after_unit=_ALL_KNOWN, hold=hold))
            self._held = None
        self._calls.close()


class _Checked:
    """Units one after the other, each of which must follow from the one before."""

    def __init__(self, ref: TopicRef, number: int) -> None:
        self._ref = ref
        self.number = number  # of the next
        self._chain: int | None = None

    def next(self, raw: Any) -> Unit:
        header = parse_header(raw.data, 0, crc_seed(self._ref.incarnation, raw.segment), self._ref.topic)
        if header is None or header.nbytes != len(raw.data):
            raise JournalCorrupt(self._ref.topic, raw.at, "these bytes are no unit of this topic")
        if self.number and header.number != self.number:
            raise JournalCorrupt(self._ref.topic, raw.at, f"unit {self.number} must come here, not {header.number}")
        if self._chain is not None and header.prev_crc != self._chain:
            raise JournalCorrupt(self._ref.topic, raw.at, f"unit {header.number} does not follow from the one before")
        try:
            unit = decode(memoryview(raw.data), header, raw.segment, raw.at, self._ref.topic)
        except BadUnit as error:
            raise JournalCorrupt(self._ref.topic, raw.at, str(error)) from None
        self.number, self._chain = header.number + 1, header.body_crc
        return unit
