"""Lifecycles that are kept up: a table with one row per message, brought further by what has happened since.

A run reads only new events, and the rows of messages that were not over yet; it writes rows anew for those and for what
is new. The table knows how far it goes (lifecycle_table.py), so runs may be killed and repeated: nothing is counted
twice. Executors write the files and must see the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from heapline.errors import BadRequest
from heapline.spark.jobs.inputs import events_of, journal_events
from heapline.spark.jobs.lifecycle_table import PARTITIONED_BY, Kept, LifecycleTable
from heapline.spark.jobs.lifecycles import COLUMNS, MARK_NEEDS, NEEDS, lifecycles
from heapline.spark.log import DataLost
from heapline.spark.options import parse_options, plain_topic
from heapline.spark.positions import Subscription
from heapline.spark.sources import settled, source_of

_TYPES = {
    "partition": "int", "attempts": "int", "retries": "int", "lease_expiries": "int", "is_over": "boolean",
    "topic": "string", "message_id": "string", "outcome": "string", "reason": "string", "batch_id": "string",
}  # fmt: skip
TYPES = {name: _TYPES.get(name, "timestamp" if name.endswith("_at") else "bigint") for name in COLUMNS}
STORED = [name for name in COLUMNS if name not in PARTITIONED_BY]


@dataclass(frozen=True)
class KeptResult:
    topic: str
    events: int  # rows of the log that were new
    rows: int  # of messages that were written, new or anew
    ends: Mapping[int, int]  # by partition: how far the table goes


def keep_lifecycles(
    spark: Any, where: Mapping[str, str] | None, topic: str, out_dir: str, *, lake: str | None = None
) -> KeptResult:
    """Bring the table in `out_dir` up to what has happened. With a `lake`, what the journal no longer has comes from
    there."""
    name = plain_topic(topic)
    table = LifecycleTable(out_dir, TYPES)
    incarnation, starts, ends = _reach(spark, where, name, lake)
    kept = table.kept(name, max(ends, default=-1) + 1)
    if kept is not None and kept.incarnation != incarnation:
        raise BadRequest(f"topic {name!r} was deleted and made again: keep its lifecycles in another directory")
    done = {} if kept is None else kept.ends
    if lake is not None and where is not None and any(starts[p] > done.get(p, 0) for p in ends):
        starts = _starts_with(spark, where, name, lake, ends)
    first = {p: starts[p] if kept is None else done.get(p, 0) for p in ends}
    lost = [p for p in ends if starts[p] > first[p]]
    if lost:
        remedy = "use a lake" if lake is None else "the lake does not have them either, so begin another table"
        raise DataLost(f"events of topic {name!r} in partitions {lost} were reclaimed before they were kept: {remedy}")
    new = sum(ends[p] - first[p] for p in ends)
    if not new:
        return KeptResult(name, 0, 0, done)
    events, marks = _new_events(spark, where, name, lake, first, ends)
    before = read_lifecycles(spark, out_dir, topic=name, over=False) if kept is not None else None
    folder = table.folder()
    with _micros(spark):
        rows = lifecycles(events, before, marks).select(*STORED, "is_over")
        rows.write.partitionBy("is_over").parquet(f"{table.root}/{folder}")
    written = table.commit(name, folder, Kept(incarnation, ends))
    return KeptResult(name, new, written, ends)


def _reach(
    spark: Any, where: Mapping[str, str] | None, topic: str, lake: str | None
) -> tuple[int, dict[int, int], dict[int, int]]:
    """(incarnation, first offset by partition, end by partition)"""
    if where is None:
        if lake is None:
            raise BadRequest("say where the events are: options of the format heapline, or a lake")
        from pyspark.sql import functions as F

        rows = events_of(spark, None, lake, topic, columns=["partition", "offset"])
        found = rows.groupBy("partition").agg(F.min("offset").alias("a"), F.max("offset").alias("b")).collect()
        return 0, {r["partition"]: r["a"] for r in found}, {r["partition"]: r["b"] + 1 for r in found}
    options = settled(parse_options({**where, "subscribe": topic, "view": "events"}, streaming=False))
    subscription = Subscription(source_of(options), options.which)
    try:
        subscription.find()
        log = subscription.logs[topic]
        return log.ref.incarnation, dict(log.starts()), dict(log.ends())
    finally:
        subscription.close()


def _starts_with(
    spark: Any, where: Mapping[str, str], topic: str, lake: str, ends: Mapping[int, int]
) -> dict[int, int]:
    """Where lake and journal together begin: asked only if the journal alone does not go back far enough."""
    from pyspark.sql import functions as F

    rows = events_of(spark, where, lake, topic, columns=["partition", "offset"])
    found = dict(tuple(row) for row in rows.groupBy("partition").agg(F.min("offset")).collect())
    return {p: found.get(p, end) for p, end in ends.items()}


def _new_events(
    spark: Any, where: Mapping[str, str] | None, topic: str, lake: str | None, first: dict[int, int],
    ends: dict[int, int],
) -> tuple[Any, Any]:  # fmt: skip
    if lake is None:
        assert where is not None
        events = journal_events(spark, where, topic, columns=NEEDS, start=first, end=ends)
        return events, journal_events(spark, where, topic, columns=MARK_NEEDS, start=first, end=ends)
    from pyspark.sql import functions as F

    offset, partition = F.col("offset"), F.col("partition")
    within = [(partition == p) & (offset >= first[p]) & (offset < ends[p]) for p in ends]
    events = events_of(spark, where, lake, topic, columns=NEEDS).where(reduce(lambda a, b: a | b, within))
    return events, events


@contextmanager
def _micros(spark: Any) -> Any:
    """Times as every reader of Delta knows them, while files are written."""
    name = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(name)
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before)


def read_lifecycles(spark: Any, out_dir: str, *, topic: str | None = None, over: bool | None = None) -> Any:
    """What is kept, as one DataFrame with the columns of `lifecycles`."""
    from pyspark.sql import functions as F

    table = LifecycleTable(out_dir, TYPES)
    if not table.exists:
        raise BadRequest(f"no lifecycles are kept in {out_dir!r}")
    schema = ", ".join(f"`{name}` {TYPES[name]}" for name in STORED)
    parts = [
        spark.read.schema(schema).parquet(*(f"{table.root}/{file.path}" for file in files))
        .withColumns({"topic": F.lit(name), "is_over": F.lit(is_over)}).select(*COLUMNS)
        for (name, is_over), files in table.files(None if topic is None else plain_topic(topic), over).items()
    ]  # fmt: skip
    empty = spark.createDataFrame([], ", ".join(f"`{name}` {kind}" for name, kind in TYPES.items()))
    return reduce(lambda one, other: one.unionByName(other), parts, empty)
