"""The writers of the format `heapline` for Spark: batch and stream, for enqueues and for operations on messages.

prepared_batches.py decides what is enqueued. Spark creates these objects in its own processes: `write` runs in tasks,
`commit` and `abort` beside the driver, possibly on new objects. So everything that `commit` and `abort` need travels in
the tasks' messages.

With `operation=reschedule` and `operation=cancel` each row names a message that waits in the queue. Many calls are in
flight at a time. They are not atomic and need not be: repeating one has no further effect, so a task may be retried. A
message that is gone or leased cannot be changed. Because the queue keeps working meanwhile, such messages are only
counted, unless `failOnMissing` is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
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

from heapline.contract.arguments import MessageId
from heapline.contract.broker import Broker
from heapline.contract.check import INSTANT_MAX, INSTANT_MIN
from heapline.contract.errors import BadRequest, HeaplineError, MessageLeased, MessageNotFound
from heapline.contract.ids import parse_id
from heapline.logs import Log
from heapline.spark.enqueue_rows import BadRow
from heapline.spark.prepared_batches import BadRows, Batch, Written, abort, commit, stream_batch, write, write_batch
from heapline.spark.target import broker_of
from heapline.spark.write_options import CANCEL, ENQUEUE, WriteOptions

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # local properties of Spark's tasks
IN_FLIGHT = 500
DEADLINE = 120.0  # seconds per call, including retries
log = Log("heapline.spark")
Messages = Sequence[WriterCommitMessage | None]


@dataclass(frozen=True)
class Changed:
    """Counts of the messages that a task named: changed, missing or leased."""

    changed: int = 0
    gone: int = 0
    leased: int = 0

    def __add__(self, other: Changed) -> Changed:
        return Changed(self.changed + other.changed, self.gone + other.gone, self.leased + other.leased)

    @property
    def missed(self) -> int:
        return self.gone + self.leased


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


# -- operations on messages --------------------------------------------------------------------------------------------


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


class MessagesMissing(BadRequest):
    """Messages could not be changed, and `failOnMissing` is set."""

    def __init__(self, operation: str, total: Changed) -> None:
        super().__init__(
            f"{operation}: {total.gone} message(s) are gone and {total.leased} are leased to workers; the other "
            f"{total.changed} of this chunk were changed. Set failOnMissing=false to continue without them"
        )


def change(options: WriteOptions, batches: Iterable[Any]) -> Changed:
    """Change the messages that the rows of a task name."""
    return asyncio.run(_change(options, batches))


def log_total(options: WriteOptions, results: Sequence[Changed]) -> Changed:
    """Log the sum over all tasks, because Spark cannot return a result from a write."""
    total = sum(results, Changed())
    write = log.warning if total.missed else log.info
    write(options.operation, changed=total.changed, gone=total.gone, leased=total.leased)
    return total


async def _change(options: WriteOptions, batches: Iterable[Any]) -> Changed:
    total, first = Changed(), 0
    async with broker_of(options.target, DEADLINE) as hl:
        for batch in batches:
            requests, bad = [], []
            for row, fields in enumerate(batch.to_pylist()):
                try:
                    requests.append(_parse_row(options, fields))
                except HeaplineError as error:
                    bad.append(BadRow(row, fields.get("topic") or options.topic, str(error)))
            if bad:
                raise BadRows(bad, first)
            for chunk in _chunks(requests):
                total += await _run(hl, options, chunk)
            first += batch.num_rows
    return total


def _parse_row(options: WriteOptions, fields: dict[str, Any]) -> tuple[str, MessageId, dict[str, Any]]:
    """Return a row's topic, message id and changes."""
    topic = fields.get("topic") or options.topic
    if topic is None:
        raise BadRequest("topic is null")
    named = fields["id"] if "id" in fields else fields["message_id"]
    if named is None:
        raise BadRequest("message_id is null")
    changes = {name: fields[name] for name in ("priority", "deliver_at") if fields.get(name) is not None}
    if options.operation != CANCEL and not changes:
        raise BadRequest("nothing to change: priority and deliver_at are null")
    at = changes.get("deliver_at")
    if at is not None and not INSTANT_MIN < at <= INSTANT_MAX:
        raise BadRequest(f"deliver_at={at.isoformat()} is out of range; it must be between 1970 and 2224")
    parse_id(named)  # rejects invalid ids; the broker checks that it belongs to the topic
    return topic, named, changes


async def _run(hl: Broker, options: WriteOptions, requests: Sequence[tuple[str, MessageId, dict[str, Any]]]) -> Changed:
    calls = [
        hl.cancel(topic, id) if options.operation == CANCEL else hl.reschedule(topic, id, **changes)
        for topic, id, changes in requests
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    gone = sum(isinstance(answer, MessageNotFound) for answer in answers)
    leased = sum(isinstance(answer, MessageLeased) for answer in answers)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, MessageNotFound | MessageLeased):
            raise answer
    total = Changed(len(answers) - gone - leased, gone, leased)
    if total.missed and options.fail_on_missing:
        raise MessagesMissing(options.operation, total)
    return total


def _chunks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(rows), IN_FLIGHT):
        yield rows[start : start + IN_FLIGHT]


# -- the writer of a request -------------------------------------------------------------------------------------------


def writer_of(options: WriteOptions) -> DataSourceWriter:
    return BatchWriter(options) if options.operation == ENQUEUE else BatchChanger(options)


def stream_writer_of(options: WriteOptions) -> DataSourceStreamWriter:
    return StreamWriter(options) if options.operation == ENQUEUE else StreamChanger(options)
