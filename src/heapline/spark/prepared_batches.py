"""Write rows as messages of a prepared batch: what a task does, and how the driver commits it.

*A task* prepares its rows as parts that belong to its own attempt. *The driver* commits, in one step, exactly the parts
of the attempts that succeeded according to Spark; the same step drops all other parts. A stream, or a write with
txnAppId, commits as a version of a sink, and the broker remembers the last version of a sink forever. So a batch that
Spark repeats, under any attempts, changes nothing. A task that finds its batch already committed sends no more rows,
and leaves none behind.

Rows that cannot be enqueued fail the batch, or are written to files in `badRecordsPath`. Nothing here knows Spark's
classes; sink.py adapts them.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as parquet

from heapline.client.transports.blocking_calls import BlockingCalls, Started
from heapline.contract.batches import AbortBatch, CommitBatch, PrepareBatch, Prepared, Share
from heapline.contract.errors import BadRequest, BatchDecided, UnknownPart
from heapline.contract.fields import NAME_BYTES_MAX
from heapline.contract.topics import ListTopics
from heapline.spark.enqueue_rows import BadRow, Shares, TopicLimits, validate
from heapline.spark.target import calls_of
from heapline.spark.write_options import WriteOptions

WINDOW = 3  # prepares in flight per task
STAGING = "_staging"
REPORTED_ROWS = 5  # rows that an error message describes


@dataclass(frozen=True)
class Batch:
    """The unit of a commit, and the sink and version that it is committed as, if any."""

    id: str
    sink: str | None = None
    version: int | None = None


def stream_batch(query_id: str | None, batch_id: str | int | None) -> Batch:
    if not query_id or batch_id is None:
        raise BadRequest(
            "Spark does not report which query and batch this is, so it cannot be written exactly once; write it with "
            "foreachBatch and the options txnAppId and txnVersion"
        )
    return Batch(f"spark.{query_id}.{batch_id}", f"query:{query_id}", int(batch_id))


def write_batch(txn: tuple[str, int] | None, topic: str | None = None) -> Batch:
    """Return the batch of a batch write to `topic`; None if each row names its topic."""
    if txn is None:
        return Batch(f"spark.{secrets.token_hex(16)}")
    app, version = txn
    sink = txn_sink(app, topic)
    return Batch(f"spark.txn.{hashlib.sha256(sink.encode()).hexdigest()[:40]}.{version}", sink, version)


def txn_sink(app: str, topic: str | None) -> str:
    """Return the name of the sink for writes under a txnAppId to one topic.

    As with Delta tables, each topic has its own versions, so a foreachBatch can write to several topics under one name.
    A topic cannot be named "*", and its name cannot contain "@" or "#".

    >>> txn_sink("nightly-load", "orders"), txn_sink("nightly-load", None)
    ('txn:nightly-load@orders', 'txn:nightly-load@*')
    """
    name = f"txn:{app}@{topic or '*'}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:40]
    candidates = (name, f"txn:{app}@#{digest}", f"txn:#{digest}")
    return next(candidate for candidate in candidates if len(candidate.encode()) <= NAME_BYTES_MAX)


@dataclass(frozen=True)
class Written:
    """The parts that a task has prepared."""

    batch: Batch
    prefix: str
    parts: int
    rows: int
    bad: BadFile | None = None

    def names(self) -> list[str]:
        return [part_name(self.prefix, number) for number in range(self.parts)]


def part_name(prefix: str, number: int) -> str:
    return f"{prefix}.{number}"


# -- in a task ---------------------------------------------------------------------------------------------------------


def write(options: WriteOptions, batch: Batch, batches: Iterable[Any], partition: int, attempt: int) -> Written:
    """Prepare the rows of a task. On return they are durable, and not yet visible."""
    with contextlib.closing(calls_of(options.target)) as calls:
        task = _WriteTask(options, batch, calls, PartSender(calls, batch, partition, attempt))
        try:
            for rows in batches:
                task.add(rows)
                if task.is_over:
                    break
            return task.finish()
        except BaseException:
            task.cancel()
            raise


class _WriteTask:
    def __init__(self, options: WriteOptions, batch: Batch, calls: BlockingCalls, sender: PartSender) -> None:
        self._options, self._batch, self._sender = options, batch, sender
        self._topics = _TopicCache(calls)
        self._bad: BadFile | None = None
        self._rows = self._seen = 0
        self._decided = False  # the batch was committed before, and Spark repeats it

    @property
    def is_over(self) -> bool:
        """Whether no more rows need to be read.

        Bad rows are collected again even for a committed batch: the driver that committed it may have been killed
        before it published their files.
        """
        return self._decided and self._options.bad_records is None

    def add(self, rows: Any) -> None:
        valid, bad = validate(rows, self._options.topic, self._topics)
        if bad:
            where = self._options.bad_records
            self._bad = add_bad_rows(self._bad, where, self._batch.id, self._sender.prefix, rows, bad, self._seen)
        self._seen += rows.num_rows
        for count, shares in () if self._decided else valid.parts():
            try:
                self._sender.send(shares)
            except BatchDecided:
                self._decided = True
                break
            self._rows += count

    def finish(self) -> Written:
        with contextlib.suppress(BatchDecided):
            self._sender.finish()
        bad = None if self._bad is None else self._bad.closed()
        return Written(self._batch, self._sender.prefix, self._sender.parts, self._rows, bad)

    def cancel(self) -> None:
        self._sender.cancel()
        if self._bad is not None:
            self._bad.discard()


class PartSender:
    """Prepares the parts of one task attempt, a few at a time, so that server and task work in parallel.

    The name of a part is unique to its attempt, and a prepare can be repeated, so a call whose response was lost is
    sent again. The server drops parts that are never committed after its batch_timeout.
    """

    def __init__(self, calls: BlockingCalls, batch: Batch, partition: int, attempt: int) -> None:
        self._calls, self._batch = calls, batch
        self.prefix = f"{partition}.{attempt}.{secrets.token_hex(6)}"
        self._in_flight: deque[Started[Prepared]] = deque()
        self.parts = 0

    def send(self, shares: Shares) -> None:
        """Start sending a part. Raises the error of an earlier part, if one failed."""
        command = PrepareBatch(
            self._batch.id,
            part_name(self.prefix, self.parts),
            [Share(topic, messages) for topic, messages in shares],
            without_results=True,
            sink=self._batch.sink,
            version=self._batch.version,
        )
        self.parts += 1
        while len(self._in_flight) >= WINDOW:
            self._wait()
        self._in_flight.append(self._calls.begin(command))

    def _wait(self) -> None:
        self._in_flight.popleft().result()  # retries until it succeeds or raises the server's error

    def finish(self) -> None:
        """Wait until all parts are durable."""
        while self._in_flight:
            self._wait()

    def cancel(self) -> None:
        for started in self._in_flight:
            started.cancel()
        self._in_flight.clear()


class _TopicCache:
    """The limits of topics, fetched when a topic first occurs."""

    def __init__(self, calls: BlockingCalls) -> None:
        self._calls = calls
        self._known: dict[str, TopicLimits] = {}
        self._requested: set[str] = set()

    def __call__(self, names: Sequence[str]) -> Mapping[str, TopicLimits]:
        if not self._requested.issuperset(names):
            self._requested.update(names)
            infos = self._calls.every(ListTopics())
            self._known |= {info.name: TopicLimits.of(info) for info in infos if info.name in self._requested}
        return self._known


# -- on the driver -----------------------------------------------------------------------------------------------------


def commit(options: WriteOptions, batch: Batch, written: Sequence[Written]) -> int:
    """Commit the batch and return how many messages it has."""
    parts = [name for each in written for name in each.names()]
    with contextlib.closing(calls_of(options.target)) as calls:
        try:
            count: int = calls.do(CommitBatch(batch.id, parts, batch.sink, batch.version)).count
        except UnknownPart as error:
            raise PartsDropped(error.batch_id, error.part) from None
    publish_bad_rows(options.bad_records, batch.id, [each.bad for each in written if each.bad is not None])
    return count


def abort(options: WriteOptions, batch: Batch, written: Sequence[Written]) -> None:
    """Drop the prepared parts. Parts that a task prepares later are dropped by the next commit or the timeout."""
    for each in written:
        if each.bad is not None:
            each.bad.discard()
    # BatchDecided means that it was committed already.
    with contextlib.closing(calls_of(options.target)) as calls, contextlib.suppress(BatchDecided):
        calls.do(AbortBatch(batch.id))


class PartsDropped(UnknownPart):
    """Prepared parts no longer exist at commit."""

    def __init__(self, batch_id: str, part: str) -> None:
        super().__init__(batch_id, part)
        self.args = (
            f"nothing was committed: part {part!r} of batch {batch_id!r} was prepared but no longer exists. Either the "
            "batch was aborted elsewhere, or the commit came later than the server's batch_timeout (default: one day) "
            "after the last part. Write the batch again; if batches take this long, increase batch_timeout",
        )


# -- rows that cannot be enqueued --------------------------------------------------------------------------------------


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
    """The bad rows of one task attempt, each with a reason. Small and picklable once it is closed.

    A task writes them to one Parquet file under `_staging`, which readers ignore. When the batch is committed, its
    files move to `batch=<id>` in one step. If that directory already exists, other attempts have committed the batch
    before, and these files repeat theirs. So `batch=…` contains each rejected row exactly once.
    """

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


def publish_bad_rows(where: str | None, batch_id: str, bad: Sequence[BadFile]) -> None:
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
