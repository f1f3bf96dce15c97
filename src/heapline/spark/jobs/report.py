"""The job `report`: how a topic performed, as a few small tables of waits, service times, throughput, retries and keys.

Everything is derived from the lifecycles, one row per message, except the firing of timers, which is read from the
events, and the keys, which are read from the messages. Percentiles are Spark's approximate ones, accurate to 1/10,000
of the rank. report_page.py decides what is shown.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from heapline.spark.jobs.lake import has_messages, topic_rows
from heapline.spark.jobs.lifecycles import topic_lifecycles

PERCENTILES = (0.5, 0.9, 0.99)
PRIORITIES_MAX = 40  # priorities with their own row, the most frequent ones first
RETRIES_MAX = 10  # this many or more are one row
BUCKETS_MAX = 120
_WIDTHS = (1, 2, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400)  # seconds
#: Required columns of the lifecycles.
COLUMNS = (
    "id", "priority", "enqueued_at", "due_at", "done_at", "attempts", "retries", "lease_expiries", "wait_ms",
    "service_ms", "outcome", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of durations in ms; None if there are no durations."""

    count: int
    p50: int | None
    p90: int | None
    p99: int | None
    max: int | None


@dataclass(frozen=True)
class OfPriority:
    priority: int | None  # None: all priorities
    messages: int
    never_leased: int  # they have no wait yet, so the percentiles do not include them
    wait: Percentiles  # from the due time to the first lease
    service: Percentiles  # from the last lease to the end


@dataclass(frozen=True)
class Bucket:
    at_ms: int
    enqueued: int
    done: int


@dataclass(frozen=True)
class Counted:
    what: str
    messages: int


@dataclass(frozen=True)
class Delays:
    """Delays of messages that had a delivery time and were not rescheduled."""

    to_ready: Percentiles  # from the due time until the timer fired; empty if the log does not name fired messages
    to_leased: Percentiles  # from the due time to the first lease


@dataclass(frozen=True)
class Report:
    topic: str
    first_ms: int | None  # the first enqueue
    last_ms: int | None  # the last enqueue or end
    messages: int
    deliveries: int
    retries: int
    lease_expiries: int
    priorities: tuple[OfPriority, ...]  # the first is for all priorities
    bucket_seconds: int
    throughput: tuple[Bucket, ...]
    outcomes: tuple[Counted, ...]
    retried: tuple[Counted, ...]  # messages by number of retries
    dead_reasons: tuple[Counted, ...]
    delays: Delays | None  # None: no message was delayed
    keys: tuple[Counted, ...]  # the busiest
    with_key: int


