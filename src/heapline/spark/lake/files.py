"""The lake's files: how tables are laid out, and how a task writes rows to Parquet files.

There is one table per view, partitioned by namespace, topic and date, with the columns of the view. `topic` is the
view's own column: it is the same in all rows of a file, so it is stored in the table's log and in the file's path, not
in the file. `namespace` and `date` are added; `date` is the UTC day of enqueue for messages and of the event's
timestamp for events. All columns are nullable, so that columns can be added or erased later.

A file has a unique name, so a task that runs twice does no harm: files that no commit names are not part of the lake
and are removed by maintenance. A file is durable before it is reported, because the journal may delete the rows as soon
as they are committed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heapline.contract.errors import BadRequest
from heapline.spark.schema import VIEWS, Column, arrow_types

PARTITIONED_BY = ("namespace", "topic", "date")
#: The column whose UTC day is a row's `date`.
DAY_OF = {"messages": "enqueued_at", "events": "timestamp"}
DAY_US = 86_400_000_000
EPOCH_DAY = date(1970, 1, 1)
#: Columns whose minimum and maximum per file are in the table's log. Readers use them to skip files.
STATISTICS_OF = ("partition", "offset", "timestamp", "enqueued_at", "priority", "id", "unit")


def check_views(views: tuple[str, ...]) -> None:
    if not views or len(set(views)) < len(views) or any(view not in DAY_OF for view in views):
        raise BadRequest(f"views must be distinct and among {', '.join(DAY_OF)}, not {', '.join(views) or 'empty'}")


def stored_columns(view: str) -> tuple[Column, ...]:
    """Return the columns that are stored in files, in their order."""
    return tuple(column for column in VIEWS[view] if column.name not in PARTITIONED_BY)


def table_columns(view: str) -> tuple[tuple[str, str], ...]:
    """Return (name, Spark type) of all columns: the view's, then those that the lake adds."""
    own = [(column.name, column.type) for column in VIEWS[view]]
    return (*own, ("namespace", "string"), ("date", "date"))


def file_schema(view: str) -> Any:
    types = arrow_types()
    return pa.schema([pa.field(column.name, types[column.type]) for column in stored_columns(view)])


def table_schema(view: str) -> Any:
    types = {**arrow_types(), "date": pa.date32()}
    return pa.schema([pa.field(name, types[kind]) for name, kind in table_columns(view)])


def namespace_of(topic: str) -> str:
    """Return a topic's namespace.

    >>> namespace_of("orders"), namespace_of("billing/orders")
    ('default', 'billing')
    """
    namespace, has_one, _ = topic.rpartition("/")
    return namespace if has_one else "default"


def folder_of(topic: str, day: date) -> str:
    """Return the folder within a table, in Hive's style.

    >>> folder_of("billing/orders", date(2026, 1, 31))
    'namespace=billing/topic=billing%2Forders/date=2026-01-31'
    """
    return f"namespace={namespace_of(topic)}/topic={quote(topic, safe='')}/date={day.isoformat()}"


def day_of(number: int) -> date:
    """Return the date of a day number since 1970.

    >>> day_of(20_000)
    datetime.date(2024, 10, 4)
    """
    return EPOCH_DAY + timedelta(days=number)


def lake_path(lake_dir: str | Path) -> str:
    """Return the absolute path of the lake's directory. A URL must be a file URL."""
    text = str(lake_dir)
    if "://" in text:
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc:
            raise BadRequest(
                f"{text!r} is not a lake; use a directory that driver and executors share, or file:///its/path"
            )
        text = unquote(parts.path)
    if not text:
        raise BadRequest("no lake given; set the path of its directory")
    return str(Path(text).absolute())


GROUP_BYTES, GROUP_ROWS = 64 << 20, 1 << 20  # of a row group, which is buffered in memory
FILE_BYTES = 512 << 20  # before compression; larger files do not help readers, which read row groups
#: Columns whose values repeat. For others a dictionary would be built and discarded.
_REPEATING = (
    "partition", "timestampType", "priority", "fairness_key", "batch_id", "max_retries", "kind", "holder", "reason",
    "group", "attempts", "key",
)  # fmt: skip


class NewFile(NamedTuple):
    """A file that is to be committed."""

    view: str
    topic: str
    date: str
    path: str  # within the table
    nbytes: int
    rows: int
    stats: str


def write_parts(root: str, view: str, topic: str, batches: Iterable[Any]) -> list[NewFile]:
    """Write all rows of these batches, one file per day or more, and return the files."""
    parts: dict[int, _OpenFile] = {}
    written: list[NewFile] = []
    try:
        for batch in batches:
            for day, rows in _by_day(view, batch):
                part = parts.get(day)
                if part is None:
                    part = parts[day] = _OpenFile(root, view, topic, day)
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
    """Return (day, rows) pairs. There is nearly always one."""
    if not batch.num_rows:
        return []
    times = batch.column(DAY_OF[view]).cast(pa.int64()).to_numpy(zero_copy_only=False)
    days = times // DAY_US
    first, last = int(days.min()), int(days.max())
    if first == last:
        return [(first, batch)]
    return [(int(day), batch.filter(pa.array(days == day))) for day in np.unique(days)]


class _OpenFile:
    """A file that is being written."""

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
        self._statistics = _Statistics()

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
        self._statistics.add(table)
        self._writer.write_table(table, row_group_size=len(table))
        self._rows += len(table)
        self._waiting, self._waiting_bytes, self._waiting_rows = [], 0, 0

    def finish(self) -> NewFile:
        self._write()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        nbytes = self._file.tell()
        self._file.close()
        sync_folders(self._root, self._folder)
        date, stats = day_of(self._day).isoformat(), self._statistics.as_json(self._rows)
        return NewFile(self._view, self._topic, date, self._path, nbytes, self._rows, stats)

    def abandon(self) -> None:
        try:
            self._writer.close()  # otherwise the garbage collector would, on a closed file
            self._file.close()
        finally:
            os.unlink(self._file.name)


class _Statistics:
    """Minimum, maximum and null count per column, as the table's log has them."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, Any, int]] = {}

    def add(self, table: Any) -> None:
        for name in STATISTICS_OF:
            if name not in table.column_names:
                continue
            column = table.column(name)
            limits = pc.min_max(column).as_py()
            before = self._found.get(name, (None, None, 0))
            lows = [v for v in (before[0], limits["min"]) if v is not None]
            highs = [v for v in (before[1], limits["max"]) if v is not None]
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
    """Return a value as it is written to JSON. Times have whole milliseconds, so nothing is truncated.

    >>> _plain(datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC))
    '2026-01-31T12:00:00.250Z'
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


def sync_folders(root: str, folder: str) -> None:
    """Sync the directory of a file and its parents, without which the new file is not durable."""
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
