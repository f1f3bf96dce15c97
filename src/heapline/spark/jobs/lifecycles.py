"""Lifecycles: one row per message with its times, attempts and outcome, derived from events.

`lifecycles` is a transformation of DataFrames only; lifecycle_updates.py keeps the result on disk.

*How it works.* Each event becomes a *step*: the few columns that it sets for its message. Steps are brought to their
message in one shuffle and folded in the order of their offsets; a message never leaves its partition, so this order is
complete. A row of an earlier fold is a step as well (`before`), so that new events can be added without reading the old
ones again.

*What events do not record.* A purge names no messages, except on the Postgres broker: it removes all messages that wait
in its partition. On a topic
with `streams=False`, timers that fire are counted and not named: there a message counts as waiting once a later firing
in its partition has passed its due time. `moved` rows record that a record was copied, also for messages that were
removed but are still held by a group. They add facts to messages that other events mention, and never make a row of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from heapline.spark.jobs.lake import topic_rows

#: Required columns of the view `events`, for reading with `columns=`.
NEEDS = (
    "topic", "partition", "offset", "timestamp", "kind", "message_id", "id", "at", "priority", "due", "attempts",
    "reason", "payload_bytes", "returned", "kept", "batch_id", "enqueued_at",
)  # fmt: skip
#: Required columns of rows that do not name messages.
MARK_NEEDS = ("topic", "partition", "offset", "timestamp", "kind", "id", "at")

#: States as numbers, which fold faster than strings. A message has ended from ACKED on; DEAD can be replayed.
WAITING, DELAYED, LEASED, DEAD, ACKED, EXPIRED, CANCELLED, PURGED, DROPPED, DELETED = range(10)
OUTCOMES = ("waiting", "delayed", "leased", "dead", "acked", "expired", "cancelled", "purged", "dead", "dead")
OVER = ACKED
_CODE_BITS = 4
#: The columns of a row, in order.
COLUMNS = (
    "topic", "partition", "message_id", "id", "priority", "enqueued_at", "due_at", "first_leased_at", "last_leased_at",
    "done_at", "attempts", "retries", "lease_expiries", "wait_ms", "service_ms", "outcome", "reason", "batch_id",
    "payload_bytes", "enqueued_offset", "last_offset", "ready_at", "is_over",
)  # fmt: skip

#: The columns of a step.
_STEP_COLUMNS = (
    "topic", "partition", "id", "message_id", "offset", "state", "priority", "enqueued_at", "moved", "enqueued_offset",
    "due_at", "ready_at", "first_leased_at", "last_leased_at", "done_at", "attempts", "attempt", "leases", "retries",
    "lease_expiries", "reason", "batch_id", "payload_bytes",
)  # fmt: skip


def lifecycles(events: Any, before: Any = None, marks: Any = None) -> Any:
    """Return one row per message that any event other than `moved` mentions.

    `before` has rows of an earlier call that these events continue. `marks` has the same events, or only those of the
    kinds `purged` and `fired` without an id, if that is cheaper than reading `events` twice.
    """
    steps = _steps(events)
    if before is not None:
        steps = steps.unionByName(_steps_before(before))
    folded = _folded(steps)
    marks = _marks(events if marks is None else marks)
    rows = folded.join(F.broadcast(marks), ["topic", "partition"], "left")
    return _finished(rows)


def topic_lifecycles(
    spark: Any, where: Mapping[str, str] | None, lake: str | None, topic: str, events: Any = None
) -> tuple[Any, Any]:
    """Return the lifecycles of a topic, and the events that they were derived from; these are read unless given."""
    if events is not None:
        return lifecycles(events), events
    events, marks = (topic_rows(spark, where, lake, topic, columns=columns) for columns in (NEEDS, MARK_NEEDS))
    return lifecycles(events, marks=marks), events


def _steps(events: Any) -> Any:
    """Return the step of each event."""
    kind, at, due = F.col("kind"), F.col("at"), F.col("due")
    is_new, is_lease = kind.isin("enqueued", "batch_committed"), kind == "leased"
    later = F.when(due.isNull(), WAITING).otherwise(DELAYED)
    state = (
        F.when(kind.isin("enqueued", "batch_committed", "nacked", "lease_expired", "replayed", "rescheduled"), later)
        .when(kind.isin("fired", "released"), WAITING)
        .when(is_lease, LEASED)
        .when(kind == "acked", ACKED)
        .when(kind == "dead_lettered", F.when(F.col("kept"), DEAD).otherwise(DROPPED))
        .when(kind == "dead_deleted", DELETED)
        .when(kind == "cancelled", CANCELLED)
        .when(kind == "purged", PURGED)  # if the event names its messages
        .when((kind == "expired") & F.col("returned"), EXPIRED)
    )
    ends = kind.isin("acked", "cancelled", "purged", "dead_lettered") | ((kind == "expired") & F.col("returned"))
    sets_due, gives_reason = is_new | (kind == "rescheduled"), kind.isin("nacked", "dead_lettered")
    computed = {
        "state": _packed("offset", state),
        "priority": F.when(sets_due, F.col("priority")),
        "enqueued_at": F.when(is_new, at),
        "moved": F.when(kind == "moved", F.struct("priority", "enqueued_at")),
        "enqueued_offset": F.when(is_new, F.col("offset")),
        "due_at": F.when(sets_due, F.greatest(at, due)),
        "ready_at": F.when(state == DELAYED, due),
        "first_leased_at": F.when(is_lease, at),
        "last_leased_at": F.when(is_lease, at),
        "done_at": F.when(ends, at),
        "attempts": F.when(is_lease, 1).when(kind == "released", -1).otherwise(0),
        "attempt": F.when(is_lease, F.col("attempts")),
        "leases": is_lease.cast("int"),
        "retries": (kind == "nacked").cast("int"),
        "lease_expiries": (kind == "lease_expired").cast("int"),
        "reason": F.when(kind == "lease_expired", F.lit("lease expired")).when(gives_reason, F.col("reason")),
        "batch_id": F.when(kind == "batch_committed", F.col("batch_id")),
    }
    steps = events.where(F.col("id").isNotNull() & ~kind.startswith("group_"))
    return steps.select(*_columns(_STEP_COLUMNS, computed))


def _steps_before(rows: Any) -> Any:
    """Return known rows as the first step of each message."""
    code = F.coalesce(*(F.when(F.col("outcome") == name, n) for n, name in enumerate(OUTCOMES)))
    computed = {
        "offset": F.col("last_offset"),
        "state": _packed("last_offset", code),
        "moved": F.lit(None).cast("struct<priority:bigint,enqueued_at:timestamp>"),
        "attempt": F.col("attempts"),
        "leases": F.col("first_leased_at").isNotNull().cast("int"),
    }
    return rows.select(*_columns(_STEP_COLUMNS, computed))


def _columns(names: Sequence[str], computed: Mapping[str, Any]) -> list[Any]:
    """Return columns in this order: the computed ones, and the others as they are."""
    return [computed[name].alias(name) if name in computed else F.col(name) for name in names]


def _packed(offset: str, code: Any) -> Any:
    """Return a state and its offset as one number, of which the largest is the latest."""
    return F.shiftleft(offset, _CODE_BITS) + code


def _folded(steps: Any) -> Any:
    """Fold steps to one row per message. One shuffle and one sort serve both the window and the aggregation."""
    so_far = Window.partitionBy("topic", "id").orderBy("offset").rowsBetween(Window.unboundedPreceding, 0)
    offset = F.col("offset")

    def latest(name: str) -> Any:
        return F.max_by(name, F.when(F.col(name).isNotNull(), offset)).alias(name)

    # A reschedule after the first delivery does not change when that delivery was due. A `before` row with a delivery
    # has its own due time.
    has_been_leased = F.sum("leases").over(so_far)
    steps = steps.withColumn("due_at", F.when((has_been_leased == 0) | (F.col("leases") > 0), F.col("due_at")))
    highest = ("partition", "message_id", "state", "enqueued_offset", "last_leased_at", "attempt", "batch_id")
    folded = steps.groupBy("topic", "id").agg(
        *(F.max(name).alias(name) for name in (*highest, "payload_bytes", "moved")),
        F.max("offset").alias("last_offset"),
        *(F.min(name).alias(name) for name in ("enqueued_at", "first_leased_at")),
        *(latest(name) for name in ("priority", "due_at", "ready_at", "done_at", "reason")),
        *(F.sum(name).cast("int").alias(name) for name in ("attempts", "retries", "lease_expiries")),
    )
    return folded.where(F.col("state").isNotNull())


def _marks(events: Any) -> Any:
    """Return, per partition, the purges in order and the time of the last firing that counted messages."""
    purge = F.when(F.col("kind") == "purged", F.struct("offset", "at"))
    fired = F.when(F.col("kind") == "fired", F.col("timestamp"))
    rows = events.where(F.col("kind").isin("purged", "fired") & F.col("id").isNull())
    return rows.groupBy("topic", "partition").agg(
        F.sort_array(F.collect_list(purge)).alias("purges"), F.max(fired).alias("fired_at")
    )


def _finished(rows: Any) -> Any:
    code, since = F.col("state") % (1 << _CODE_BITS), F.shiftright("state", _CODE_BITS)
    waits = code.isin(WAITING, DELAYED)
    purges = F.filter("purges", lambda purge: purge["offset"] > since)
    purge = F.when(waits & (F.size(purges) > 0), F.get(purges, F.lit(0)))
    fired = (code == DELAYED) & F.coalesce(F.col("ready_at") <= F.col("fired_at"), F.lit(False))
    rows = rows.withColumn("purge", purge)
    rows = rows.withColumn("code", F.when(F.col("purge").isNotNull(), PURGED).when(fired, WAITING).otherwise(code))
    return _as_columns(rows)


def _as_columns(rows: Any) -> Any:
    code = F.col("code")
    ended = code >= DEAD
    ms = {name: F.unix_millis(name) for name in ("first_leased_at", "last_leased_at", "due_at", "ended_at")}
    known, wait = F.col("enqueued_offset").isNotNull(), ms["first_leased_at"] - ms["due_at"]
    rows = rows.withColumn("ended_at", F.when(ended, F.coalesce(F.col("purge.at"), F.col("done_at"))))
    computed = {
        "done_at": F.col("ended_at"),
        "priority": F.coalesce("priority", "moved.priority"),
        "enqueued_at": F.coalesce("enqueued_at", "moved.enqueued_at"),
        # For a message that is older than these events, the number in its last lease may exceed the count.
        "attempts": F.when(known, F.col("attempts")).otherwise(F.greatest("attempts", "attempt")),
        "wait_ms": F.when(wait < 0, 0).otherwise(wait),
        "service_ms": F.when(code.isin(ACKED, DEAD, DROPPED, DELETED), ms["ended_at"] - ms["last_leased_at"]),
        "outcome": F.element_at(F.array(*map(F.lit, OUTCOMES)), code.cast("int") + 1),
        "ready_at": F.when(code == DELAYED, F.col("ready_at")),
        "is_over": code >= OVER,
    }
    return rows.select(*_columns(COLUMNS, computed))
