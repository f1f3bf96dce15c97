"""The job `forget`: erase the rows of a key from the lake and the queue, and report where its payloads still are.

*The lake* is rewritten: the key's rows are removed from the table, and the files that held them are deleted, together
with all other files that only earlier versions of the table named. Files that are being written, and are in no version
yet, are kept. The condition is recorded in the table's log, so it contains the key's SHA-256 and not the key.

*The journal* is append-only and checksummed, so nothing in it is overwritten. Waiting messages are cancelled and dead
letters deleted, so these payloads are no longer delivered. The bytes are deleted with their segments when the journal
is reclaimed. The result names these segments, and the same call later reports what is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapline.contract.config import short
from heapline.contract.errors import BadRequest, MessageLeased, MessageNotFound
from heapline.contract.message import DlqFilter
from heapline.spark.target import client_of, server_target, subscribed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class InLake:
    rows: int  # removed
    files: int  # deleted, including those of earlier versions


@dataclass(frozen=True)
class InTopic:
    """Messages of a key that were removed from a topic, and payloads that are still in its journal."""

    topic: str
    cancelled: int
    dead_deleted: int
    leased: int  # leased to workers; they cannot be cancelled until they are returned
    payloads_left: int  # in the journal, of messages that were removed from the queue or are leased
    segments: tuple[int, int] | None  # the first and last segment that contain them
    newest: datetime | None  # when the last of them was written
    retention: float  # seconds for which the topic keeps at least its journal


@dataclass(frozen=True)
class ForgetResult:
    lake: InLake | None
    topics: list[InTopic]

    @property
    def is_erased(self) -> bool:
        """Whether nothing was left where this call searched."""
        return not any(topic.payloads_left or topic.leased for topic in self.topics)


def forget(
    spark: SparkSession | None,
    where: Mapping[str, str] | None,
    key: str,
    *,
    topics: Sequence[str] | None = None,
    lake: str | Path | None = None,
) -> ForgetResult:
    """Erase the payloads of a key from a lake, from the queue, or both; from all topics unless `topics` is given."""
    if not key:
        raise BadRequest("no key given")
    if where is None and lake is None:
        raise BadRequest("nothing to erase from; give a server, a lake, or both")
    names = None if topics is None else [short(topic) for topic in topics]
    erased = None if lake is None else forget_in_lake(lake, key, names)
    if where is None:
        return ForgetResult(erased, [])
    if spark is None:
        raise BadRequest("the journal is read with Spark; give a session")
    return ForgetResult(erased, forget_in_queue(spark, where, key, names))


# -- the lake ----------------------------------------------------------------------------------------------------------


def forget_in_lake(lake: str | Path, key: str, topics: Sequence[str] | None = None) -> InLake:
    from heapline.spark.lake.tables import require_table

    table = require_table(lake, "messages").table
    digest = hashlib.sha256(key.encode()).hexdigest()
    condition = f"encode(sha256(key), 'hex') = '{digest}'"
    if topics is not None:
        listed = ", ".join("'" + topic.replace("'", "''") + "'" for topic in topics)
        condition = f"topic IN ({listed}) AND {condition}"
    done = table.delete(condition)
    # Without `full`, only files that the table's log says were removed: an archive may be writing new ones.
    gone = table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    return InLake(int(done["num_deleted_rows"]), len(gone))


# -- the queue and its journal -----------------------------------------------------------------------------------------


def forget_in_queue(
    spark: Any, where: Mapping[str, str], key: str, topics: Sequence[str] | None = None
) -> list[InTopic]:
    with client_of(server_target(where)) as client:
        there = {info.name: info.config for info in client.list_topics()}
        wanted = list(there) if topics is None else list(topics)
        missing = [topic for topic in wanted if topic not in there]
        if missing:
            raise BadRequest(f"topic {missing[0]!r} does not exist")
        return [_in_topic(spark, client, where, topic, there[topic].retention, key) for topic in wanted]


def _in_topic(spark: Any, client: Any, where: Mapping[str, str], topic: str, retention: float, key: str) -> InTopic:
    from heapline.spark.jobs.lake import journal_rows

    waiting = _of_key(journal_rows(spark, where, topic, "backlog", columns=("key", "id")), key).select("id").collect()
    cancelled, leased = cancel_all(client, topic, (row.id for row in waiting))
    deleted = client.dlq_delete(topic, where=DlqFilter(key=key))
    left = _of_key(journal_rows(spark, where, topic, "messages", columns=("key", "unit", "timestamp")), key)
    row = left.selectExpr("count(*)", "min(unit)", "max(unit)", "max(timestamp)").collect()[0]
    segments = None if not row[0] else segments_of(where, topic, row[1], row[2])
    newest = None if row[3] is None else row[3].astimezone(UTC)  # Spark returns local time without a time zone
    return InTopic(topic, cancelled, deleted, leased, row[0], segments, newest, retention)


def _of_key(rows: Any, key: str) -> Any:
    from pyspark.sql import functions as F

    return rows.where(F.col("key") == F.lit(key.encode()))


def cancel_all(client: Any, topic: str, ids: Iterable[int]) -> tuple[int, int]:
    """Return how many messages were cancelled and how many are leased.

    Messages that no longer exist count as neither.
    """
    cancelled = leased = 0
    for id in ids:
        try:
            client.cancel(topic, id)
            cancelled += 1
        except MessageLeased:
            leased += 1
        except MessageNotFound:
            pass
    return cancelled, leased


def segments_of(where: Mapping[str, str], topic: str, first_unit: int, last_unit: int) -> tuple[int, int]:
    """Return the first and last segment that contain these units, as far as the journal still has them."""
    with subscribed(where, subscribe=topic) as (subscription, _):
        entries = subscription.logs[short(topic)].index().entries
    if not len(entries):
        raise BadRequest(f"the journal of {topic!r} is empty")

    def segment(unit: int) -> int:
        before = entries["segment"][entries["unit"] <= unit]
        return int(before.max() if len(before) else entries["segment"].min())

    return segment(first_unit), segment(last_unit)
