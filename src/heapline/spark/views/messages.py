"""The view `messages` as Arrow batches: message records in the bytes of units, converted many at a time.

decoder.py decides which records are shown. Only the requested columns are built. A batch costs a few numpy calls per
column and one copy of the payloads; payloads are not copied before they are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heapline.core.events import BatchPrepared, Enqueued, Moved
from heapline.core.record import DEFAULT_RETRIES, FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY, ROW
from heapline.journal.block import block_nbytes
from heapline.journal.unit import Unit
from heapline.spark.arrow import I64, Bytes, blobs, chosen, gather, moments, numbers, repeated, ulids
from heapline.spark.schema import PAIRS, Column, arrow_schema, arrow_types
from heapline.spark.topic_log import TopicRef


class UnitRecords:
    """Message records in `data`: adjacent rows from byte `first`, or rows at the bytes `at`."""

    __slots__ = ("at", "data", "first", "rows")

    def __init__(self, data: Bytes, rows: npt.NDArray[Any], first: int, at: I64 | None = None) -> None:
        self.data, self.rows, self.first, self.at = data, rows, first, at

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> I64:
        ids: I64 = self.rows["id"]
        return ids

    def between(self, low: int, high: int) -> UnitRecords:
        at = None if self.at is None else self.at[low:high]
        return UnitRecords(self.data, self.rows[low:high], self.first + low * ROW.itemsize, at)

    def take(self, which: npt.NDArray[Any]) -> UnitRecords:
        """Return some of the rows, in any order."""
        return UnitRecords(self.data, self.rows[which], self.first, self._positions()[which])

    def _positions(self) -> I64:
        if self.at is not None:
            return self.at
        return self.first + np.arange(len(self.rows), dtype=np.int64) * ROW.itemsize

    def payloads(self) -> Any:
        """Return the payloads one after the other, as one buffer."""
        return self._parts("payload_at", "payload_len")

    def smalls(self) -> Any:
        return self._parts("small_at", "small_len")

    def _parts(self, at: str, length: str) -> Any:
        rows = self.rows
        if self.at is not None:
            return gather(self.data, self.at + rows[at], rows[length].astype(np.int64))
        if not len(rows):
            return b""
        # Within a block they are in the order of their rows, without gaps.
        last = len(rows) - 1
        start = self.first + rows[at].item(0)
        return self.data[start : self.first + last * ROW.itemsize + rows[at].item(last) + rows[length].item(last)]


def records_of(unit: Unit, event: Enqueued | Moved | BatchPrepared) -> UnitRecords:
    """Return the records of an event, as views of the unit's bytes."""
    first = unit.blocks[event.block].offset + event.start * ROW.itemsize
    rows = np.frombuffer(unit.data, ROW, event.count, first)
    return UnitRecords(np.frombuffer(unit.data, dtype=np.uint8), rows, first)


def own_records(unit: Unit, event: Moved | BatchPrepared) -> UnitRecords:
    """Return the records of an event with their own copy of the bytes, so that the unit can be freed."""
    block = unit.blocks[event.block]
    end = block.offset + block_nbytes(block.count, block.smalls_len, block.payloads_len)
    data = np.frombuffer(bytes(unit.data[block.offset : end]), dtype=np.uint8)
    first = event.start * ROW.itemsize
    return UnitRecords(data, np.frombuffer(data, ROW, event.count, first), first)


def in_order(found: Sequence[UnitRecords], ids: I64) -> list[UnitRecords] | None:
    """Return the records of these ids, in this order, in as few pieces as possible; None if one is missing."""
    if not found:
        return None if len(ids) else []
    if len(found) == 1 and np.array_equal(found[0].ids, ids):
        return list(found)
    there = np.concatenate([records.ids for records in found])
    order = np.argsort(there, kind="stable")
    at = np.searchsorted(there[order], ids)
    at[at == len(there)] = 0
    places = order[at]
    if not np.array_equal(there[places], ids):
        return None
    starts = np.cumsum([0, *(len(records) for records in found)])
    which = np.searchsorted(starts, places, side="right") - 1
    cuts = np.flatnonzero(np.diff(which)) + 1
    pieces = zip(np.split(which, cuts), np.split(places, cuts), strict=True)
    return [found[owner[0]].take(place - starts[owner[0]]) for owner, place in pieces if len(place)]


ROWS_MAX = 16_384
BYTES_MAX = 8 << 20
APPEND_TIME = 1  # Kafka's code for LogAppendTime
_PLAIN = f"V{ROW.itemsize}"  # numpy concatenates plain bytes much faster than records
_SMALL = {"key", "fairness_key", "headers"}


