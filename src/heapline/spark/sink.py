"""The writers of the format `heapline` for Spark: batch and stream, for enqueues and for operations on messages.

prepared_batches.py and operations.py decide what is written. Spark creates these objects in its own processes: `write`
runs in tasks, `commit` and `abort` beside the driver, possibly on new objects. So everything that `commit` and `abort`
need travels in the tasks' messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from heapline.spark.operations import Changed, change, log_total
from heapline.spark.prepared_batches import Batch, Written, abort, commit, stream_batch, write, write_batch
from heapline.spark.write_options import ENQUEUE, WriteOptions

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # local properties of Spark's tasks
Messages = Sequence[WriterCommitMessage | None]
T = TypeVar("T", Written, Changed)


@dataclass
class TaskResult(WriterCommitMessage):
    """The result of a task: what it prepared, or how many messages it changed."""

    result: Written | Changed


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._batch = write_batch(options.txn, options.topic)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _write(self._options, self._batch, iterator)

    def commit(self, messages: Messages) -> None:
        commit(self._options, self._batch, _results(messages, Written))

    def abort(self, messages: Messages) -> None:
        abort(self._options, self._batch, _results(messages, Written))


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        context = _context()
        batch = stream_batch(context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID))
        return _write(self._options, batch, iterator)

    def commit(self, messages: Messages, batchId: int) -> None:
        written = _results(messages, Written)
        if written:  # a batch without tasks writes nothing, and its query is unknown here
            commit(self._options, written[0].batch, written)

    def abort(self, messages: Messages, batchId: int) -> None:
        written = _results(messages, Written)
        if written:
            abort(self._options, written[0].batch, written)


class _Changer:
    """Runs `operation=reschedule` and `operation=cancel`; for a stream, at least once. Spark passes a stream's id."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return TaskResult(change(self._options, iterator))

    def commit(self, messages: Messages, batchId: int | None = None) -> None:
        log_total(self._options, _results(messages, Changed))

    def abort(self, messages: Messages, batchId: int | None = None) -> None:
        """Do nothing: changes are kept, and repeating them is harmless."""


class BatchChanger(_Changer, DataSourceArrowWriter):
    pass


class StreamChanger(_Changer, DataSourceStreamArrowWriter):
    pass


def writer_of(options: WriteOptions) -> DataSourceWriter:
    return BatchWriter(options) if options.operation == ENQUEUE else BatchChanger(options)


def stream_writer_of(options: WriteOptions) -> DataSourceStreamWriter:
    return StreamWriter(options) if options.operation == ENQUEUE else StreamChanger(options)


def _context() -> Any:
    context = TaskContext.get()
    assert context is not None
    return context


def _write(options: WriteOptions, batch: Batch, iterator: Iterator[Any]) -> TaskResult:
    context = _context()
    return TaskResult(write(options, batch, iterator, context.partitionId(), context.attemptNumber()))


def _results(messages: Messages, kind: type[T]) -> list[T]:
    """Return the results of the successful task attempts; on abort, those received so far."""
    return [m.result for m in messages if isinstance(m, TaskResult) and isinstance(m.result, kind)]
