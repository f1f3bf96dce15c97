"""Events as the audit needs them: those of messages as columns of numbers (*steps*), the few others as *marks*.

Kinds of events that do the same to a message share a number. Events that do not change a message's state (an extended
lease, a moved record, everything about groups) are not steps.

Marks are purges, throttling, settings and prepared batches. There are few, however many events there are. They are
collected before messages are judged, and every task knows them. Each table of events yields one row per mark, and one
row for everything else of a partition, whose `kind` is null. Counts add up, so a table of events may be cut anywhere.

Moving rows would be the largest cost of an audit: Spark takes each row apart and rebuilds it at every border to Python
and again in a shuffle. So the task that reads the events converts them to steps immediately and puts the steps of some
messages (a *bucket*, by a hash of the id) into one binary value, and Spark moves few, large rows. Each value names the
topics that its numbers refer to, because the reading task does not know all topics. A value has at most BLOB_ROWS
steps: Spark puts up to 10 000 rows into one Arrow batch, which holds at most 2 GiB of values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heapline.core.ids import partition_of
from heapline.spark.audit.ranks import NEVER

I64 = npt.NDArray[np.int64]

#: Steps. Those from OPEN_WAITING on are not events but the state before the first event.
(NEW, FIRED, LEASED, ACKED, RETURNED, RELEASED, DEAD, DROPPED, REPLAYED, DELETED, CANCELLED, EXPIRED, RESCHEDULED,
 OPEN_WAITING, OPEN_DELAYED, OPEN_LEASED, OPEN_DEAD) = range(17)  # fmt: skip
#: Kinds of events -> steps. `dead_lettered` without `kept` is DROPPED; `expired` only counts if `returned`.
STEP_OF_KIND = {
    "enqueued": NEW, "batch_committed": NEW, "fired": FIRED, "leased": LEASED, "acked": ACKED, "nacked": RETURNED,
    "lease_expired": RETURNED, "released": RELEASED, "dead_lettered": DEAD, "replayed": REPLAYED,
    "dead_deleted": DELETED, "cancelled": CANCELLED, "expired": EXPIRED, "rescheduled": RESCHEDULED,
}  # fmt: skip
OPENINGS = {"waiting": OPEN_WAITING, "delayed": OPEN_DELAYED, "leased": OPEN_LEASED, "dead": OPEN_DEAD}
NO_SEQ = -1
NO_DUE = -(1 << 62)
NO_KEY = -(1 << 63)  # a message that really has this priority is merely not ranked
#: Columns of the view that the audit reads.
NEEDS = (
    "topic", "partition", "offset", "timestamp", "wall_time", "unit", "kind", "id", "at", "priority", "due", "seq",
    "heap_key", "returned", "kept", "count", "batch_id", "details", "enqueued_at", "due_wall",
)  # fmt: skip


class Steps(NamedTuple):
    """Columns of equal length; times are in ms.

    `key` is the priority for NEW, the heap key for RESCHEDULED, else NO_KEY.
    """

    topic: I64  # index of the topic
    id: I64
    offset: I64
    unit: I64
    step: I64
    at: I64
    due: I64  # NO_DUE: immediately
    wall: I64  # 1: due is by the machine's clock
    seq: I64
    key: I64
    since: I64  # for NEW: when aging starts

    @property
    def partition(self) -> I64:
        return partition_of(self.id)

    def take(self, which: Any) -> Steps:
        return Steps(*(column[which] for column in self))


def joined(parts: list[Steps]) -> Steps:
    return Steps(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def from_arrow(table: Any, topics: dict[str, int]) -> Steps:
    """Return the steps of a table that has the columns NEEDS."""
    step = _coded(table["kind"], STEP_OF_KIND, -1)
    kept = pc.fill_null(table["kept"], True).to_numpy(zero_copy_only=False)
    returned = pc.fill_null(table["returned"], True).to_numpy(zero_copy_only=False)
    step[(step == DEAD) & ~kept] = DROPPED
    good = (step >= 0) & returned & pc.is_valid(table["id"]).to_numpy(zero_copy_only=False)

    def column(name: str, null: int) -> I64:
        values = table[name]
        if pa.types.is_timestamp(values.type):
            values = pc.divide(values.cast(pa.int64()), 1000)
        elif pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        found: I64 = pc.fill_null(values.cast(pa.int64()), null).to_numpy(zero_copy_only=False)
        return found

    key = np.where(step == RESCHEDULED, column("heap_key", NO_KEY), column("priority", NO_KEY))
    key = np.where((step == RESCHEDULED) | (step == NEW), key, NO_KEY)
    steps = Steps(
        topic=_coded(table["topic"], topics),
        id=column("id", 0),
        offset=column("offset", 0),
        unit=column("unit", 0),
        step=step,
        at=column("at", 0),
        due=column("due", NO_DUE),
        wall=column("due_wall", 0),
        seq=column("seq", NO_SEQ),
        key=key,
        since=column("enqueued_at", 0),
    )
    return steps.take(good)


def _coded(column: Any, numbers: Mapping[Any, int], default: int | None = None) -> I64:
    """Return a number for each text."""
    words = column.combine_chunks().dictionary_encode(null_encoding="encode")
    known = [numbers[word] if default is None else numbers.get(word, default) for word in words.dictionary.to_pylist()]
    found: I64 = np.array(known, dtype=np.int64)[words.indices.to_numpy(zero_copy_only=False)]
    return found


# -- marks -------------------------------------------------------------------------------------------------------------


#: Kinds of events that concern a topic and not one of its messages.
MARK_KINDS = ("purged", "throttled", "config_changed", "batch_prepared", "batch_committed", "batch_aborted")


class Mark(NamedTuple):
    """An event that concerns a topic and not one of its messages. The rows of a commit are one event."""

    topic: str
    partition: int
    kind: str
    batch_id: str | None
    details: str | None
    unit: int
    offset: int  # of its first row
    rows: int
    named: int  # rows that name a message
    messages: int  # messages that it counts without naming them

    def fields(self) -> dict[str, Any]:
        """Return the event's details."""
        found: dict[str, Any] = msgspec.json.decode(self.details or "{}")
        return found


