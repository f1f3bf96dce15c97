"""Rows into Parquet files of the lake: what a task does with the batches that it read.

A file holds rows of one topic and day, under a name that nobody else has, so a task that is run twice disturbs nobody:
files that are in no commit are not part of the lake, and go when it is maintained. What is told of a file was durable
when it is told, because the journal may forget the rows as soon as they are committed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heapline.spark.lake.layout import DAY_OF, DAY_US, MEASURED, day_of, file_schema, folder_of

GROUP_BYTES, GROUP_ROWS = 64 << 20, 1 << 20  # of a row group: what is kept in memory until it is written
FILE_BYTES = 512 << 20  # before compression; a larger file is no use to readers, who take row groups
#: Columns whose values repeat. In others a dictionary would be built, and thrown away.
_REPEATING = (
    "partition", "timestampType", "priority", "fairness_key", "batch_id", "max_retries", "kind", "holder", "reason",
    "group", "attempts", "key",
)  # fmt: skip


class Written(NamedTuple):
    """A file that is to be committed."""

    view: str
    topic: str
    date: str
    path: str  # within the table
    nbytes: int
    rows: int
    stats: str


def write_parts(root: str, view: str, topic: str, batches: Iterable[Any]) -> list[Written]:
    """All rows of these batches, by day."""
    parts: dict[int, _Part] = {}
    written: list[Written] = []
    try:
        for batch in batches:
            for day, rows in _by_day(view, batch):
                part = parts.get(day)
                if part is None:
                    part = parts[day] = _Part(root, view, topic, day)
                part.add(rows)
                if part.nbytes >= FILE_BYTES:
                    written.append(parts.pop(day).finish())
        written += [part.finish() for part in parts.values()]
        parts = {}
        return written
    finally:
        for part in parts.values():
            part.abandon()


def _by_day(view: str, batch: Any) -> list[tuple[int, Any]]:
    """(day, its rows): nearly always one."""
    if not batch.num_rows:
        return []
    times = batch.column(DAY_OF[view]).cast(pa.int64()).to_numpy(zero_copy_only=False)
    days = times // DAY_US
    first, last = int(days.min()), int(days.max())
    if first == last:
        return [(first, batch)]
    return [(int(day), batch.filter(pa.array(days == day))) for day in np.unique(days)]


class _Part:
    """One file while it is written."""

    def __init__(self, root: str, view: str, topic: str, day: int) -> None:
        self._root, self._view, self._topic, self._day = root, view, topic, day
        self._folder = folder_of(topic, day_of(day))
        self._path = f"{self._folder}/part-{uuid.uuid4().hex}.zstd.parquet"
        self._schema = file_schema(view)
        os.makedirs(f"{root}/{self._folder}", exist_ok=True)
        self._file = open(f"{root}/{self._path}", "xb")  # noqa: SIM115  # closed by finish or abandon
        repeating = [name for name in _REPEATING if name in self._schema.names]
        self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd", use_dictionary=repeating)
        self._waiting: list[Any] = []
        self._waiting_bytes = self._waiting_rows = 0
        self.nbytes = self._rows = 0
        self._measures = _Measures()

    def add(self, batch: Any) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self._waiting_rows += batch.num_rows
        self.nbytes += batch.nbytes
        if self._waiting_bytes >= GROUP_BYTES or self._waiting_rows >= GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting).cast(self._schema)
        self._measures.add(table)
        self._writer.write_table(table, row_group_size=len(table))
        self._rows += len(table)
        self._waiting, self._waiting_bytes, self._waiting_rows = [], 0, 0

    def finish(self) -> Written:
        self._write()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        nbytes = self._file.tell()
        self._file.close()
        sync_folders(self._root, self._folder)
        date = day_of(self._day).isoformat()
        return Written(
            self._view, self._topic, date, self._path, nbytes, self._rows, self._measures.as_json(self._rows)
        )  # fmt: skip

    def abandon(self) -> None:
        try:
            self._writer.close()  # else it would try when it is collected, on a file that is closed
            self._file.close()
        finally:
            os.unlink(self._file.name)


class _Measures:
    """Least and greatest values, and how many nulls, as the table's log has them."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, Any, int]] = {}

    def add(self, table: Any) -> None:
        for name in MEASURED:
            if name not in table.column_names:
                continue
            column = table.column(name)
            told = pc.min_max(column).as_py()
            before = self._found.get(name, (None, None, 0))
            lows = [v for v in (before[0], told["min"]) if v is not None]
            highs = [v for v in (before[1], told["max"]) if v is not None]
            self._found[name] = (min(lows, default=None), max(highs, default=None), before[2] + column.null_count)

    def as_json(self, rows: int) -> str:
        found = self._found.items()
        return json.dumps(
            {
                "numRecords": rows,
                "minValues": {name: _plain(low) for name, (low, _, _) in found if low is not None},
                "maxValues": {name: _plain(high) for name, (_, high, _) in found if high is not None},
                "nullCount": {name: nulls for name, (_, _, nulls) in found},
            }
        )


def _plain(value: Any) -> Any:
    """Times are whole milliseconds in the log, so nothing is cut off here that a reader would go by.

    >>> _plain(datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC))
    '2026-01-31T12:00:00.250Z'
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


def sync_folders(root: str, folder: str) -> None:
    """That a file is there is durable when its folder is, and that is when its own is."""
    path = root
    sync_path(path)
    for name in folder.split("/"):
        path = f"{path}/{name}"
        sync_path(path)


def sync_path(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
