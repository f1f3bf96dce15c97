"""The job `replay`: enqueue past messages again, each exactly once, from the journal or a lake, changed by SQL.

Chunks are ranges of offsets of all partitions: the n-th slice of each. So a chunk is close together in a log that the
partitions share, and time increases from chunk to chunk. A range of a log is the same forever, so the plan needs
nothing else; "up to now" becomes offsets when the plan is made. chunked_write.py writes each chunk once.

A message keeps its value, key, headers, priority and time to live, and its fairness key if the target topic uses them.
It is due immediately. Its headers say where it came from, in the same way as the engine's replays. The target topic
decides how often it is retried, because the sink has no column for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from heapline.contract.errors import BadRequest
from heapline.spark.jobs import chunked_write
from heapline.spark.jobs.chunked_write import JobFolder, Json, Server, Tell, selected, short_sql_errors, sink_columns
from heapline.spark.jobs.lake import in_ranges, journal_rows, lake_rows, offset_ranges, ranges_of
from heapline.spark.schema import PAIRS
from heapline.spark.target import server_options
from heapline.spark.topic_log import Ranges

REPLAY, REPLAYED_FROM, REPLAYED_ID = "heapline-replay", "heapline-replayed-from", "heapline-replayed-id"
LogPosition = datetime | Mapping[int, int] | None


@dataclass(frozen=True)
class ReplayResult:
    name: str
    topic: str
    into: str
    ranges: Ranges  # of the source, by partition
    messages: int
    chunks: int
    chunks_before: int
    seconds: float
    was_done: bool


def replay(
    spark: SparkSession,
    where: Mapping[str, str],
    topic: str,
    *,
    name: str,
    into: str | None = None,
    start: LogPosition = None,
    end: LogPosition = None,
    filter: str | None = None,
    count: int | None = None,
    select: str | None = None,
    lake: str | Path | None = None,
    source: Mapping[str, str] | None = None,
    rate: float | None = None,
    chunk_rows: int | None = None,
    folder: str | Path | None = None,
    tell: Tell | None = None,
) -> ReplayResult:
    """Enqueue the messages of `topic` between two positions of its log into `into` (default: the same topic), once.

    `start` and `end` are times or offsets by partition; the defaults are the beginning and now. `filter` is a SQL
    condition on the columns of the view `messages`, and `count` the number of rows that pass it and are enqueued: the
    first ones of each partition, as evenly as possible. `select` has SQL expressions whose columns replace those that a
    message would keep (`"priority + 10 AS priority"`). `where` names the server to write to, and to read from unless
    `source` names another (`{"path": …}`). With `lake`, an archive is read and then the log from its end on; with
    `source={}` as well, only the archive. `name` identifies the job, as for `load`.
    """
    chunked_write.check_name(name)
    if count is not None and count < 1:
        raise BadRequest(f"count is at least 1, not {count}")
    to, target = server_options(where), into or topic
    job = JobFolder(folder, name)
    log = _Log(spark, dict(where if source is None else source), None if lake is None else str(lake), topic)
    asked = {
        "topic": topic,
        "into": target,
        "start": _describe(start),
        "end": _describe(end),
        "filter": filter,
        "count": count,
        "select": select,
        "lake": None if lake is None else str(lake),
        "path": dict(source or {}).get("path"),
    }
    chunked_write.make_active(spark)
    with job.locked(), Server(where) as server:
        kept = keeps(name, server.topic(target).config.fairness == "keys")

        def rows_of(ranges: Ranges) -> Any:
            return reshaped(spark, log.messages(ranges), kept, select, filter)

        def make() -> tuple[list[Any], Json]:
            ranges = log.ranges(start, end)
            if count is not None:
                ranges = first_of(log.messages(ranges), ranges, filter, count)
            sink_columns({**to, "topic": target}, rows_of(ranges))
            size = min(chunked_write.chunk_size(chunk_rows, rate), chunked_write.CHUNK_ROWS)
            return sliced(ranges, size), {"ranges": {str(p): list(r) for p, r in ranges.items()}}

        plan = chunked_write.load_or_make_plan(job, "replay", name, asked, server.sinks, make)

        def write(chunk: Any, app: str, number: int) -> None:
            chunked_write.write_chunk(rows_of(_ranges(chunk)), to, target, app, number)

        ran = chunked_write.run_chunks(plan, job, server.sinks, write, rate=rate, tell=tell)
    return ReplayResult(name, topic, target, _ranges(plan.facts["ranges"]), **vars(ran))


class _Log:
    """The log that messages are read from."""

    def __init__(self, spark: Any, where: dict[str, str], lake: str | None, topic: str) -> None:
        self._spark, self._where, self._lake, self._topic = spark, where, lake, topic
        self._archive: DataFrame | None = None

    def ranges(self, start: LogPosition, end: LogPosition) -> Ranges:
        found = self._lake_ranges(start, end) if self._lake is not None else self._journal_ranges(start, end)
        backwards = [p for p, (first, last) in found.items() if first > last]
        if backwards:
            first, last = found[backwards[0]]
            raise BadRequest(f"partition {backwards[0]}: start offset {first} is after end offset {last}")
        return found

    def _journal_ranges(self, start: LogPosition, end: LogPosition) -> Ranges:
        options = {**_option("starting", start), **_option("ending", end)}
        whole = ranges_of(self._where, self._topic, **options)
        return {p: _within(r, start, end, p) for p, r in whole.items()}

    def _lake_ranges(self, start: LogPosition, end: LogPosition) -> Ranges:
        rows = self._archived()
        if isinstance(start, datetime):
            rows = rows.where(F.col("timestamp") >= F.lit(start))
        if isinstance(end, datetime):
            rows = rows.where(F.col("timestamp") < F.lit(end))
        return {p: _within(found, start, end, p) for p, found in offset_ranges(rows).items()}

    def _archived(self) -> DataFrame:
        if self._archive is None:
            # With `source={}`, only the archive is read.
            self._archive = lake_rows(self._spark, self._lake or "", self._where or None, self._topic, "messages")
        return self._archive

    def messages(self, ranges: Ranges) -> DataFrame:
        if self._lake is not None:
            return self._archived().where(in_ranges(ranges))
        where = {**self._where, "includeHeaders": "true"}
        start, end = ({p: span[i] for p, span in ranges.items()} for i in (0, 1))
        found: DataFrame = journal_rows(self._spark, where, self._topic, "messages", start=start, end=end)
        return found


def _option(which: str, position: LogPosition) -> dict[str, str]:
    return {f"{which}Timestamp": str(round(position.timestamp() * 1000))} if isinstance(position, datetime) else {}


def _within(found: tuple[int, int], start: LogPosition, end: LogPosition, partition: int) -> tuple[int, int]:
    """Limit a range to the given offsets. A partition that they do not name is not replayed."""
    first, last = found
    if isinstance(start, Mapping):
        first = max(first, start[partition]) if partition in start else last
    if isinstance(end, Mapping):
        last = min(last, end[partition]) if partition in end else first
    return first, last


def first_of(rows: Any, ranges: Ranges, condition: str | None, count: int) -> Ranges:
    """Return shorter ranges, which contain `count` rows that pass: the first of each partition, in turn."""
    with short_sql_errors():
        found = rows if condition is None else rows.where(condition)
        number = F.row_number().over(Window.partitionBy("partition").orderBy("offset"))
        first = found.select("partition", "offset", number.alias("number")).orderBy("number", "partition").limit(count)
        lasts = first.groupBy("partition").agg(F.max("offset").alias("last")).collect()
        ends = {row["partition"]: row["last"] + 1 for row in lasts}
    return {p: (start, ends.get(p, start)) for p, (start, _) in ranges.items()}


def sliced(ranges: Ranges, chunk_rows: int) -> list[Json]:
    """Divide ranges into chunks.

    >>> sliced({0: (10, 14), 1: (0, 2)}, 3)
    [{'0': [10, 12], '1': [0, 1]}, {'0': [12, 14], '1': [1, 2]}]
    """
    total = sum(last - first for first, last in ranges.values())
    count = -(-total // chunk_rows)

    def cut(span: tuple[int, int], n: int) -> int:
        return span[0] + (span[1] - span[0]) * n // count

    return [{str(p): [cut(r, n), cut(r, n + 1)] for p, r in ranges.items()} for n in range(count)]


def _ranges(stored: Json) -> Ranges:
    return {int(p): (first, last) for p, (first, last) in stored.items()}


def _describe(position: LogPosition) -> Any:
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise BadRequest(f"{position.isoformat()} has no time zone; add one, as in 2026-01-31T12:00:00Z")
        return position.isoformat()
    return None if position is None else {str(p): offset for p, offset in sorted(position.items())}


def keeps(name: str, fair: bool) -> dict[str, str]:
    """Return the sink's columns as SQL on the columns of the view: what a message keeps, and the added headers."""
    given = {
        REPLAY: f"'{name}'",
        REPLAYED_FROM: "concat(topic, '/', partition, '/', `offset`)",
        REPLAYED_ID: "message_id",
    }
    pairs = ", ".join(f"struct('{key}' AS key, CAST({value} AS BINARY) AS value)" for key, value in given.items())
    names = ", ".join(f"'{key}'" for key in given)
    return {
        "value": "`value`",
        "key": "`key`",
        "priority": "priority",
        "headers": f"concat(filter(coalesce(headers, CAST(array() AS {PAIRS})), h -> h.key NOT IN ({names})), "
        f"array({pairs}))",
        "ttl": "(unix_millis(expires_at) - unix_millis(coalesce(deliver_at, enqueued_at))) / 1000D",
        **({"fairness_key": "fairness_key"} if fair else {}),
    }


def reshaped(
    spark: Any, rows: Any, kept: Mapping[str, str], select: str | None = None, condition: str | None = None
) -> Any:
    """Return messages as rows of the sink: what they keep, replaced by the columns of `select`."""
    with short_sql_errors():
        found = rows if condition is None else rows.where(condition)
        replaced: Sequence[str] = () if select is None else selected(spark, found, select).columns
        rest = [f"{sql} AS `{column}`" for column, sql in kept.items() if column not in replaced]
        return selected(spark, found, ", ".join([*([select] if select is not None else []), *rest]))
