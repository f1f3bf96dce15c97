"""The format `heapline` as Spark writes to it: a batch writer and a stream writer, and the same for operations.

Thin: what is written is decided in writing.py and operations.py. Spark makes these objects in processes of its own;
`write` runs in tasks, `commit` and `abort` beside the driver, on objects that may have been made anew, so all that they
need to know travels in the tasks' messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from heapline.spark.operations import Changed, change, tell
from heapline.spark.write_options import ENQUEUE, WriteOptions
from heapline.spark.writing import Batch, Written, abort, commit, stream_batch, write, write_batch

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # as Spark tells its tasks


@dataclass
class Message(WriterCommitMessage):
    written: Written


@dataclass
class Told(WriterCommitMessage):
    changed: Changed


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._batch = write_batch(options.txn, options.topic)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _write(self._options, self._batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        commit(self._options, self._batch, _written(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        abort(self._options, self._batch, _written(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        context = _context()
        batch = stream_batch(context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID))
        return _write(self._options, batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        written = _written(messages)
        if written:  # a batch without tasks has nothing to write, and nobody says of which query it is
            commit(self._options, written[0].batch, written)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        written = _written(messages)
        if written:
            abort(self._options, written[0].batch, written)


class BatchChanger(DataSourceArrowWriter):
    """`operation=reschedule` and `cancel`."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return Told(change(self._options, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        tell(self._options, [message.changed for message in messages if isinstance(message, Told)])

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What is changed stays changed: it may be done again."""


class StreamChanger(DataSourceStreamArrowWriter):
    """The same of a stream: at least once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return Told(change(self._options, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        tell(self._options, [message.changed for message in messages if isinstance(message, Told)])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """As above."""


def writer_of(options: WriteOptions) -> DataSourceWriter:
    return BatchWriter(options) if options.operation == ENQUEUE else BatchChanger(options)


def stream_writer_of(options: WriteOptions) -> DataSourceStreamWriter:
    return StreamWriter(options) if options.operation == ENQUEUE else StreamChanger(options)


def _context() -> Any:
    context = TaskContext.get()
    assert context is not None
    return context


def _write(options: WriteOptions, batch: Batch, iterator: Iterator[Any]) -> Message:
    context = _context()
    return Message(write(options, batch, iterator, context.partitionId(), context.attemptNumber()))


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """Those of the tasks that have won; of an abort, those that came so far."""
    return [message.written for message in messages if isinstance(message, Message)]
