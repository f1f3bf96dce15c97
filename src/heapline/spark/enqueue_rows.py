"""Validate rows and encode them as messages on the wire: which rows can be enqueued, and why the others cannot.

Works on columns: numbers and payloads are sent as the buffers that they are, without a Python object per row. Keys and
headers cost one object each where they occur, because the wire has them one by one. The rules are the broker's
(engine/columns.py), but errors are found before anything is sent. An error describes the row, never its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heapline.contract.check import SECONDS_MAX
from heapline.contract.config import short
from heapline.contract.fields import KEY_BYTES_MAX
from heapline.contract.message import TopicInfo
from heapline.contract.messages import HEADERS_BYTES_MAX, INSTANT_MS_MAX, NewMessages
from heapline.engine.columns import priority_range
from heapline.spark.arrow import I64, Bools, is_text, lengths_of, numbers_of, text_of, valid_of

PART_ROWS, PART_BYTES = 5_000, 4 << 20
PART_BYTES_MIN = 64 << 10
ROW_BYTES = 320  # upper bound of a row in the journal without its payload, key and headers
Shares = list[tuple[str, NewMessages]]  # by topic
_TEXTS = (("key", "keys"), ("idempotency_key", "idempotency_keys"), ("fairness_key", "fairness_keys"))


class TopicLimits(NamedTuple):
    """The limits of a topic."""

    payload_max: int
    priority_min: int
    priority_max: int
    fair: bool
    part_bytes: int  # size limit of one part

    @classmethod
    def of(cls, info: TopicInfo) -> TopicLimits:
        config = info.config
        low, high = priority_range(config)
        spread = config.partitions * 4096  # names and frames of each partition
        room = min(PART_BYTES, config.segment_bytes - (64 << 10)) - spread
        return cls(config.max_payload_bytes, low, high, config.fairness == "keys", max(PART_BYTES_MIN, room))


class BadRow(NamedTuple):
    row: int  # index in its batch
    topic: str | None
    reason: str


def validate(
    batch: Any, default_topic: str | None, topics: Callable[[Sequence[str]], Mapping[str, TopicLimits]]
) -> tuple[ValidRows, list[BadRow]]:
    """Return the rows of a batch that can be enqueued, and those that cannot.

    `topics` returns the limits of the named topics that exist.
    """
    checks = _Checks(batch, default_topic, topics)
    bad = checks.bad_rows()
    if not bad:
        return checks.valid(None), []
    keep = np.ones(batch.num_rows, dtype=np.bool_)
    keep[[row.row for row in bad]] = False
    return checks.valid(keep), bad


class _Checks:
    """Validates the columns of a batch. The first fault of a row is the one that is reported."""

    def __init__(
        self, batch: Any, default: str | None, topics: Callable[[Sequence[str]], Mapping[str, TopicLimits]]
    ) -> None:
        self._batch, self._count = batch, batch.num_rows
        self._columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self._faults: dict[int, str] = {}
        self._find_topics(default)
        found = topics([name for name in self._names if name])
        self._limits = [found.get(name) for name in self._names]
        self._known = [
            limits or TopicLimits(1 << 62, -(1 << 63), (1 << 63) - 1, True, PART_BYTES) for limits in self._limits
        ]
        self._headers: list[dict[str, str] | None] | None = None
        if self._count:
            self._check()

    def _find_topics(self, default: str | None) -> None:
        """Find the topic of each row: the distinct names, and an index into them for each row."""
        column = self._columns.get("topic")
        if column is None:
            self._names, self._codes = [default or ""], np.zeros(self._count, dtype=np.int64)
            return
        coded = pc.fill_null(text_of(column), default or "").dictionary_encode()
        names = [short(name) for name in coded.dictionary.to_pylist()]
        self._names = list(dict.fromkeys(names))
        number = {name: i for i, name in enumerate(self._names)}
        same = np.array([number[name] for name in names], dtype=np.int64)
        self._codes = same[coded.indices.to_numpy(zero_copy_only=False)] if names else np.zeros(0, dtype=np.int64)

    def _check(self) -> None:
        self._mark(np.array([not name for name in self._names])[self._codes], lambda row: "topic is null")
        unknown = np.array([limits is None for limits in self._limits])[self._codes]
        self._mark(unknown, lambda row: f"topic {self._topic(row)!r} does not exist")
        self._check_value()
        if "priority" in self._columns:
            self._check_priority()
        for name, _ in _TEXTS:
            if name in self._columns:
                self._check_text(name)
        if "fairness_key" in self._columns:
            given = valid_of(self._columns["fairness_key"])
            self._mark(given & ~self._of_topic("fair"), lambda row: "the topic does not use fairness keys")
        if "deliver_at" in self._columns:
            us, valid = numbers_of(self._columns["deliver_at"], pa.int64())
            wrong = valid & ((us <= -1000) | (us > INSTANT_MS_MAX * 1000))
            self._mark(wrong, lambda row: "deliver_at is before 1970 or centuries in the future")
        for name in ("delay", "ttl"):
            if name in self._columns:
                self._check_seconds(name)
        if "headers" in self._columns:
            self._check_headers()

    def _mark(self, wrong: Bools, reason: Callable[[int], str]) -> None:
        if wrong.any():
            for row in np.flatnonzero(wrong).tolist():
                self._faults.setdefault(row, reason(row))

    def _topic(self, row: int) -> str:
        return self._names[int(self._codes[row])]

    def _of_topic(self, field: str) -> npt.NDArray[Any]:
        return np.array([getattr(limits, field) for limits in self._known])[self._codes]

    def _check_value(self) -> None:
        value = self._columns["value"]
        self._mark(~valid_of(value), lambda row: "value is null")
        sizes, limits = lengths_of(value), self._of_topic("payload_max")
        over = sizes > limits
        self._mark(over, lambda row: f"value has {sizes[row]} bytes; the topic allows at most {limits[row]}")

    def _check_priority(self) -> None:
        given, valid = numbers_of(self._columns["priority"], pa.int64())
        low, high = self._of_topic("priority_min"), self._of_topic("priority_max")
        wrong = valid & ((given < low) | (given > high))
        self._mark(wrong, lambda row: f"priority {given[row]} is not between {low[row]} and {high[row]}")

    def _check_text(self, name: str) -> None:
        column = self._columns[name]
        valid, sizes = valid_of(column), lengths_of(column)
        self._mark(valid & (sizes == 0), lambda row: f"{name} is empty; use null for none")
        over = sizes > KEY_BYTES_MAX
        self._mark(over, lambda row: f"{name} has {sizes[row]} bytes; the limit is {KEY_BYTES_MAX}")
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            try:
                self._columns[name] = column.cast(pa.string())
            except pa.ArrowInvalid:
                wrong = np.array([not is_text(v) for v in column.to_pylist()])
                self._mark(wrong, lambda row: f"{name} is not UTF-8")

    def _check_seconds(self, name: str) -> None:
        seconds, valid = numbers_of(self._columns[name], pa.float64())
        low = seconds <= 0 if name == "ttl" else seconds < 0
        wrong = valid & (np.isnan(seconds) | low | (seconds > SECONDS_MAX))
        self._mark(wrong, lambda row: f"{name} must be a number of seconds from 0 to {SECONDS_MAX:g}")

    def _check_headers(self) -> None:
        self._headers = [None] * self._count
        for row, pairs in enumerate(self._columns["headers"].to_pylist()):
            if pairs:
                found = _headers(pairs)
                if isinstance(found, str):
                    self._faults.setdefault(row, found)
                else:
                    self._headers[row] = found

    def bad_rows(self) -> list[BadRow]:
        return [BadRow(row, self._topic(row) or None, reason) for row, reason in sorted(self._faults.items())]

    def valid(self, keep: Bools | None) -> ValidRows:
        columns = {name: column for name, column in self._columns.items() if name not in ("topic", "headers")}
        codes, headers = self._codes, self._headers
        if keep is not None:
            mask = pa.array(keep)
            columns = {name: _text_or_same(name, column.filter(mask)) for name, column in columns.items()}
            codes = codes[keep]
            headers = None if headers is None else [h for h, kept in zip(headers, keep.tolist(), strict=True) if kept]
        return ValidRows(
            columns, self._names, codes, headers, min((f.part_bytes for f in self._known), default=PART_BYTES)
        )


class ValidRows:
    """Rows that can be enqueued, as columns."""

    def __init__(
        self, columns: dict[str, Any], names: list[str], codes: I64, headers: list[Any] | None, part_bytes: int
    ) -> None:
        self._columns, self._names, self._codes, self._headers = columns, names, codes, headers
        self._part_bytes = part_bytes
        self.count = len(codes)

    def parts(self) -> Iterator[tuple[int, Shares]]:
        """Yield (row count, share of each topic), each small enough for one prepare."""
        if not self.count:
            return
        sizes = lengths_of(self._columns["value"]) + ROW_BYTES
        for name, _ in _TEXTS:
            if name in self._columns:
                sizes = sizes + lengths_of(self._columns[name])
        if self._headers is not None:
            sizes = sizes + np.array([0 if h is None else _size(h) for h in self._headers])
        ends = np.cumsum(sizes)
        start = 0
        while start < self.count:
            before = int(ends[start - 1]) if start else 0
            fits = int(np.searchsorted(ends, before + self._part_bytes, side="right"))
            end = min(max(fits, start + 1), start + PART_ROWS, self.count)
            yield end - start, self._shares(start, end)
            start = end

    def _shares(self, start: int, end: int) -> Shares:
        columns = {name: column.slice(start, end - start) for name, column in self._columns.items()}
        headers = None if self._headers is None else self._headers[start:end]
        codes = self._codes[start:end]
        present = np.unique(codes).tolist()
        if len(present) == 1:
            return [(self._names[present[0]], _packed(columns, headers))]
        shares: Shares = []
        for code in present:
            rows = np.flatnonzero(codes == code)
            index = pa.array(rows)
            mine = None if headers is None else [headers[row] for row in rows.tolist()]
            shares.append((self._names[code], _packed({n: c.take(index) for n, c in columns.items()}, mine)))
        return shares


def _packed(columns: Mapping[str, Any], headers: list[dict[str, str] | None] | None) -> NewMessages:
    """The messages of one topic as columns. Numbers keep their buffers; payloads and keys become one object each."""
    payloads = columns["value"].to_pylist()
    payloads = [p if isinstance(p, bytes) else p.encode() for p in payloads]
    found: dict[str, Any] = {}
    if "priority" in columns:
        priorities, _ = numbers_of(columns["priority"], pa.int64())
        if priorities.any():
            found["priorities"] = _column(priorities, np.int64)
    for name, field in _TEXTS:
        if name in columns and columns[name].null_count < len(payloads):
            found[field] = columns[name].to_pylist()
    if "deliver_at" in columns and columns["deliver_at"].null_count < len(payloads):
        us, valid = numbers_of(columns["deliver_at"], pa.int64())
        ms = np.maximum(1, -(-us // 1000))  # the first millisecond that is not before it; 0 means none
        found["deliver_at_ms"] = _column(np.where(valid, ms, 0), np.int64)
    for name, field in (("delay", "delays"), ("ttl", "ttls")):
        if name in columns and columns[name].null_count < len(payloads):
            seconds, valid = numbers_of(columns[name], pa.float64())
            found[field] = _column(np.where(valid, seconds, np.nan), np.float64)
    if headers is not None and any(headers):
        found["headers"] = headers
    return NewMessages(payloads, **found)


def _column(values: npt.NDArray[Any], kind: Any) -> memoryview:
    return memoryview(np.ascontiguousarray(values, dtype=kind).data).cast("B")


def _text_or_same(name: str, column: Any) -> Any:
    """Cast keys to text, now that rows with invalid UTF-8 were removed."""
    return text_of(column) if name in ("key", "idempotency_key", "fairness_key") else column


def _headers(pairs: Sequence[Any]) -> dict[str, str] | str:
    """Return the headers of a row, or what is wrong with them."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, value = (pair["key"], pair["value"]) if isinstance(pair, dict) else pair or (None, None)
        if name is None or value is None:
            return "a header has a null name or value"
        if isinstance(value, bytes):
            if not is_text(value):
                return f"header {name!r} is not UTF-8"
            value = value.decode()
        if name in found:
            return f"header {name!r} is duplicated"
        found[name] = value
    if (size := _size(found)) > HEADERS_BYTES_MAX:
        return f"headers have {size} bytes; the limit is {HEADERS_BYTES_MAX}"
    return found


def _size(headers: Mapping[str, str]) -> int:
    return len(msgspec.msgpack.encode(headers))
