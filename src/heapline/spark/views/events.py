"""The view `events` as Arrow batches: one row for each row of the log, whatever its kind.

An event fills the few columns that it has values for; the others stay null without any work. One table maps the fields
of events to columns. All other fields go into `details`, except lease tokens, which are never shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heapline.contract.message import LogEvent, LogFrame
from heapline.core.events import KIND_NAMES, AnyEvent, BatchPrepared, Enqueued, Event, Expired, Leased, Moved
from heapline.core.record import DEFAULT_RETRIES, FLAG_WALL
from heapline.journal.unit import Unit
from heapline.spark.arrow import I64, Bools, chosen, flags, moments, numbers, repeated, ulids
from heapline.spark.schema import EVENTS, Column, arrow_schema, arrow_types
from heapline.spark.topic_log import TopicRef
from heapline.spark.views.messages import UnitRecords, expiry_of

ROWS_MAX = 32_768
_TYPES = {column.name: column.type for column in EVENTS}

#: Fields of events that are columns of the view.
_FIELDS = {
    "ids": "id", "dues": "due", "deadlines": "deadline", "reason": "reason", "seq": "seq", "limit": "limit_key",
    "keys": "heap_key", "priorities": "priority", "expires": "expires_at", "delayed": "was_delayed", "at": "at",
    "count": "count", "batch_id": "batch_id", "group": "group", "offsets": "stream_offset", "kept": "kept",
    "attempts": "attempts", "failures": "attempts", "wall": "due_wall",
}  # fmt: skip
_ZERO_IS_NULL = {"dues", "expires"}  # 0 means "immediately" or "never"
#: Fields that only the engine understands, or that must stay secret.
_HIDDEN = {
    "tokens", "positions", "block", "start", "producers", "grants", "leased", "index", "known", "known_ids",
    "fingerprint", "ready", "again",
}  # fmt: skip
_BRINGS_RECORDS = (Enqueued, Moved)
#: Columns that have one value per event; `offset` is that of its first row.
_SHARED = ("partition", "offset", "timestamp", "wall_time", "unit")


def _plan(kind: type[Event]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (field, column) pairs for the fields that are columns, and the names of the fields for `details`."""
    fields = [name for name in kind.__struct_fields__ if name not in _HIDDEN]
    if kind in (*_BRINGS_RECORDS, BatchPrepared):
        fields = [name for name in fields if name != "keys"]  # idempotency keys
    if kind in _BRINGS_RECORDS:
        fields.remove("count")  # their messages are rows
    if kind is Expired:
        fields = [name for name in fields if name not in ("ids", "delayed")]
    return [(n, _FIELDS[n]) for n in fields if n in _FIELDS], [n for n in fields if n not in _FIELDS]


_PLANS = {kind: _plan(kind) for kind in KIND_NAMES}


