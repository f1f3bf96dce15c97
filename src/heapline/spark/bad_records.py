"""Rows that cannot be enqueued: they fail the batch, or are written to files in `badRecordsPath`.

A task writes its bad rows, each with a reason, to one Parquet file under `_staging`, which readers ignore. When the
batch is committed, its files move to `batch=<id>` in one step. If that directory already exists, other attempts have
committed the batch before, and these files repeat theirs. So `batch=…` contains each rejected row exactly once.
"""

from __future__ import annotations

import contextlib
import posixpath
import secrets
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as parquet

from heapline.contract.errors import BadRequest
from heapline.spark.enqueue_rows import BadRow

STAGING = "_staging"
REPORTED_ROWS = 5  # rows that an error message describes


class BadRows(BadRequest):
    """Rows cannot be enqueued, and `badRecordsPath` is not set."""

    def __init__(self, bad: Sequence[BadRow], first: int) -> None:
        facts = [f"row {first + row.row}{_for_topic(row)}: {row.reason}" for row in bad[:REPORTED_ROWS]]
        more = f" and {len(bad) - REPORTED_ROWS} more" if len(bad) > REPORTED_ROWS else ""
        super().__init__(
            f"{len(bad)} row(s) of this task cannot be enqueued, so nothing of the batch is: {'; '.join(facts)}{more}. "
            "Fix the rows, or set badRecordsPath to write them to files instead"
        )


def _for_topic(row: BadRow) -> str:
    return "" if row.topic is None else f" for topic {row.topic!r}"


def add_bad_rows(
    file: BadFile | None, where: str | None, batch_id: str, name: str, batch: Any, bad: Sequence[BadRow], first: int
) -> BadFile:
    """Write bad rows of an Arrow batch to the task's file. `first` is the number of the Arrow batch's first row."""
    if where is None:
        raise BadRows(bad, first)
    file = file or BadFile(where, batch_id, name)
    file.add(batch, bad, first)
    return file


class BadFile:
    """The bad rows of one task attempt. Small and picklable once it is closed."""

    def __init__(self, where: str, batch_id: str, name: str) -> None:
        self.where = where
        self.path = posixpath.join(STAGING, batch_id, f"{name}.parquet")
        self._writer: Any = None
        self.rows = 0

    def add(self, batch: Any, bad: Sequence[BadRow], first: int) -> None:
        table = pa.Table.from_batches([batch]).take(pa.array([row.row for row in bad]))
        table = table.append_column("_reason", pa.array([row.reason for row in bad], type=pa.string()))
        table = table.append_column("_row", pa.array([first + row.row for row in bad], type=pa.int64()))
        if self._writer is None:
            files, root = _file_system(self.where)
            path = posixpath.join(root, self.path)
            files.create_dir(posixpath.dirname(path), recursive=True)
            self._writer = parquet.ParquetWriter(path, table.schema, filesystem=files)
        self._writer.write_table(table)
        self.rows += table.num_rows

    def closed(self) -> BadFile:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        return self

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.closed()
            files, root = _file_system(self.where)
            files.delete_file(posixpath.join(root, self.path))


def publish(where: str | None, batch_id: str, bad: Sequence[BadFile]) -> None:
    """Move the files of a committed batch to their final directory, or delete them if it exists already."""
    if where is None:
        return
    files, root = _file_system(where)
    staged, final = posixpath.join(root, STAGING, batch_id), posixpath.join(root, f"batch={batch_id}")
    if bad and files.get_file_info(final).type == fs.FileType.NotFound:
        # Collect the files of the successful attempts first, so that one move makes all of them visible.
        complete = posixpath.join(root, STAGING, f"{batch_id}.{secrets.token_hex(4)}")
        files.create_dir(complete, recursive=True)
        for each in bad:
            files.move(posixpath.join(root, each.path), posixpath.join(complete, posixpath.basename(each.path)))
        files.move(complete, final)
    if files.get_file_info(staged).type != fs.FileType.NotFound:
        files.delete_dir(staged)


def _file_system(where: str) -> tuple[Any, str]:
    """Return a file system and a path in it. A path without a scheme is on this machine."""
    if "://" not in where and not where.startswith("file:"):
        return fs.LocalFileSystem(), where
    try:
        return fs.FileSystem.from_uri(where)  # type: ignore[no-any-return]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRequest(f"cannot use badRecordsPath={where!r}: {error}") from None
