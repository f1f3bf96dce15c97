"""`lake`: what is archived and what is not yet, as one DataFrame without gap or overlap.

Both halves are settled when it is called. First the version of the lake's table, whose files are read by name; then,
partition by partition, the journal from where that version ends to where it is durable. What is archived later changes
neither: the same rows come again, whoever archives, compacts or works meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heapline.errors import BadRequest
from heapline.spark.lake.claims import Claim, claim_of
from heapline.spark.lake.layout import DAY_OF, DAY_US, PARTITIONED_BY, check_views, table_columns
from heapline.spark.lake.sameness import check_same
from heapline.spark.lake.tables import LakeTable, need_table, open_table
from heapline.spark.options import parse_options, plain_topic
from heapline.spark.positions import Subscription
from heapline.spark.sources import settled, source_of

_PARTITION_TYPES = {"namespace": "string", "topic": "string", "date": "date"}


def lake(
    spark: Any, lake_dir: str | Path, where: Mapping[str, str] | None = None,
    topic: str | Sequence[str] | None = None, view: str = "messages",
) -> Any:  # fmt: skip
    """The rows of a view: of the lake, and with `where` also those that only the journal has. Without a topic, all that
    the lake has. Columns: the view's, then `namespace` and `date`."""
    check_views((view,))
    topics = None if topic is None else [plain_topic(t) for t in ([topic] if isinstance(topic, str) else topic)]
    if where is None:
        return archived(spark, need_table(lake_dir, view), topics)
    if not topics:
        raise BadRequest("say which topics: the lake and the journal of each are joined")
    table = open_table(lake_dir, view)  # before the journal is looked at, so that that is never behind it
    live = _live(spark, table, where, topics, view)
    return live if table is None else archived(spark, table, topics).unionByName(live)


def archived(spark: Any, table: LakeTable, topics: Sequence[str] | None = None) -> Any:
    """The rows of this version of a table."""
    columns = table_columns(table.view)
    files = [file.uri for file in table.files(topics)]
    if not files:
        return spark.createDataFrame([], ", ".join(f"`{name}` {kind}" for name, kind in columns))
    stored = [f"`{name}` {kind}" for name, kind in columns if name not in PARTITIONED_BY]
    found = [f"`{name}` {_PARTITION_TYPES[name]}" for name in PARTITIONED_BY]
    # Spark finds the partition columns in the paths below this one.
    reader = spark.read.schema(", ".join(stored + found)).option("basePath", table.root)
    return reader.parquet(*files).select(*(f"`{name}`" for name, _ in columns))


def _live(spark: Any, table: LakeTable | None, where: Mapping[str, str], topics: list[str], view: str) -> Any:
    options = {**where, "subscribe": ",".join(topics), "view": view}
    if "path" in options:
        options["path"] = os.path.abspath(options["path"])  # Spark plans in a process that may have begun elsewhere
    claims = _missing(table, options)
    starts = {t: {str(p): start for p, (start, _) in claim.ranges.items()} for t, claim in claims.items()}
    ends = {t: {str(p): end for p, end in claim.ends.items()} for t, claim in claims.items()}
    reader = spark.read.format("heapline").options(**options).option("includeHeaders", "true")
    rows = reader.option("startingOffsets", json.dumps(starts)).option("endingOffsets", json.dumps(ends)).load()
    return rows.selectExpr(*(_expression(view, name) for name, _ in table_columns(view)))


def _missing(table: LakeTable | None, options: Mapping[str, str]) -> dict[str, Claim]:
    """What the table lacks of each topic, up to what is durable now. DataLost if the journal does not have it."""
    asked = settled(parse_options(options, streaming=False))
    subscription = Subscription(source_of(asked), asked.which)
    found = {}
    try:
        subscription.find()
        for topic, log in subscription.logs.items():
            starts = log.starts()
            journal = {p: (starts[p], end) for p, end in log.ends().items()}
            kept = None if table is None else table.kept(topic)
            found[topic] = claim_of(topic, kept, log.ref.incarnation, journal)
            if table is not None:
                check_same(table, log)
    finally:
        subscription.close()
    return found


def _expression(view: str, name: str) -> str:
    if name == "namespace":
        return "CASE WHEN contains(topic, '/') THEN substring_index(topic, '/', 1) ELSE 'default' END AS namespace"
    if name == "date":  # in UTC, whatever the session's time zone is
        return f"date_from_unix_date(CAST(floor(unix_micros({DAY_OF[view]}) / {DAY_US}) AS INT)) AS date"
    return f"`{name}`"