def report(
    spark: Any,
    where: Mapping[str, str] | None,
    topic: str,
    *,
    lake: str | None = None,
    lifecycles: Any = None,
    events: Any = None,
    messages: Any = None,
    since: datetime | None = None,
    until: datetime | None = None,
    top: int = 10,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Report on the messages that were enqueued in [since, until).

    DataFrames that are given are used instead of reading.
    """
    tell = tell or (lambda _: None)
    if lifecycles is None:
        lifecycles, events = topic_lifecycles(spark, where, lake, topic, events)
    if messages is None and (where or lake) and has_messages(where, lake, topic):
        messages = topic_rows(spark, where, lake, topic, "messages", columns=("key", "enqueued_at"))
    rows = lifecycles.select(*COLUMNS).persist()
    try:
        meant = functools.partial(within, since=since, until=until)
        # Messages that were enqueued before the first event have neither value.
        fresh = rows.where(meant("enqueued_at")).where("priority IS NOT NULL")
        tell("reading lifecycles …")
        (all_,) = fresh.agg(*_totals()).collect()
        tell("waits by priority …")
        priorities = _by_priority(fresh)
        tell("throughput …")
        seconds, throughput = _throughput(rows, meant)
        tell("retries and dead letters …")
        outcomes, retried, reasons = _ends(fresh, top)
        tell("delays and keys …")
        delays = _delays(fresh, events) if all_.delayed else None
        keys = () if messages is None else _keys(messages.where(meant("enqueued_at")), top)
    finally:
        rows.unpersist()
    return Report(
        topic=topic,
        first_ms=all_.first,
        last_ms=all_.last,
        messages=all_.messages,
        deliveries=all_.deliveries or 0,
        retries=all_.retries or 0,
        lease_expiries=all_.expiries or 0,
        priorities=priorities,
        bucket_seconds=seconds,
        throughput=throughput,
        outcomes=outcomes,
        retried=tuple(sorted(retried, key=lambda c: int(c.what))),
        dead_reasons=reasons,
        delays=delays,
        keys=keys[1:],
        with_key=keys[0].messages if keys else 0,
    )


def within(column: str, since: datetime | None, until: datetime | None) -> Any:
    tests = [F.col(column).isNotNull()]
    if since is not None:
        tests.append(F.col(column) >= F.timestamp_millis(F.lit(int(since.timestamp() * 1000))))
    if until is not None:
        tests.append(F.col(column) < F.timestamp_millis(F.lit(int(until.timestamp() * 1000))))
    return functools.reduce(operator.and_, tests)


def _totals() -> list[Any]:
    return [
        F.count("*").alias("messages"),
        F.sum("attempts").alias("deliveries"),
        F.sum("retries").alias("retries"),
        F.sum("lease_expiries").alias("expiries"),
        F.unix_millis(F.min("enqueued_at")).alias("first"),
        F.unix_millis(F.greatest(F.max("enqueued_at"), F.max("done_at"))).alias("last"),
        F.count_if(F.col("due_at") > F.col("enqueued_at")).alias("delayed"),
    ]


def _spread(column: Any, name: str) -> list[Any]:
    """Return the aggregates that `_percentiles` reads."""
    quantiles = F.percentile_approx(column, list(PERCENTILES), 10_000)
    return [F.count(column).alias(f"{name}_count"), quantiles.alias(f"{name}_at"), F.max(column).alias(f"{name}_max")]


def _percentiles(row: Any, name: str) -> Percentiles:
    p50, p90, p99 = row[f"{name}_at"] or (None, None, None)
    return Percentiles(row[f"{name}_count"], p50, p90, p99, row[f"{name}_max"])


def _by_priority(fresh: Any) -> tuple[OfPriority, ...]:
    rows = (
        fresh.rollup("priority")
        .agg(
            F.grouping("priority").alias("is_all"),
            F.count("*").alias("messages"),
            *_spread(F.col("wait_ms"), "wait"),
            *_spread(F.col("service_ms"), "service"),
        )
        .orderBy(F.desc("is_all"), F.desc("messages"), "priority")
        .limit(PRIORITIES_MAX + 1)
        .collect()
    )
    found = [
        OfPriority(
            None if row.is_all else row.priority,
            row.messages,
            row.messages - row.wait_count,
            _percentiles(row, "wait"),
            _percentiles(row, "service"),
        )
        for row in rows
    ]
    return tuple(sorted(found, key=lambda of: (of.priority is not None, of.priority or 0)))


def _throughput(rows: Any, meant: Callable[..., Any]) -> tuple[int, tuple[Bucket, ...]]:
    """Count enqueued and ended messages per bucket. Messages that ended count whenever they were enqueued."""
    moments = [
        rows.where(meant(column)).select(F.unix_millis(column).alias("ms"), F.lit(kind).alias("kind"))
        for kind, column in enumerate(("enqueued_at", "done_at"))
    ]
    both = moments[0].unionAll(moments[1])
    (span,) = both.agg(F.min("ms").alias("low"), F.max("ms").alias("high")).collect()
    if span.low is None:
        return _WIDTHS[0], ()
    width = bucket_width(span.low, span.high)
    number = F.floor(F.col("ms") / (width * 1000)).cast("bigint")
    counted = both.groupBy(number.alias("n")).agg(
        F.count_if(F.col("kind") == 0).alias("new"), F.count_if(F.col("kind") == 1).alias("done")
    )
    found = {row.n: row for row in counted.collect()}
    return width, tuple(
        Bucket(n * width * 1000, found[n].new, found[n].done) if n in found else Bucket(n * width * 1000, 0, 0)
        for n in range(min(found), max(found) + 1)
    )


def bucket_width(low_ms: int, high_ms: int) -> int:
    """Return the width of a bucket in seconds: the first round width that does not give too many buckets.

    >>> bucket_width(0, 60_000), bucket_width(0, 86_400_000), bucket_width(0, 10 * 365 * 86_400_000)
    (1, 900, 2678400)
    """
    span = (high_ms - low_ms) / 1000
    days = 86400 * -(-span // (86400 * BUCKETS_MAX))
    return next((width for width in _WIDTHS if span / width <= BUCKETS_MAX), int(days))


def _ends(fresh: Any, top: int) -> tuple[tuple[Counted, ...], ...]:
    """Count outcomes, numbers of retries, and reasons of dead letters in one pass."""
    values = (
        F.col("outcome"),
        F.when(F.col("retries") > 0, F.least("retries", F.lit(RETRIES_MAX)).cast("string")),
        F.when(F.col("outcome") == "dead", F.coalesce("reason", F.lit(""))),
    )
    facts = F.array(*(F.struct(F.lit(kind).alias("kind"), what.alias("what")) for kind, what in enumerate(values)))
    exploded = fresh.select(F.explode(facts).alias("fact")).select("fact.*").where("what IS NOT NULL")
    counted = exploded.groupBy("kind", "what").agg(F.count("*").alias("messages"))
    rank = F.row_number().over(Window.partitionBy("kind").orderBy(F.desc("messages"), "what"))
    rows = counted.withColumn("rank", rank).where(F.col("rank") <= max(top, 20)).orderBy("rank").collect()
    found = [tuple(Counted(row.what, row.messages) for row in rows if row.kind == kind) for kind in range(3)]
    return found[0], found[1], found[2][:top]


def _delays(fresh: Any, events: Any) -> Delays:
    delayed = fresh.where("due_at > enqueued_at").select("id", "due_at", "wait_ms")
    if events is not None:
        timers = (
            events.where(F.col("kind").isin("fired", "rescheduled") & F.col("id").isNotNull())
            .groupBy("id")
            .agg(
                F.min(F.when(F.col("kind") == "fired", F.col("timestamp"))).alias("fired_at"),
                F.count_if(F.col("kind") == "rescheduled").alias("moved"),
            )
        )
        delayed = delayed.join(timers, "id", "left").where("coalesce(moved, 0) = 0")
        to_ready = F.unix_millis("fired_at") - F.unix_millis("due_at")
    else:
        to_ready = F.lit(None).cast("bigint")
    (row,) = delayed.agg(*_spread(to_ready, "ready"), *_spread(F.col("wait_ms"), "leased")).collect()
    return Delays(_percentiles(row, "ready"), _percentiles(row, "leased"))


def _keys(messages: Any, top: int) -> tuple[Counted, ...]:
    """Return the number of messages with a key, followed by the busiest keys."""
    grouped = messages.where("key IS NOT NULL").groupBy("key").agg(F.count("*").alias("n")).persist()
    try:
        (total,) = grouped.agg(F.sum("n").alias("n")).collect()
        rows = grouped.orderBy(F.desc("n"), "key").limit(top).collect()
    finally:
        grouped.unpersist()
    busiest = (Counted(bytes(row.key).decode(errors="backslashreplace"), row.n) for row in rows)
    return Counted("", total.n or 0), *busiest
