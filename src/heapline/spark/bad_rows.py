"""Rows that cannot be enqueued: they fail the batch, or go to files in `badRecordsPath`.

A task writes its bad rows, with the reason of each, to one Parquet file under `_staging`, which readers do not look at.
When the batch is committed its files get their place in `batch=<id>`, all at once, unless that is there already: then
the batch was committed before, by other attempts whose files these repeat. So what is under `batch=…` is what was left
out of what is in the queue, once.
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

from heapline.errors import BadRequest
from heapline.spark.outgoing import BadRow

STAGING = "_staging"
TOLD = 5  # bad rows that an error tells of


class BadRows(BadRequest):
    """Rows that cannot be enqueued, and nobody said where else they may go."""

    def __init__(self, bad: Sequence[BadRow], first: int) -> None:
        facts = [f"row {first + row.row}{_of(row)}: {row.reason}" for row in bad[:TOLD]]
        more = f" and {len(bad) - TOLD} more" if len(bad) > TOLD else ""
        super().__init__(
            f"{len(bad)} row(s) of this task cannot be enqueued, so nothing of the batch is: {'; '.join(facts)}{more}. "
            "Put them right, or set badRecordsPath to put them aside"
        )


def _of(row: BadRow) -> str:
    return "" if row.topic is None else f" for topic {row.topic!r}"


def refuse(
    file: BadFile | None, where: str | None, batch_id: str, name: str, batch: Any, bad: Sequence[BadRow], first: int
) -> BadFile:
    """Put bad rows of a batch aside, in the file of this task; `first` is the number of the batch's first row."""
    if where is None:
        raise BadRows(bad, first)
    file = file or BadFile(where, batch_id, name)
    file.add(batch, bad, first)
    return file


class BadFile:
    """The bad rows of one attempt of one task. Small and picklable once it is closed."""

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
            files, root = _place(self.where)
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
            files, root = _place(self.where)
            files.delete_file(posixpath.join(root, self.path))


def settle(where: str | None, batch_id: str, bad: Sequence[BadFile]) -> None:
    """The batch is committed: its files get their place, or go."""
    if where is None:
        return
    files, root = _place(where)
    staged, final = posixpath.join(root, STAGING, batch_id), posixpath.join(root, f"batch={batch_id}")
    if bad and files.get_file_info(final).type == fs.FileType.NotFound:
        # Only those of the winners; and at once, so that nobody sees half of them.
        whole = posixpath.join(root, STAGING, f"{batch_id}.{secrets.token_hex(4)}")
        files.create_dir(whole, recursive=True)
        for each in bad:
            files.move(posixpath.join(root, each.path), posixpath.join(whole, posixpath.basename(each.path)))
        files.move(whole, final)
    if files.get_file_info(staged).type != fs.FileType.NotFound:
        files.delete_dir(staged)


def _place(where: str) -> tuple[Any, str]:
    """A file system and a path in it; a path without a scheme is this machine's."""
    if "://" not in where and not where.startswith("file:"):
        return fs.LocalFileSystem(), where
    try:
        return fs.FileSystem.from_uri(where)  # type: ignore[no-any-return]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRequest(f"badRecordsPath={where!r} cannot be used: {error}") from None