class Reach(NamedTuple):
    """The rows of one partition."""

    topic: str
    partition: int
    rows: int
    first: int  # offset
    last: int
    last_unit: int
    first_lease: int  # unit; NEVER: there is none
    wall_ahead: int  # ms that the machine's clock was ahead of the journal's


_MARK_KEYS = ("topic", "partition", "kind", "batch_id", "details", "unit", "own")
_MARK_SUMS = {
    "rows": "sum", "first": "min", "last": "max", "named": "sum", "count": "max", "last_unit": "max",
    "first_lease": "min", "ahead": "max",
}  # fmt: skip


def collect_marks(events: Any) -> Any:
    """Return a table with `_MARK_KEYS` and `_MARK_SUMS`, from a table with the columns of the view."""
    kind, offset, unit = events["kind"], events["offset"], events["unit"]
    is_mark = pc.is_in(kind, pa.array(MARK_KINDS))
    none = pa.scalar(None, pa.int64())
    facts = {
        "rows": pa.repeat(1, events.num_rows),
        "first": offset,
        "last": offset,
        "named": pc.cast(pc.is_valid(events["id"]), pa.int64()),
        "count": pc.cast(events["count"], pa.int64()),
        "last_unit": unit,
        "first_lease": pc.if_else(pc.equal(kind, "leased"), unit, none),
        "ahead": pc.subtract(_millis(events["wall_time"]), _millis(events["timestamp"])),
    }
    keys = {name: events[name] for name in _MARK_KEYS[:-1]}
    table = pa.table({**keys, "own": offset, **facts})
    marks, others = table.filter(is_mark), table.filter(pc.invert(is_mark))
    committed = pc.equal(marks["kind"], "batch_committed")
    marks = _with(marks, own=pc.if_else(committed, none, marks["own"]))
    # Grouping by columns that are all null is expensive, so these columns are added afterwards.
    others = _summed(others, _MARK_KEYS[:2])
    nulls = {name: pa.nulls(others.num_rows, table.schema.field(name).type) for name in _MARK_KEYS[2:]}
    return pa.concat_tables([_summed(marks, _MARK_KEYS), _with(others, **nulls).select([*_MARK_KEYS, *_MARK_SUMS])])


def _millis(moments: Any) -> Any:
    """Return ms. Times are not before 1970, so truncation equals floor."""
    return pc.divide(pc.cast(moments, pa.int64()), 1000)


def _with(table: Any, **columns: Any) -> Any:
    there = {name: table[name] for name in table.column_names}
    return pa.table({**there, **columns})


def _summed(table: Any, keys: Sequence[str]) -> Any:
    found = table.group_by(list(keys)).aggregate([*_MARK_SUMS.items()])
    made = [f"{name}_{how}" for name, how in _MARK_SUMS.items()]
    return found.select([*keys, *made]).rename_columns([*keys, *_MARK_SUMS])


def merge_marks(tables: Sequence[Any]) -> tuple[list[Mark], list[Reach]]:
    """Merge tables of `collect_marks`."""
    if not tables:
        return [], []
    table = pa.concat_tables(tables)
    marks = [
        Mark._make([*(row[name] for name in (*_MARK_KEYS[:-1], "first", "rows", "named")), row["count"] or 0])
        for row in _summed(table, _MARK_KEYS).to_pylist()
        if row["kind"] is not None
    ]
    reaches = []
    for row in _summed(table, _MARK_KEYS[:2]).to_pylist():
        known = (row[name] for name in ("topic", "partition", "rows", "first", "last", "last_unit"))
        first_lease = NEVER if row["first_lease"] is None else row["first_lease"]
        reaches.append(Reach._make([*known, first_lease, row["ahead"]]))
    return marks, reaches


