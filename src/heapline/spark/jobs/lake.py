"""Rows for jobs: the events or messages of a topic, from the journal, from the lake, or from both without a gap.

`lake` fixes both halves when it is called: first the version of the lake's table, whose files are read by name; then,
per partition, the journal from where that version ends to its durable end. Later archiving changes neither half, so the
same rows are returned again while others archive, compact or consume.

Only rows and columns are chosen here; docs/spark-schema.md says what they mean. A job that needs few columns names
them, because Spark does not tell a Python source, and columns that are not named are not decoded.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from heapline.contract.config import short
from heapline.contract.errors import BadRequest
from heapline.spark.lake.claims import Claim
from heapline.spark.lake.files import DAY_OF, DAY_US, PARTITIONED_BY, check_views, table_columns
from heapline.spark.lake.tables import LakeTable, check_same, missing_rows, open_table, require_table
from heapline.spark.target import subscribed
from heapline.spark.topic_log import Ranges

Offsets = Mapping[int, int]  # by partition
_PARTITION_TYPES = {"namespace": "string", "topic": "string", "date": "date"}


def topic_rows(
    spark: Any,
    where: Mapping[str, str] | None = None,
    lake: str | None = None,
    topic: str = "",
    view: str = "events",
    *,
    columns: Sequence[str] | None = None,
    start: Offsets | None = None,
    end: Offsets | None = None,
) -> Any:
    """Return the rows of a topic as a DataFrame with the given columns, or all columns of the view.

    `where` has options of the format `heapline` (`path`, or `heapline.url` and so on): the journal. `lake` is the
    directory of an archive; with both, the rows of the journal follow those of the archive without a gap. `start` and
    `end` are offsets by partition, for the journal only.
    """
    if not topic:
        raise BadRequest("no topic given")
    if lake is None:
        if where is None:
            raise BadRequest(f"no source of {view}; give options of the format heapline (path, heapline.url) or a lake")
        return journal_rows(spark, where, topic, view, columns=columns, start=start, end=end)
    if start or end:
        raise BadRequest("offsets apply to the journal, not to a lake; filter the DataFrame by partition and offset")
    found = lake_rows(spark, lake, None if where is None else dict(where), topic, view)
    return found if columns is None else found.select(*columns)


def journal_rows(
    spark: Any,
    where: Mapping[str, str],
    topic: str,
    view: str = "events",
    *,
    columns: Sequence[str] | None = None,
    start: Offsets | None = None,
    end: Offsets | None = None,
    source: str = "heapline",
) -> Any:
    """Return the rows in the journal. A batch is fixed when it is loaded, so every action reads the same rows.

    `source` is the name of a format that has the options of `heapline`.
    """
    reader = spark.read.format(source).options(**where).option("view", view).option("subscribe", topic)
    if columns is not None:
        reader = reader.option("columns", ",".join(columns))
    for name, offsets in (("startingOffsets", start), ("endingOffsets", end)):
        if offsets is not None:
            reader = reader.option(name, _offsets_json({topic: offsets}))
    return reader.load()


def has_messages(where: Mapping[str, str] | None, lake: str | None, topic: str) -> bool:
    """Return whether `topic_rows` can return the view `messages`: a broker without a journal has events alone."""
    if where is None:
        return lake is not None and open_table(lake, "messages") is not None
    with subscribed(where, subscribe=topic) as (subscription, _):
        return all(log.ref.has_journal for log in subscription.logs.values())


def _offsets_json(offsets: Mapping[str, Offsets]) -> str:
    return json.dumps({topic: {str(p): offset for p, offset in parts.items()} for topic, parts in offsets.items()})


def offset_ranges(rows: Any) -> Ranges:
    """Return the first offset and the end of each partition that has rows."""
    found = rows.groupBy("partition").agg(F.min("offset"), F.max("offset")).collect()
    return {partition: (first, last + 1) for partition, first, last in sorted(found)}


def in_ranges(ranges: Ranges) -> Any:
    """Return the condition for rows whose offset is in the range of their partition."""
    partition, offset = F.col("partition"), F.col("offset")
    tests = ((partition == p) & (offset >= first) & (offset < end) for p, (first, end) in ranges.items())
    return reduce(operator.or_, tests, F.lit(False))


def ranges_of(where: Mapping[str, str], topic: str, **options: str) -> Ranges:
    """Return the offsets that a batch read with these options would read now. Runs no Spark job."""
    with subscribed(where, subscribe=topic, **options) as (subscription, read):
        starts = subscription.resolve(read.start, "startingOffsets", late="latest")
        ends = subscription.resolve(read.end, "endingOffsets", late="latest")
        name = short(topic)
        return {p: (start, ends[name][p]) for p, start in sorted(starts[name].items())}


def lake(
    spark: Any,
    lake_dir: str | Path,
    where: Mapping[str, str] | None = None,
    topic: str | Sequence[str] | None = None,
    view: str = "messages",
) -> Any:
    """Return the rows of a view in the lake and, with `where`, those that only the journal has.

    Without a topic, return all rows of the lake. The columns are the view's, then `namespace` and `date`.
    """
    check_views((view,))
    topics = None if topic is None else [short(t) for t in ([topic] if isinstance(topic, str) else topic)]
    if where is None:
        return archived(spark, require_table(lake_dir, view), topics)
    if not topics:
        raise BadRequest("no topics given; the lake and the journal are joined per topic")
    table = open_table(lake_dir, view)  # before the journal is read, so that the journal is never behind
    live = _live(spark, table, where, topics, view)
    return live if table is None else archived(spark, table, topics).unionByName(live)


lake_rows = lake  # for functions that have a parameter `lake`


def archived(spark: Any, table: LakeTable, topics: Sequence[str] | None = None) -> Any:
    """Return the rows of this version of a table."""
    columns = table_columns(table.view)
    files = [file.uri for file in table.files(topics)]
    if not files:
        return spark.createDataFrame([], ", ".join(f"`{name}` {kind}" for name, kind in columns))
    stored = [f"`{name}` {kind}" for name, kind in columns if name not in PARTITIONED_BY]
    in_path = [f"`{name}` {_PARTITION_TYPES[name]}" for name in PARTITIONED_BY]
    # Spark finds the partition columns in the paths below `basePath`.
    reader = spark.read.schema(", ".join(stored + in_path)).option("basePath", table.root)
    return reader.parquet(*files).select(*(f"`{name}`" for name, _ in columns))


def _live(spark: Any, table: LakeTable | None, where: Mapping[str, str], topics: list[str], view: str) -> Any:
    options = {**where, "subscribe": ",".join(topics), "view": view}
    if "path" in options:
        options["path"] = os.path.abspath(options["path"])  # Spark plans in a process with its own working directory
    claims = _missing(table, options)
    starts = _offsets_json({t: {p: start for p, (start, _) in c.ranges.items()} for t, c in claims.items()})
    ends = _offsets_json({t: c.ends for t, c in claims.items()})
    reader = spark.read.format("heapline").options(**options).option("includeHeaders", "true")
    rows = reader.option("startingOffsets", starts).option("endingOffsets", ends).load()
    return rows.selectExpr(*(_expression(view, name) for name, _ in table_columns(view)))


def _missing(table: LakeTable | None, options: Mapping[str, str]) -> dict[str, Claim]:
    """Return what the table lacks of each topic, up to the durable end. Raises DataLost if the journal lacks it too."""
    missing = {}
    with subscribed(options) as (subscription, _):
        for topic, log in subscription.logs.items():
            missing[topic] = missing_rows(table, log)
            if table is not None:
                check_same(table, log)
    return missing


def _expression(view: str, name: str) -> str:
    if name == "namespace":
        return "CASE WHEN contains(topic, '/') THEN substring_index(topic, '/', 1) ELSE 'default' END AS namespace"
    if name == "date":  # in UTC, whatever the session's time zone
        return f"date_from_unix_date(CAST(floor(unix_micros({DAY_OF[view]}) / {DAY_US}) AS INT)) AS date"
    return f"`{name}`"
