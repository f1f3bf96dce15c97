"""Erasing what a key has left behind: its rows in the lake, its messages that wait, its dead letters; and telling where
its payloads still lie.

*The lake* is rewritten: the key's rows go from the table, and the files that held them from the disk, with all other
files that earlier versions of the table still named. Files that are being written, and are in no version yet, are let
be. The condition is recorded in the table's log, so it names the key's SHA-256, not the key.

*The journal* is append-only and checksummed: nothing in it is overwritten. What waits is cancelled and dead letters are
deleted, so nobody is given these payloads any more; the bytes go with their segments, as the journal is reclaimed. So
the result tells which segments those are, and the same call again tells what is left by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapline.errors import BadRequest, MessageLeased, MessageNotFound
from heapline.spark.jobs.server import server_options
from heapline.spark.options import Target, parse_options, plain_topic
from heapline.spark.positions import Subscription
from heapline.spark.sources import client_of, settled, settled_target, source_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class InLake:
    rows: int  # that went
    files: int  # that went from the disk, those of earlier versions among them


@dataclass(frozen=True)
class InTopic:
    """What became of a key's messages in a topic, and what of them is still in its journal."""

    topic: str
    cancelled: int
    dead_deleted: int
    leased: int  # workers have them: they cannot be cancelled before they come back
    payloads_left: int  # in the journal, of messages that are gone from the queue or leased
    segments: tuple[int, int] | None  # the first and the last that they lie in
    newest: datetime | None  # when the last of them was written
    retention: float  # seconds for which the topic keeps its journal at least


@dataclass(frozen=True)
class ForgetResult:
    lake: InLake | None
    topics: list[InTopic]

    @property
    def is_erased(self) -> bool:
        """Whether nothing is left, as far as it was looked for."""
        return not any(topic.payloads_left or topic.leased for topic in self.topics)


def forget(
    spark: SparkSession | None, where: Mapping[str, str] | None, key: str, *,
    topics: Sequence[str] | None = None, lake: str | Path | None = None,
) -> ForgetResult:  # fmt: skip
    """Erase the payloads of a key from a lake, from the queue, or both. Without `topics`: of all."""
    if not key:
        raise BadRequest("say which key")
    if where is None and lake is None:
        raise BadRequest("say where to erase: a server, a lake, or both")
    names = None if topics is None else [plain_topic(topic) for topic in topics]
    erased = None if lake is None else forget_in_lake(lake, key, names)
    if where is None:
        return ForgetResult(erased, [])
    if spark is None:
        raise BadRequest("the journal is read with Spark: give a session")
    return ForgetResult(erased, forget_in_queue(spark, where, key, names))


# -- the lake ----------------------------------------------------------------------------------------------------------


def forget_in_lake(lake: str | Path, key: str, topics: Sequence[str] | None = None) -> InLake:
    from heapline.spark.lake.tables import need_table

    table = need_table(lake, "messages").table
    digest = hashlib.sha256(key.encode()).hexdigest()
    condition = f"encode(sha256(key), 'hex') = '{digest}'"
    if topics is not None:
        listed = ", ".join("'" + topic.replace("'", "''") + "'" for topic in topics)
        condition = f"topic IN ({listed}) AND {condition}"
    done = table.delete(condition)
    # Only what the table's log says was removed: an archive may be writing files that it does not name yet.
    gone = table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    return InLake(int(done["num_deleted_rows"]), len(gone))


# -- the queue and its journal -----------------------------------------------------------------------------------------


def forget_in_queue(
    spark: Any, where: Mapping[str, str], key: str, topics: Sequence[str] | None = None
) -> list[InTopic]:
    given = {name.lower(): value for name, value in server_options(where).items()}
    secret = given.get("heapline.api_key", given.get("heapline.token"))
    target = settled_target(Target(None, given.get("heapline.url"), secret, given.get("heapline.api_key_file")))
    with client_of(target) as client:
        there = {info.name: info.config for info in client.list_topics()}
        wanted = list(there) if topics is None else list(topics)
        missing = [topic for topic in wanted if topic not in there]
        if missing:
            raise BadRequest(f"there is no topic {missing[0]!r}")
        return [_in_topic(spark, client, where, topic, there[topic].retention, key) for topic in wanted]


def _in_topic(spark: Any, client: Any, where: Mapping[str, str], topic: str, retention: float, key: str) -> InTopic:
    from heapline.model import DlqFilter

    waiting = _of_key(_view(spark, where, topic, "backlog", "key,id"), key).select("id").collect()
    cancelled, leased = cancel_all(client, topic, (row.id for row in waiting))
    deleted = client.dlq_delete(topic, where=DlqFilter(key=key))
    left = _of_key(_view(spark, where, topic, "messages", "key,unit,timestamp"), key)
    row = left.selectExpr("count(*)", "min(unit)", "max(unit)", "max(timestamp)").collect()[0]
    segments = None if not row[0] else segments_of(where, topic, row[1], row[2])
    newest = None if row[3] is None else row[3].astimezone(UTC)  # Spark gives it in local time, without saying so
    return InTopic(topic, cancelled, deleted, leased, row[0], segments, newest, retention)


def _view(spark: Any, where: Mapping[str, str], topic: str, view: str, columns: str) -> DataFrame:
    options = {**where, "subscribe": topic, "view": view, "columns": columns}
    found: DataFrame = spark.read.format("heapline").options(**options).load()
    return found


def _of_key(rows: Any, key: str) -> Any:
    from pyspark.sql import functions as F

    return rows.where(F.col("key") == F.lit(key.encode()))


def cancel_all(client: Any, topic: str, ids: Iterable[int]) -> tuple[int, int]:
    """How many could be cancelled, and how many workers have. One that is gone by now is neither."""
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
    """The segments that these units lie in, as far as the journal still has them."""
    asked = settled(parse_options({**where, "subscribe": topic}, streaming=False))
    subscription = Subscription(source_of(asked), asked.which)
    try:
        subscription.find()
        marks = subscription.logs[plain_topic(topic)].marks().all
    finally:
        subscription.close()
    if not len(marks):
        raise BadRequest(f"the journal of {topic!r} is empty")

    def segment(unit: int) -> int:
        before = marks["segment"][marks["unit"] <= unit]
        return int(before.max() if len(before) else marks["segment"].min())

    return segment(first_unit), segment(last_unit)