# -- transport ---------------------------------------------------------------------------------------------------------


WINDOW = 1 << 18  # rows that are packed together, about 60 MB
BUCKETS = 256  # the maximum number of tasks that share the messages
BLOB_ROWS = 2048
MARK_ROWS, STEP_ROWS = range(2)  # kinds of packed rows
PACKED_DDL = "what int, bucket int, blob binary"
_PACKED = pa.schema([("what", pa.int32()), ("bucket", pa.int32()), ("blob", pa.binary())])
_NARROW = {"topic": pa.int32(), "step": pa.int8(), "wall": pa.int8(), "judged": pa.int8()}
# Values are small, so threads would cost more than they save.
_WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READING = pa.ipc.IpcReadOptions(use_threads=False)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # spreads the ids of a partition, which are consecutive


def pack(batches: Iterable[Any]) -> Iterator[Any]:
    """Pack Arrow batches of the view, which have at least the columns NEEDS. Runs in a task."""
    kept: list[Any] = []
    count = 0
    for batch in batches:
        kept.append(batch)
        count += batch.num_rows
        if count >= WINDOW:
            yield _packed(kept)
            kept, count = [], 0
    if count:
        yield _packed(kept)


def _packed(batches: list[Any]) -> Any:
    table = pa.Table.from_batches(batches).combine_chunks()
    names = table["topic"].unique().to_pylist()
    steps = from_arrow(table, {name: number for number, name in enumerate(names)})
    return _rows([(MARK_ROWS, 0, to_blob(collect_marks(table))), *_buckets(steps, names)])


def pack_steps(names: Sequence[str], batches: Iterable[Any]) -> Iterator[Any]:
    """Pack batches of steps whose topics are numbered as in `names`. Runs in a task."""
    for batch in batches:
        steps = Steps(*(batch[name].to_numpy() for name in Steps._fields))
        yield _rows(list(_buckets(steps, names)))


def _buckets(steps: Steps, names: Sequence[str]) -> Iterator[tuple[int, int, bytes]]:
    bucket = ((steps.id.astype(np.uint64) * _SPREAD) >> np.uint64(56)).astype(np.uint8)
    order = np.argsort(bucket, kind="stable")
    steps, edges = steps.take(order), np.searchsorted(bucket[order], np.arange(BUCKETS + 1))
    about = {"topics": json.dumps(list(names))}
    table = _table(steps, about)
    for number, (start, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        for first in range(start, end, BLOB_ROWS):
            yield STEP_ROWS, number, to_blob(table.slice(first, min(BLOB_ROWS, end - first)))


def _rows(rows: Sequence[tuple[int, int, bytes]]) -> Any:
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _PACKED, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_PACKED)


def unpack_steps(batches: Iterable[Any], numbers: Mapping[str, int]) -> Steps:
    """Return the received steps, with the topic numbers of `numbers`. Runs in a task."""
    by_names: dict[bytes, list[Any]] = {}
    for blob in (from_blob(value.as_buffer()) for batch in batches for value in batch["blob"]):
        by_names.setdefault(blob.schema.metadata[b"topics"], []).append(blob)
    found = [Steps(*(np.zeros(0, dtype=np.int64) for _ in Steps._fields))]
    for names, blobs in by_names.items():
        steps = Steps(*_columns(blobs, Steps._fields))
        now = np.array([numbers[name] for name in json.loads(names)], dtype=np.int64)
        found.append(steps._replace(topic=now[steps.topic]))
    return joined(found)


def pack_columns(columns: Any) -> Iterator[bytes]:
    """Yield a named tuple of columns as binary values."""
    table = _table(columns, None)
    for first in range(0, table.num_rows, BLOB_ROWS):
        yield to_blob(table.slice(first, BLOB_ROWS))


def unpack_columns(blobs: Iterable[Any], names: Sequence[str]) -> list[I64]:
    return _columns([from_blob(blob) for blob in blobs], names)


def _table(columns: Any, about: dict[str, str] | None) -> Any:
    fields = [(name, _NARROW.get(name, pa.int64())) for name in columns._fields]
    arrays = [
        pa.array(values.astype(kind.to_pandas_dtype())) for values, (_, kind) in zip(columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, about))


def _columns(tables: Sequence[Any], names: Sequence[str]) -> list[I64]:
    if not tables:
        return [np.zeros(0, dtype=np.int64) for _ in names]
    whole = pa.concat_tables(tables)
    return [whole[name].to_numpy().astype(np.int64, copy=False) for name in names]


def to_blob(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_WRITING) as writer:
        writer.write_table(table)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def from_blob(blob: Any) -> Any:
    with pa.ipc.open_stream(blob, options=_READING) as reader:
        return reader.read_all()
