"""How rows become messages: what a task does, and how the driver makes it count.

*A task* prepares its rows in parts of its own attempt. *The driver* commits, in one step, exactly the parts of the
attempts that Spark says have won; parts of all others are dropped by that same step. A commit of a stream, or of a
write with txnAppId, is one of a sink, whose last version the broker remembers for ever: so a batch that Spark replays,
under whatever attempts, changes nothing. A task that finds its batch committed sends no more.

Knows nothing of Spark's classes; the shell is sink.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from heapline.client.log_calls import LogCalls
from heapline.engine.requests import NAME_BYTES_MAX
from heapline.errors import BadRequest, BatchDecided, UnknownPart
from heapline.spark.bad_rows import BadFile, refuse, settle
from heapline.spark.outgoing import accept
from heapline.spark.sending import PartSender, Topics, calls_of, part_name
from heapline.spark.write_options import WriteOptions
from heapline.wire.schema import pb


@dataclass(frozen=True)
class Batch:
    """What is committed at once, and as which version of which sink, if of one."""

    id: str
    sink: str | None = None
    version: int | None = None


def stream_batch(query_id: str | None, batch_id: str | int | None) -> Batch:
    if not query_id or batch_id is None:
        raise BadRequest(
            "Spark does not say which query and batch this is, so it cannot be written exactly once: write it with "
            "foreachBatch and the options txnAppId and txnVersion"
        )
    return Batch(f"spark.{query_id}.{batch_id}", f"query:{query_id}", int(batch_id))


def write_batch(txn: tuple[str, int] | None, topic: str | None = None) -> Batch:
    """`topic`: to which all rows go; None: each says."""
    if txn is None:
        return Batch(f"spark.{secrets.token_hex(16)}")
    app, version = txn
    sink = txn_sink(app, topic)
    return Batch(f"spark.txn.{hashlib.sha256(sink.encode()).hexdigest()[:40]}.{version}", sink, version)


def txn_sink(app: str, topic: str | None) -> str:
    """What is written under a txnAppId to one topic: as for Delta's tables, each topic has versions of its own, so that
    a foreachBatch may write to several under one name. No topic has such a name as "*", and none an "@" in it.

    >>> txn_sink("nightly-load", "orders"), txn_sink("nightly-load", None)
    ('txn:nightly-load@orders', 'txn:nightly-load@*')
    """
    name = f"txn:{app}@{topic or '*'}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:40]
    fitting = (name, f"txn:{app}@#{digest}", f"txn:#{digest}")  # nor has any topic a "#" in its name
    return next(one for one in fitting if len(one.encode()) <= NAME_BYTES_MAX)


@dataclass(frozen=True)
class Written:
    """What a task has prepared."""

    batch: Batch
    prefix: str
    parts: int
    rows: int
    bad: BadFile | None = None

    def names(self) -> list[str]:
        return [part_name(self.prefix, number) for number in range(self.parts)]


def write(options: WriteOptions, batch: Batch, batches: Iterable[Any], partition: int, attempt: int) -> Written:
    """What a task does with its rows: returns when all of them are durable, and unseen."""
    calls = calls_of(options.target)
    task = _Task(options, batch, calls, PartSender(calls, batch.id, partition, attempt))
    try:
        for arrow in batches:
            task.take(arrow)
            if task.is_over:
                break
        return task.end()
    except BaseException:
        task.give_up()
        raise
    finally:
        calls.close()


class _Task:
    def __init__(self, options: WriteOptions, batch: Batch, calls: LogCalls, sender: PartSender) -> None:
        self._options, self._batch, self._sender = options, batch, sender
        self._topics = Topics(calls)
        self._bad: BadFile | None = None
        self._rows = self._seen = 0
        self._decided = False  # the batch was committed before: it is replayed

    @property
    def is_over(self) -> bool:
        """Bad rows are put aside once more: who committed may have been killed before their files got their place."""
        return self._decided and self._options.bad_records is None

    def take(self, arrow: Any) -> None:
        good, wrong = accept(arrow, self._options.topic, self._topics)
        if wrong:
            where = self._options.bad_records
            self._bad = refuse(self._bad, where, self._batch.id, self._sender.prefix, arrow, wrong, self._seen)
        self._seen += arrow.num_rows
        for count, shares in () if self._decided else good.parts():
            try:
                self._sender.send(shares)
            except BatchDecided:
                self._decided = True
                break
            self._rows += count

    def end(self) -> Written:
        with contextlib.suppress(BatchDecided):
            self._sender.finish()
        bad = None if self._bad is None else self._bad.closed()
        return Written(self._batch, self._sender.prefix, self._sender.parts, self._rows, bad)

    def give_up(self) -> None:
        self._sender.give_up()
        if self._bad is not None:
            self._bad.discard()


def commit(options: WriteOptions, batch: Batch, written: Sequence[Written]) -> int:
    """Make it count; how many messages."""
    parts = [name for each in written for name in each.names()]
    calls = calls_of(options.target)
    try:
        request = pb.CommitBatchRequest(batch_id=batch.id, parts=parts, sink=batch.sink, version=batch.version)
        count: int = calls("CommitBatch", request).count
    except UnknownPart as error:
        raise UnpreparedParts(error.batch_id, error.part) from None
    finally:
        calls.close()
    settle(options.bad_records, batch.id, [each.bad for each in written if each.bad is not None])
    return count


def abort(options: WriteOptions, batch: Batch, written: Sequence[Written]) -> None:
    """Drop what was prepared. What a task prepares after this is dropped by the next commit, or in time."""
    for each in written:
        if each.bad is not None:
            each.bad.discard()
    calls = calls_of(options.target)
    try:
        calls("AbortBatch", pb.BatchRequest(batch_id=batch.id))
    except BatchDecided:
        pass  # it is committed, whoever did it
    finally:
        calls.close()


class UnpreparedParts(UnknownPart):
    """Told as UnknownPart."""

    def __init__(self, batch_id: str, part: str) -> None:
        super().__init__(batch_id, part)
        self.args = (
            f"part {part!r} of batch {batch_id!r} was prepared and is gone, so nothing was committed: it was aborted "
            "by somebody else, or the commit came later than the server's batch_timeout after the last part (a day, "
            "unless set otherwise). Write the batch again; if batches take so long, raise batch_timeout on the server",
        )
