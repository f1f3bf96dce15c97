"""The format `heapline` as Spark writes to it: a batch writer and a stream writer.

Thin: what is written is decided in writing.py. Spark makes these objects in processes of its own; `write` runs in
tasks, `commit` and `abort` beside the driver, on objects that may have been made anew, so all that they need to know
travels in the tasks' messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from heapline.spark.write_options import WriteOptions
from heapline.spark.writing import Batch, Written, abort, commit, stream_batch, write, write_batch

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # as Spark tells its tasks


@dataclass
class Message(WriterCommitMessage):
    written: Written


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._batch = write_batch(options.txn)

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