class EventBatches:
    """Collects events until a batch is full."""

    def __init__(self, topic: TopicRef, columns: tuple[Column, ...]) -> None:
        self._topic, self._id_suffix, self._columns = topic.topic, topic.id_suffix, columns
        self._schema = arrow_schema(columns)
        self._wanted = {column.name for column in columns}
        if "message_id" in self._wanted:
            self._wanted.add("id")
        self._clear()

    def _clear(self) -> None:
        # By column: (first row, one value per row or one for all, row count).
        self._values: dict[str, list[tuple[int, Any, int]]] = {name: [] for name in self._wanted}
        self._facts: list[tuple[int, ...]] = []  # per event: the columns _SHARED, and its row count
        self._kinds: list[str] = []
        self.count = 0

    @property
    def is_full(self) -> bool:
        return self.count >= ROWS_MAX

    def add(
        self, event: AnyEvent, records: list[UnitRecords], partition: int, offset: int, unit: Unit, low: int, high: int
    ) -> None:
        """Add rows [low, high) of an event whose first row is at `offset`. `records` are those of just these rows."""
        count = high - low
        columns, rest = _PLANS[type(event)]
        for field, column in columns:
            if column in self._wanted:
                self._set_field(field, column, getattr(event, field), event, low, high)
        if isinstance(event, Leased):
            self._set_leases(event, low, high)
        elif isinstance(event, Expired):
            gone = len(event.ids)
            self._set("id", np.concatenate((event.ids, event.leased))[low:high], count)
            self._set("returned", np.arange(low, high) < gone, count)
        if records and not isinstance(event, BatchPrepared):
            self._set_records(records, isinstance(event, Enqueued))
        if rest and "details" in self._wanted:
            details = {name: getattr(event, name) for name in rest}
            if isinstance(event, BatchPrepared):
                details |= _prepared(event, records)
            self._set("details", _as_json(details), count)
        self._facts.append((partition, offset + low, unit.time, unit.wall, unit.number, count))
        self._kinds.append(KIND_NAMES[type(event)])
        self.count += count

    def _set(self, column: str, values: Any, count: int, after: int = 0) -> None:
        if column in self._wanted:
            self._values[column].append((self.count + after, values, count))

    def _set_field(self, field: str, column: str, value: Any, event: AnyEvent, low: int, high: int) -> None:
        if isinstance(value, bytes):
            value = np.frombuffer(value, dtype=np.uint8)
        if not isinstance(value, np.ndarray):
            if value is not None:
                self._set(column, value, high - low)
        elif len(value) == event.rows():  # otherwise it is empty
            value = value[low:high]
            if field in _ZERO_IS_NULL:
                value = (value, value != 0)
            self._set(column, value == 1 if column == "was_delayed" else value, high - low)

    def _set_leases(self, event: Leased, low: int, high: int) -> None:
        counts = [grant.count for grant in event.grants]
        deadlines = np.repeat([grant.deadline for grant in event.grants], counts)
        self._set("deadline", deadlines[low:high], high - low)
        if "holder" in self._wanted:
            first = 0
            for grant in event.grants:
                begin, end = max(first, low), min(first + grant.count, high)
                if grant.holder is not None and begin < end:
                    self._set("holder", grant.holder, end - begin, begin - low)
                first += grant.count

    def _set_records(self, pieces: list[UnitRecords], are_new: bool) -> None:
        first = 0
        for piece in pieces:
            rows, count = piece.rows, len(piece)
            retries = rows["max_retries"]
            columns = {
                **{name: rows[name] for name in ("id", "priority", "turn", "enqueued_at")},
                "due": (rows["due"], rows["due"] != 0),
                "payload_bytes": rows["payload_len"],
                "expires_at": expiry_of(rows),
                "due_wall": (rows["flags"] & FLAG_WALL) != 0,
                "max_retries": (retries, retries != DEFAULT_RETRIES),
            }
            for column, values in columns.items():
                self._set(column, values, count, first)
            if are_new:
                self._set("at", rows["enqueued_at"], count, first)
            first += count

    def add_recorded(self, frame: LogFrame, event: LogEvent, low: int, high: int) -> None:
        """Add rows [low, high) of an event that a broker without a journal has recorded."""
        count = high - low
        for field, value in event.columns.items():
            column = _RECORDED.get(field, _FIELDS.get(field, field))
            if not isinstance(value, np.ndarray):
                self._set(column, value, count)
                continue
            part = value[low:high]
            none = _NONE_AS.get(field)
            self._set(column, part if none is None else (part, part != none), count)
        self._facts.append((frame.partition, event.offset + low, frame.time_ms, frame.wall_ms, frame.unit, count))
        self._kinds.append(event.kind)
        self.count += count

    def take(self) -> Any:
        """Return a batch of everything that was added since the last one."""
        *columns, counts = (np.array(column) for column in zip(*self._facts, strict=True))
        facts = dict(zip(_SHARED, columns, strict=True))
        arrays = [self._column(column.name, facts, counts) for column in self._columns]
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._clear()
        return made

    def _column(self, name: str, facts: dict[str, Any], counts: I64) -> Any:
        """Build a column. `facts` has one value per event of the columns that all rows of an event share."""
        if name == "topic":
            return repeated(pa.string(), self._topic, self.count)
        if name == "kind":
            return chosen(pa.string(), list(self._kinds), np.repeat(np.arange(len(counts)), counts))
        if name == "offset":
            firsts = np.repeat(facts[name] - (np.cumsum(counts) - counts), counts)
            return numbers(pa.int64(), firsts + np.arange(self.count))
        if name == "message_id":
            ids, valid = self._filled("id", np.int64)
            return ulids(ids, self._id_suffix, valid)
        if name == "at":
            values, valid = self._filled("at", np.int64)
            return moments(np.where(valid, values, np.repeat(facts["timestamp"], counts)))
        kind = _TYPES[name]
        if name in facts:
            values = np.repeat(facts[name], counts)
            return moments(values) if kind == "timestamp" else numbers(_ARROW[kind], values)
        if kind == "string":
            return self._texts(name)
        if not self._values[name]:
            return pa.nulls(self.count, _ARROW[kind])
        if kind == "boolean":
            return flags(*self._filled(name, np.bool_))
        values, valid = self._filled(name, np.int64)
        return moments(values, valid) if kind == "timestamp" else numbers(_ARROW[kind], values, valid)

    def _filled(self, name: str, kind: Any) -> tuple[npt.NDArray[Any], Bools]:
        values, valid = np.zeros(self.count, dtype=kind), np.zeros(self.count, dtype=np.bool_)
        for first, value, count in self._values[name]:
            if isinstance(value, tuple):
                value, valid[first : first + count] = value
            else:
                valid[first : first + count] = True
            values[first : first + count] = value
        return values, valid

    def _texts(self, name: str) -> Any:
        texts: dict[str | None, int] = {None: 0}
        which = np.zeros(self.count, dtype=np.int32)
        for first, text, count in self._values[name]:
            which[first : first + count] = texts.setdefault(text, len(texts))
        return chosen(pa.string(), list(texts), which) if len(texts) > 1 else pa.nulls(self.count, pa.string())


_ARROW = arrow_types()


#: Columns of recorded events that have other names than the view's, and the numbers that stand for null in some.
_RECORDED = {"payload_len": "payload_bytes", "expires": "expires_at"}
_NONE_AS = {"due": 0, "dues": 0, "expires": 0, "max_retries": -1}


def recorded_batches(frames: Iterable[LogFrame], into: EventBatches, start: int, end: int) -> Iterator[Any]:
    """Yield the batches of the events in [start, end)."""
    for frame in frames:
        for event in frame.events:
            low, high = max(start - event.offset, 0), min(end - event.offset, event.row_count)
            if low < high:
                into.add_recorded(frame, event, low, high)
        if into.is_full:
            yield into.take()
    if into.count:
        yield into.take()


def _prepared(event: BatchPrepared, records: list[UnitRecords]) -> dict[str, int]:
    """Return what is needed to judge a part later: the range of its ids, and how many messages have an identity.

    A commit skips a message if another of its parts has a message with the same identity.
    """
    details = {"identified": sum(len(p.index) for p in event.producers) + (len(event.keys.index) if event.keys else 0)}
    if records and len(records[0]):
        details |= {"first_id": int(records[0].ids[0]), "last_id": int(records[0].ids[-1])}
    return details


def _as_json(fields: dict[str, Any]) -> str:
    if "config" in fields:
        fields = {**fields, "config": msgspec.json.decode(fields["config"])}
    return msgspec.json.encode(fields, enc_hook=lambda value: value.tolist()).decode()
