"""The view `messages` as Arrow batches: columns made from records, many records at a time.

Where records come from and which of them are shown is decided in decoding.py. Only the columns that are wanted are
made; what a batch costs is a few numpy calls a column, and one copy of the payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from heapline.core.record import DEFAULT_RETRIES, FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY, ROW
from heapline.journal.unit import Unit
from heapline.spark.buffers import I64, blobs, chosen, gather, moments, numbers, repeated, ulids
from heapline.spark.records import Records
from heapline.spark.schema import Column, arrow_schema

ROWS_MAX = 16_384
BYTES_MAX = 8 << 20
APPEND_TIME = 1  # Kafka's code of LogAppendTime
_PLAIN = f"V{ROW.itemsize}"  # numpy joins plain bytes much faster than records
_SMALL = {"key", "fairness_key", "headers"}


class MessageBatches:
    """Gathers records until a batch is full."""

    def __init__(self, topic: str, columns: tuple[Column, ...]) -> None:
        self._topic = topic
        self._schema = arrow_schema(columns)
        self._makers = [getattr(_Batch, f"_{column.name}") for column in columns]
        names = {column.name for column in columns}
        self._has_values, self._has_smalls = "value" in names, bool(names & _SMALL)
        self._clear()

    def _clear(self) -> None:
        self._pieces: list[Records] = []
        self._facts: list[tuple[int, int, int, int]] = []  # of each piece: partition, first offset, time, unit
        self._batches: list[str | None] = []
        self._payloads: list[Any] = []
        self._smalls: list[Any] = []
        self.count = self.nbytes = 0

    @property
    def is_full(self) -> bool:
        return self.count >= ROWS_MAX or self.nbytes >= BYTES_MAX

    def add(self, records: Records, partition: int, offset: int, unit: Unit, batch_id: str | None = None) -> None:
        """Messages that stand in the log from this offset on."""
        self._pieces.append(records)
        self._facts.append((partition, offset, unit.time, unit.number))
        self._batches.append(batch_id)
        if self._has_values:
            self._payloads.append(records.payloads())
            self.nbytes += len(self._payloads[-1])
        if self._has_smalls:
            self._smalls.append(records.smalls())
        self.count += len(records)

    def take(self) -> Any:
        """The batch of all that was added since the last."""
        batch = _Batch(self._topic, self._pieces, self._facts, self._batches, self._payloads, self._smalls)
        made = pa.RecordBatch.from_arrays([make(batch) for make in self._makers], schema=self._schema)
        self._clear()
        return made


class _Batch:
    """One method for each column of the view."""

    def __init__(
        self, topic: str, pieces: list[Records], facts: list[tuple[int, int, int, int]], batches: list[str | None],
        payloads: list[Any], smalls: list[Any],
    ) -> None:  # fmt: skip
        self.topic, self.batches, self.payloads = topic, batches, payloads
        self.counts = np.array([len(piece) for piece in pieces])
        self.rows = np.concatenate([piece.rows.view(_PLAIN) for piece in pieces]).view(ROW)
        self.partitions, self.firsts, self.times, self.units = (np.array(column) for column in zip(*facts, strict=True))
        self.small = np.frombuffer(b"".join(smalls), dtype=np.uint8)
        self.small_lengths: I64 = self.rows["small_len"].astype(np.int64)
        self.small_starts: I64 = np.cumsum(self.small_lengths) - self.small_lengths

    def _each(self, values: Any) -> Any:
        return np.repeat(values, self.counts)

    def _value(self) -> Any:
        return blobs(pa.binary(), b"".join(self.payloads), self.rows["payload_len"])

    def _key(self) -> Any:
        return self._part(pa.binary(), FLAG_KEY, self.small_starts, self.rows["key_len"])

    def _fairness_key(self) -> Any:
        starts = self.small_starts + self.rows["key_len"]
        return self._part(pa.string(), FLAG_FAIRNESS, starts, self.rows["fairness_len"])

    def _part(self, kind: Any, flag: int, starts: I64, lengths: Any) -> Any:
        there = (self.rows["flags"] & flag) != 0
        if not there.any():
            return pa.nulls(len(there), kind)
        return blobs(kind, gather(self.small, starts, lengths.astype(np.int64)), lengths, there)

    def _headers(self) -> Any:
        """The one column that is read row by row, where there are headers: they are stored as maps."""
        kind = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
        there = (self.rows["flags"] & FLAG_HEADERS) != 0
        found: list[list[dict[str, Any]] | None] = [None] * len(there)
        begins = self.small_starts + self.rows["key_len"] + self.rows["fairness_len"]
        ends, data, decode = self.small_starts + self.small_lengths, self.small.tobytes(), _headers_of()
        for row in np.flatnonzero(there).tolist():
            found[row] = decode(data[begins[row] : ends[row]])
        return pa.array(found, type=kind)

    def _topic(self) -> Any:
        return repeated(pa.string(), self.topic, len(self.rows))

    def _partition(self) -> Any:
        return numbers(pa.int32(), self._each(self.partitions))

    def _offset(self) -> Any:
        within = np.arange(len(self.rows)) - self._each(np.cumsum(self.counts) - self.counts)
        return numbers(pa.int64(), self._each(self.firsts) + within)

    def _timestamp(self) -> Any:
        return moments(_MOMENT, self._each(self.times))

    def _timestampType(self) -> Any:
        return numbers(pa.int32(), np.full(len(self.rows), APPEND_TIME))

    def _message_id(self) -> Any:
        return ulids(self.rows["id"])

    def _id(self) -> Any:
        return numbers(pa.int64(), self.rows["id"])

    def _priority(self) -> Any:
        return numbers(pa.int64(), self.rows["priority"])

    def _deliver_at(self) -> Any:
        return moments(_MOMENT, self.rows["due"], self.rows["due"] != 0)

    def _enqueued_at(self) -> Any:
        return moments(_MOMENT, self.rows["enqueued_at"])

    def _expires_at(self) -> Any:
        rows = self.rows
        begins = np.where(rows["due"] != 0, rows["due"], rows["enqueued_at"])  # a life counts from when it is due
        return moments(_MOMENT, begins + rows["ttl_ms"], rows["ttl_ms"] != 0)

    def _max_retries(self) -> Any:
        return numbers(pa.int32(), self.rows["max_retries"], self.rows["max_retries"] != DEFAULT_RETRIES)

    def _batch_id(self) -> Any:
        if not any(self.batches):
            return pa.nulls(len(self.rows), pa.string())
        return chosen(pa.string(), self.batches, self._each(np.arange(len(self.batches))))

    def _unit(self) -> Any:
        return numbers(pa.int64(), self._each(self.units))


_MOMENT = pa.timestamp("us", "UTC")


def _headers_of() -> Callable[[bytes], list[dict[str, Any]]]:
    """Decodes stored headers. Messages often share theirs, so each is decoded once a batch."""
    known: dict[bytes, list[dict[str, Any]]] = {}

    def decode(data: bytes) -> list[dict[str, Any]]:
        found = known.get(data)
        if found is None:
            pairs = msgspec.msgpack.decode(data, type=dict[str, str])
            found = known[data] = [{"key": name, "value": value.encode()} for name, value in pairs.items()]
        return found

    return decode
