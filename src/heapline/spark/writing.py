"""How rows become messages: what a task does, and how the driver makes it count.

*A task* prepares its rows in parts of its own attempt. *The driver* commits, in one step, exactly the parts of the
attempts that Spark says have won; parts of all others are dropped by that same step. A commit of a stream, or of a
write with txnAppId, is one of a sink, whose last version the broker remembers for ever: so a batch that Spark replays,
under whatever attempts, changes nothing. A task that finds its batch committed stops there.

Knows nothing of Spark's classes; the shell is sink.py.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


def write_batch(txn: tuple[str, int] | None) -> Batch:
    if txn is None:
        return Batch(f"spark.{secrets.token_hex(16)}")
    app, version = txn
    return Batch(f"spark.txn.{hashlib.sha256(app.encode()).hexdigest()[:40]}.{version}", f"txn:{app}", version)


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
    sender = PartSender(calls, batch.id, partition, attempt)
    topics = Topics(calls)
    bad: BadFile | None = None
    rows = seen = 0
    try:
        for arrow in batches:
            good, wrong = accept(arrow, options.topic, topics)
            if wrong:
                bad = refuse(bad, options.bad_records, batch.id, sender.prefix, arrow, wrong, seen)
            for count, shares in good.parts():
                sender.send(shares)
                rows += count
            seen += arrow.num_rows
        sender.finish()
    except BatchDecided:
        pass  # this batch was committed before: it is replayed, and there is nothing to do
    except BaseException:
        if bad is not None:
            bad.discard()
        raise
    finally:
        sender.give_up()
        calls.close()
    return Written(batch, sender.prefix, sender.parts, rows, None if bad is None else bad.closed())


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
