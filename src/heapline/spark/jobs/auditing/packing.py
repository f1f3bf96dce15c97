"""Events as they travel through Spark: many steps of messages in one value, cut by message.

Moving rows is what an audit would cost most: Spark takes each apart and puts it together at every border between it and
Python, and once more in a shuffle. So whoever reads the events makes steps of them at once (steps.py), puts those of
some messages (a *bucket*, by a hash of the id) into one binary value, and Spark moves few and large rows. A value says
itself which topics its numbers mean, as whoever reads does not know all of them.

Values stay under BLOB_ROWS steps: Spark puts up to 10 000 rows into one Arrow batch, which holds 2 GiB of values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from heapline.spark.jobs.auditing.gathering import gather
from heapline.spark.jobs.auditing.steps import I64, Steps, from_arrow, joined

WINDOW = 1 << 18  # rows that are packed together: some 60 MB
BUCKETS = 256  # so that this many tasks can share the messages
BLOB_ROWS = 2048
MARKS, STEPS = range(2)  # what a row has
PACKED_DDL = "what int, bucket int, blob binary"
_PACKED = pa.schema([("what", pa.int32()), ("bucket", pa.int32()), ("blob", pa.binary())])
_NARROW = {"topic": pa.int32(), "step": pa.int8(), "wall": pa.int8(), "judged": pa.int8()}
# Values are small: sharing the work on one out would cost more than the work.
_WRITING = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READING = pa.ipc.IpcReadOptions(use_threads=False)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # ids of a partition count up; their product with this does not


def pack(batches: Iterable[Any]) -> Iterator[Any]:
    """In a task: of Arrow batches of the view, with the columns `steps.NEEDS` at least."""
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
    return _rows([(MARKS, 0, to_blob(gather(table))), *_buckets(steps, names)])


def pack_steps(names: Sequence[str], batches: Iterable[Any]) -> Iterator[Any]:
    """In a task: of batches of steps, whose topics have the numbers of these names."""
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
            yield STEPS, number, to_blob(table.slice(first, min(BLOB_ROWS, end - first)))


def _rows(rows: Sequence[tuple[int, int, bytes]]) -> Any:
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _PACKED, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_PACKED)


def unpack_steps(batches: Iterable[Any], numbers: Mapping[str, int]) -> Steps:
    """In a task: what came here, with the numbers that topics have now."""
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
    """A named tuple of columns, as values."""
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
