"""The job `rebuild`: which messages a topic had at a time in the past, and the state of each.

The state at a time follows from the rows up to it: for each message, its last row that changed its state, and the last
rows that set its priority, due time, lease and attempts. This is one grouping by message, without a global order and
without state between rows. A purge names no messages: it removed every message of its partition that was waiting, which
is every message whose last row left it waiting and is before the purge.

A message is delayed until the log says that it fired, and leased until the log says that the lease ended, as the engine
had it; this may be late if the engine was down. Events must begin with the first row of every partition, because the
state cannot be derived from a log that was reclaimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from heapline.contract.errors import BadRequest
from heapline.spark.jobs.lake import offset_ranges, ranges_of, topic_rows

_NEW = ("enqueued", "batch_committed")
_BACK = ("nacked", "lease_expired", "rescheduled", "replayed")  # it waits again, until `due`
_READY = ("fired", "released")
_GONE = ("acked", "cancelled", "expired", "dead_deleted", "purged")  # a purge that names its messages
_CHANGES = (*_NEW, *_BACK, *_READY, "leased", "dead_lettered", *_GONE)
_EXTENDED, _PURGED, _FIRED = "extended", "purged", "fired"
#: Required columns of the view `events`.
NEEDS = (
    "topic", "partition", "offset", "timestamp", "kind", "message_id", "id", "at", "priority", "due", "deadline",
    "attempts", "holder", "reason", "expires_at", "payload_bytes", "returned", "kept", "batch_id", "enqueued_at",
)  # fmt: skip
#: The columns of a row, in order.
COLUMNS = (
    "topic", "partition", "message_id", "id", "priority", "state", "due", "attempts", "holder", "deadline",
    "enqueued_at", "expires_at", "reason", "payload_bytes", "batch_id", "enqueued_offset", "last_offset",
)  # fmt: skip
VALUES = ("value", "key", "headers", "fairness_key")  # columns of `messages` for `values=True`
MOMENT = "moment"


def rebuild(
    spark: SparkSession,
    where: Mapping[str, str] | None,
    topic: str,
    at: datetime | None = None,
    *,
    offsets: Mapping[int, int] | None = None,
    lake: str | None = None,
    values: bool = False,
    incomplete: bool = False,
) -> DataFrame:
    """Return the messages of a topic at a time, or when its partitions ended at these offsets; one row each.

    `values=True` adds payloads, keys and headers of messages whose enqueue can still be read. If the beginning of the
    log was reclaimed, `incomplete=True` returns the messages that the rest of the log mentions.
    """
    check_asked(at, offsets, datetime.now(UTC))
    events = topic_rows(spark, where, lake, topic, columns=NEEDS)
    if not incomplete:
        ranges = ranges_of(where or {}, topic) if lake is None else offset_ranges(events)
        check_complete({partition: first for partition, (first, _) in ranges.items()}, topic)
    cut = events.where(up_to(at, offsets))
    moment = F.lit(at) if at is not None else F.lit(cut.agg(F.max("timestamp")).head()[0])
    found = states(cut.withColumn(MOMENT, moment))
    if not values:
        return found
    messages = topic_rows(spark, where, lake, topic, "messages", columns=("id", *VALUES))
    return found.join(messages, "id", "left")


def check_asked(at: datetime | None, offsets: Mapping[int, int] | None, now: datetime) -> None:
    if (at is None) == (offsets is None):
        raise BadRequest("no point in time; give either `at`, a time, or `offsets`, the end of each partition")
    if at is not None and at.tzinfo is None:
        raise BadRequest(f"{at.isoformat()} has no time zone; add one, as in 2026-01-31T12:00:00Z")
    if at is not None and at > now:
        raise BadRequest(f"{at.isoformat()} is in the future; only a past state can be rebuilt")
    if offsets is not None and not (offsets and all(p >= 0 and end >= 0 for p, end in offsets.items())):
        raise BadRequest("offsets must be {partition: offset}, from 0 on")


def up_to(at: datetime | None, offsets: Mapping[int, int] | None) -> Column:
    """Return the condition for rows that count. A partition that `offsets` does not name had no rows then."""
    if at is not None:
        return F.col("timestamp") <= F.lit(at)
    ends = F.create_map(*(F.lit(x) for p, end in sorted((offsets or {}).items()) for x in (p, end)))
    return F.col("offset") < ends[F.col("partition")]


def check_complete(firsts: Mapping[int, int], topic: str) -> None:
    """Raise an error unless the log begins with the first row of every partition.

    >>> check_complete({0: 0, 1: 0}, "jobs")
    """
    late = {p: first for p, first in sorted(firsts.items()) if first > 0}
    if late:
        partition, first = next(iter(late.items()))
        raise BadRequest(
            f"the log of {topic!r} begins at offset {first} of partition {partition}: earlier rows were reclaimed, so "
            "the messages of that time cannot be determined. Rebuild from a lake that was archived from the beginning "
            "(lake=…), or set incomplete=True to get the messages that are still known"
        )


def states(events: DataFrame, by: Sequence[str] = ()) -> DataFrame:
    """Derive the state of messages from rows of the view `events`: one row for each message that still exists.

    A column `moment` has the time up to which the rows reach. With `by`, columns that identify several histories, each
    history is derived separately.
    """
    keys = [*by, "topic", "partition"]
    kind = F.col("kind")
    # Purges, and firings that only count messages, concern whole partitions; there are few.
    sweeps = events.where(kind.isin(_PURGED, _FIRED) & F.col("id").isNull()).groupBy(*keys)
    sweeps = sweeps.agg(
        F.max(F.when(kind == _PURGED, F.col("offset"))).alias("_purged"),
        F.max(F.when(kind == _FIRED, F.col("offset"))).alias("_fired"),
    )
    changes = events.where(kind.isin(*_CHANGES, _EXTENDED) & F.col("id").isNotNull()).where(
        (kind != "expired") | F.col("returned")  # otherwise it is leased, and removed when the lease ends
    )
    lives = changes.groupBy(*keys, "id").agg(*_latest_values()).join(F.broadcast(sweeps), keys, "left")
    last = F.col("last.kind")
    placed = lives.where(~last.isin(*_GONE) & ~((last == "dead_lettered") & ~F.col("last.kept")))
    placed = placed.withColumn("state", _state())
    was_purged = F.col("state").isin("ready", "delayed") & (F.col("_purged") > F.col("last.offset"))
    leased = F.col("state") == "leased"
    computed = {
        "due": F.col("due.due"),
        "attempts": _attempts(),
        "holder": F.when(leased, F.col("lease.holder")),
        "deadline": F.when(leased, F.col("deadline")),
        "enqueued_at": F.col("new.at"),
        "payload_bytes": F.col("new.payload_bytes"),
        "batch_id": F.col("new.batch_id"),
        "enqueued_offset": F.col("new.offset"),
        "last_offset": F.col("last.offset"),
    }
    return placed.where(~F.coalesce(was_purged, F.lit(False))).select(
        *by, *(computed[name].alias(name) if name in computed else F.col(name) for name in COLUMNS)
    )


#: Per message, the value of the last row of these kinds: name -> (SQL, kinds).
_LATEST = {
    "last": ("struct(kind, `offset`, kept)", _CHANGES),
    "new": ("struct(coalesce(enqueued_at, at) AS at, `offset`, payload_bytes, batch_id)", _NEW),
    "due": ("struct(due IS NULL AS at_once, coalesce(due, at) AS due)", (*_NEW, *_BACK)),
    "priority": ("priority", (*_NEW, "rescheduled")),
    "expires_at": ("expires_at", (*_NEW, "rescheduled", "replayed")),
    "lease": ("struct(holder, attempts)", ("leased",)),
    "deadline": ("deadline", ("leased", _EXTENDED)),
    "counted": ("kind", ("leased", "released", "replayed")),
    # In the engine's words. A replayed dead letter has no reason.
    "reason": (
        "CASE kind WHEN 'lease_expired' THEN 'lease expired' WHEN 'replayed' THEN NULL ELSE reason END",
        ("nacked", "lease_expired", "dead_lettered", "replayed"),
    ),
}


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _latest_values() -> list[Column]:
    """Return, per message, the value of the last row that sets it."""
    found = [
        F.expr(f"max_by({sql}, `offset`) FILTER (WHERE kind IN ({_quoted(kinds)}))").alias(name)
        for name, (sql, kinds) in _LATEST.items()
    ]
    return [*found, F.max("message_id").alias("message_id"), F.max(MOMENT).alias(MOMENT)]


def _state() -> Column:
    """Return the state. A topic without streams only records how many messages became ready: those that were due."""
    kind = F.col("last.kind")
    counted = (F.col("_fired") > F.col("last.offset")) & (F.col("due.due") <= F.col(MOMENT))
    state = F.when(kind == "leased", "leased").when(kind == "dead_lettered", "dead")
    return state.when(kind.isin(*_READY) | F.col("due.at_once") | counted, "ready").otherwise("delayed")


def _attempts() -> Column:
    """Return the attempts. A release does not count as a delivery; a replayed dead letter starts again at 0."""
    counted, attempts = F.col("counted"), F.col("lease.attempts")
    before_release = F.greatest(attempts - 1, F.lit(0))
    found = F.when(counted == "leased", attempts).when(counted == "released", before_release)
    return found.otherwise(0).cast("int")
