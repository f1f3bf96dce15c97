"""Time travel: which messages a topic held at a moment of the past, and in what state each of them was.

The log is the truth, so the state at a moment is what the rows up to it add up to: for each message its last row that
changed anything, and with it the last that spoke of its priority, its due time, its lease and its attempts. That is one
grouping by message: no order over the whole, no state carried from row to row. A purge names no messages: it took what
waited in its partition, which is every message whose last row left it waiting and stands before it.

A message is delayed until the log says that it fired, and leased until it says that the lease ended: as the engine had
it, which may be late where it was down. Events must reach back to the first row of every partition: what a log that was
reclaimed no longer tells cannot be known from it. Where events come from is not decided here (inputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from heapline.errors import BadRequest
from heapline.spark.jobs.inputs import events_of
from heapline.spark.jobs.ranges import ranges_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_NEW = ("enqueued", "batch_committed")
_BACK = ("nacked", "lease_expired", "rescheduled", "replayed")  # it waits again; `due` says until when
_READY = ("fired", "released")
_CHANGES = (*_NEW, *_BACK, *_READY, "leased", "dead_lettered", "acked", "cancelled", "expired", "dead_deleted")
_GONE = ("acked", "cancelled", "expired", "dead_deleted")
_EXTENDED, _PURGED, _COUNTED = "extended", "purged", "fired_count"
#: Columns of the view `events` that are needed.
NEEDS = (
    "topic", "partition", "offset", "timestamp", "kind", "message_id", "id", "at", "priority", "due", "deadline",
    "attempts", "holder", "reason", "expires_at", "payload_bytes", "returned", "kept", "batch_id", "enqueued_at",
)  # fmt: skip
VALUES = ("value", "key", "headers", "fairness_key")  # what `messages` adds
MOMENT = "moment"


def rebuild(
    spark: SparkSession, where: Mapping[str, str] | None, topic: str, at: datetime | None = None, *,
    offsets: Mapping[int, int] | None = None, lake: str | None = None, values: bool = False, incomplete: bool = False,
) -> DataFrame:  # fmt: skip
    """The messages of a topic at a moment, or when its partitions ended at these offsets; one row each.

    `values=True` adds payloads, keys and headers, of messages whose enqueue is still there to be read. Where the log
    no longer begins at its beginning, `incomplete=True` gives those that it still tells of.
    """
    from pyspark.sql import functions as F

    check_asked(at, offsets, datetime.now(UTC))
    events = events_of(spark, where, lake, topic, columns=NEEDS)
    if not incomplete:
        firsts = {p: first for p, (first, _) in ranges_of(where or {}, topic).items()} if lake is None else None
        check_complete(first_offsets(events) if firsts is None else firsts, topic)
    cut = events.where(up_to(at, offsets))
    moment = F.lit(at) if at is not None else F.lit(cut.agg(F.max("timestamp")).head()[0])
    found = states(cut.withColumn(MOMENT, moment))
    return found if not values else _with_values(spark, where, lake, topic, found)


def check_asked(at: datetime | None, offsets: Mapping[int, int] | None, now: datetime) -> None:
    if (at is None) == (offsets is None):
        raise BadRequest("say when: either `at`, a moment, or `offsets`, where each partition ended")
    if at is not None and at.tzinfo is None:
        raise BadRequest(f"{at.isoformat()} names no time zone: add one, as in 2026-01-31T12:00:00Z")
    if at is not None and at > now:
        raise BadRequest(f"{at.isoformat()} has not been yet: a state can be rebuilt, not foretold")
    if offsets is not None and not (offsets and all(p >= 0 and end >= 0 for p, end in offsets.items())):
        raise BadRequest("offsets are given as {partition: offset}, from 0 on")


def up_to(at: datetime | None, offsets: Mapping[int, int] | None) -> Column:
    """Which rows count. A partition that `offsets` does not name had no rows then."""
    from pyspark.sql import functions as F

    if at is not None:
        return F.col("timestamp") <= F.lit(at)
    ends = F.create_map(*(F.lit(x) for p, end in sorted((offsets or {}).items()) for x in (p, end)))
    return F.col("offset") < ends[F.col("partition")]


def first_offsets(events: DataFrame) -> dict[int, int]:
    from pyspark.sql import functions as F

    return {row[0]: row[1] for row in events.groupBy("partition").agg(F.min("offset")).collect()}


def check_complete(firsts: Mapping[int, int], topic: str) -> None:
    """
    >>> check_complete({0: 0, 1: 0}, "jobs")
    """
    late = {p: first for p, first in sorted(firsts.items()) if first > 0}
    if late:
        partition, first = next(iter(late.items()))
        raise BadRequest(
            f"the log of {topic!r} begins at offset {first} of partition {partition}: what came before was reclaimed, "
            "so which messages were there cannot be told. Rebuild from a lake that was archived from the beginning "
            "(lake=…), or take what is still known with incomplete=True"
        )


def states(events: DataFrame, by: Sequence[str] = ()) -> DataFrame:
    """What rows of the view `events` add up to: one row for each message that is still there. A column `moment` says up
    to when they reach; with `by`, columns that tell several histories apart, each has its own."""
    from pyspark.sql import functions as F

    keys = [*by, "topic", "partition"]
    kind = F.col("kind")
    sweeps = events.where(kind.isin(_PURGED, _COUNTED)).groupBy(*keys).agg(  # of whole partitions: a handful of rows
        F.max(F.when(kind == _PURGED, F.col("offset"))).alias("_purged"),
        F.max(F.when(kind == _COUNTED, F.col("offset"))).alias("_fired"),
    )  # fmt: skip
    told = events.where(kind.isin(*_CHANGES, _EXTENDED) & F.col("id").isNotNull()).where(
        (kind != "expired") | F.col("returned")  # else a worker has it still: it goes when it comes back
    )
    lives = told.groupBy(*keys, "id").agg(*_last_words()).join(F.broadcast(sweeps), keys, "left")
    last = F.col("last.kind")
    placed = lives.where(~last.isin(*_GONE) & ~((last == "dead_lettered") & ~F.col("last.kept")))
    placed = placed.withColumn("state", _state())
    was_purged = F.col("state").isin("ready", "delayed") & (F.col("_purged") > F.col("last.offset"))
    leased = F.col("state") == "leased"
    return placed.where(~F.coalesce(was_purged, F.lit(False))).select(
        *by, "topic", "partition", "message_id", "id", "priority", "state", "due.due", _attempts().alias("attempts"),
        F.when(leased, F.col("lease.holder")).alias("holder"), F.when(leased, F.col("deadline")).alias("deadline"),
        F.col("new.at").alias("enqueued_at"), "expires_at", "reason", "new.payload_bytes", "new.batch_id",
        F.col("new.offset").alias("enqueued_offset"), F.col("last.offset").alias("last_offset"),
    )  # fmt: skip


def _last_words() -> list[Column]:
    """Per message: what the last row said that had anything to say on the matter."""
    from pyspark.sql import functions as F

    def last(what: str, kinds: Sequence[str], name: str) -> Column:
        listed = ", ".join(f"'{kind}'" for kind in kinds)
        return F.expr(f"max_by({what}, `offset`) FILTER (WHERE kind IN ({listed}))").alias(name)

    return [
        last("struct(kind, `offset`, kept)", _CHANGES, "last"),
        last("struct(coalesce(enqueued_at, at) AS at, `offset`, payload_bytes, batch_id)", _NEW, "new"),
        last("struct(due IS NULL AS at_once, coalesce(due, at) AS due)", (*_NEW, *_BACK), "due"),
        last("priority", (*_NEW, "rescheduled"), "priority"),
        last("expires_at", (*_NEW, "rescheduled", "replayed"), "expires_at"),
        last("struct(holder, attempts)", ("leased",), "lease"), last("deadline", ("leased", _EXTENDED), "deadline"),
        last("kind", ("leased", "released", "replayed"), "counted"),
        # As the engine words it; a dead letter that came back has nothing said against it.
        last("CASE kind WHEN 'lease_expired' THEN 'lease expired' WHEN 'replayed' THEN NULL ELSE reason END",
             ("nacked", "lease_expired", "dead_lettered", "replayed"), "reason"),
        F.max("message_id").alias("message_id"), F.max(MOMENT).alias(MOMENT),
    ]  # fmt: skip


def _state() -> Column:
    """A topic without streams records only how many became ready, not which: those that were due."""
    from pyspark.sql import functions as F

    kind = F.col("last.kind")
    counted = (F.col("_fired") > F.col("last.offset")) & (F.col("due.due") <= F.col(MOMENT))
    return (
        F.when(kind == "leased", "leased").when(kind == "dead_lettered", "dead")
        .when(kind.isin(*_READY) | F.col("due.at_once") | counted, "ready").otherwise("delayed")
    )  # fmt: skip


def _attempts() -> Column:
    """A release takes its delivery back off the count; a dead letter that is replayed begins anew."""
    from pyspark.sql import functions as F

    counted, attempts = F.col("counted"), F.col("lease.attempts")
    return (
        F.when(counted == "leased", attempts).when(counted == "released", F.greatest(attempts - 1, F.lit(0)))
        .otherwise(0).cast("int")
    )  # fmt: skip


def _with_values(
    spark: SparkSession, where: Mapping[str, str] | None, lake: str | None, topic: str, found: DataFrame
) -> DataFrame:
    if lake is not None:
        from heapline.spark.jobs.lake import lake as read_lake

        messages = read_lake(spark, lake, where, topic).select("id", *VALUES)
    else:
        options = {**(where or {}), "subscribe": topic, "includeHeaders": "true", "columns": ",".join(("id", *VALUES))}
        messages = spark.read.format("heapline").options(**options).load()
    return found.join(messages, "id", "left")