class MessageBatches:
    """Collects records until a batch is full."""

    def __init__(self, topic: TopicRef, columns: tuple[Column, ...]) -> None:
        self._topic = topic
        self._schema = arrow_schema(columns)
        self._makers = [COLUMNS[column.name] for column in columns]
        names = {column.name for column in columns}
        self._has_values, self._has_smalls = "value" in names, bool(names & _SMALL)
        self._clear()

    def _clear(self) -> None:
        self._pieces: list[UnitRecords] = []
        self._facts: list[tuple[int, int, int, int]] = []  # per piece: partition, first offset, time, unit
        self._batches: list[str | None] = []
        self._payloads: list[Any] = []
        self._smalls: list[Any] = []
        self.count = self.nbytes = 0

    @property
    def is_full(self) -> bool:
        return self.count >= ROWS_MAX or self.nbytes >= BYTES_MAX

    def add(self, records: UnitRecords, partition: int, offset: int, unit: Unit, batch_id: str | None = None) -> None:
        """Add messages that are at this offset and the following ones."""
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
        """Return a batch of everything that was added since the last one."""
        batch = Batch(self._topic, self._pieces, self._facts, self._batches, self._payloads, self._smalls)
        made = pa.RecordBatch.from_arrays([make(batch) for make in self._makers], schema=self._schema)
        self._clear()
        return made


class Batch:
    """The records of a batch, and the columns that take more than an expression."""

    def __init__(
        self,
        topic: TopicRef,
        pieces: list[UnitRecords],
        facts: list[tuple[int, int, int, int]],
        batches: list[str | None],
        payloads: list[Any],
        smalls: list[Any],
    ) -> None:
        self.topic, self.id_suffix = topic.topic, topic.id_suffix
        self.batches, self.payloads = batches, payloads
        self.counts = np.array([len(piece) for piece in pieces])
        self.rows = np.concatenate([piece.rows.view(_PLAIN) for piece in pieces]).view(ROW)
        self.partitions, self.firsts, self.times, self.units = (np.array(column) for column in zip(*facts, strict=True))
        self.small = np.frombuffer(b"".join(smalls), dtype=np.uint8)
        self.small_lengths: I64 = self.rows["small_len"].astype(np.int64)
        self.small_starts: I64 = np.cumsum(self.small_lengths) - self.small_lengths

    def _each(self, values: Any) -> Any:
        return np.repeat(values, self.counts)

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
        """Headers are stored as maps, so this is the only column that is decoded row by row."""
        there = (self.rows["flags"] & FLAG_HEADERS) != 0
        found: list[list[dict[str, Any]] | None] = [None] * len(there)
        begins = self.small_starts + self.rows["key_len"] + self.rows["fairness_len"]
        ends, data, decode = self.small_starts + self.small_lengths, self.small.tobytes(), _headers_of()
        for row in np.flatnonzero(there).tolist():
            found[row] = decode(data[begins[row] : ends[row]])
        return pa.array(found, type=arrow_types()[PAIRS])

    def _offset(self) -> Any:
        within = np.arange(len(self.rows)) - self._each(np.cumsum(self.counts) - self.counts)
        return numbers(pa.int64(), self._each(self.firsts) + within)

    def _batch_id(self) -> Any:
        if not any(self.batches):
            return pa.nulls(len(self.rows), pa.string())
        return chosen(pa.string(), self.batches, self._each(np.arange(len(self.batches))))


def expiry_of(rows: Any) -> tuple[I64, Any]:
    """Return when messages expire (ms), and whether they do. The time to live counts from the due time."""
    begins = np.where(rows["due"] != 0, rows["due"], rows["enqueued_at"])
    return begins + rows["ttl_ms"], rows["ttl_ms"] != 0


#: How the columns of the view are built from a batch.
COLUMNS: dict[str, Callable[[Any], Any]] = {
    "key": Batch._key,
    "value": lambda b: blobs(pa.binary(), b"".join(b.payloads), b.rows["payload_len"]),
    "topic": lambda b: repeated(pa.string(), b.topic, len(b.rows)),
    "partition": lambda b: numbers(pa.int32(), b._each(b.partitions)),
    "offset": Batch._offset,
    "timestamp": lambda b: moments(b._each(b.times)),
    "timestampType": lambda b: numbers(pa.int32(), np.full(len(b.rows), APPEND_TIME)),
    "headers": Batch._headers,
    "message_id": lambda b: ulids(b.rows["id"], b.id_suffix),
    "id": lambda b: numbers(pa.int64(), b.rows["id"]),
    "priority": lambda b: numbers(pa.int64(), b.rows["priority"]),
    "deliver_at": lambda b: moments(b.rows["due"], b.rows["due"] != 0),
    "enqueued_at": lambda b: moments(b.rows["enqueued_at"]),
    "expires_at": lambda b: moments(*expiry_of(b.rows)),
    "max_retries": lambda b: numbers(pa.int32(), b.rows["max_retries"], b.rows["max_retries"] != DEFAULT_RETRIES),
    "fairness_key": Batch._fairness_key,
    "batch_id": Batch._batch_id,
    "unit": lambda b: numbers(pa.int64(), b._each(b.units)),
}


def _headers_of() -> Callable[[bytes], list[dict[str, Any]]]:
    """Return a decoder of stored headers. Messages often share headers, so each value is decoded once per batch."""
    known: dict[bytes, list[dict[str, Any]]] = {}

    def decode(data: bytes) -> list[dict[str, Any]]:
        found = known.get(data)
        if found is None:
            pairs = msgspec.msgpack.decode(data, type=dict[str, str])
            found = known[data] = [{"key": name, "value": value.encode()} for name, value in pairs.items()]
        return found

    return decode
