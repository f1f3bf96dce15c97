"""Messages of the past into a topic once more, each exactly once: from the journal or from a lake, chosen and changed
by SQL.

Chunks are ranges of offsets, of all partitions at once: the n-th slice of each, so that a chunk lies close together in
a log that the partitions share, and time goes on from chunk to chunk. A range of a log reads the same for ever, so the
plan need hold nothing else; "up to now" becomes offsets when it is made. How chunks are written once is in chunked.py.

A message keeps its value, key, headers, priority and time to live, and its fairness key where the target takes turns by
it; it is due at once. Its headers say where it came from, in the words of the engine's own replay. How often it may be
retried is the target's to say: the sink has no column for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapline.errors import BadRequest
from heapline.spark.jobs.chunked import JobFolder, Json, Tell, check_name, run_chunks, settled_plan
from heapline.spark.jobs.ranges import Ranges, ranges_of
from heapline.spark.jobs.server import Server, make_active, server_options
from heapline.spark.jobs.shaping import selected, sink_columns, told_plainly
from heapline.spark.options import plain_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHUNK_ROWS = 100_000  # offsets: rows of all kinds
RATE_SECONDS = 2.0
FOLDER = "heapline-jobs"
REPLAY, REPLAYED_FROM, REPLAYED_ID = "heapline-replay", "heapline-replayed-from", "heapline-replayed-id"
_PAIRS = "array<struct<key:string,value:binary>>"
Place = datetime | Mapping[int, int] | None


@dataclass(frozen=True)
class ReplayResult:
    name: str
    topic: str
    into: str
    ranges: dict[int, tuple[int, int]]  # of the source, by partition
    messages: int
    chunks: int
    chunks_before: int
    seconds: float
    was_done: bool


def replay(
    spark: SparkSession, where: Mapping[str, str], topic: str, *, name: str, into: str | None = None,
    start: Place = None, end: Place = None, filter: str | None = None, select: str | None = None,
    lake: str | Path | None = None, source: Mapping[str, str] | None = None, rate: float | None = None,
    chunk_rows: int | None = None, folder: str | Path | None = None, tell: Tell | None = None,
) -> ReplayResult:  # fmt: skip
    """Put the messages of `topic` between two places of its log into `into` (the same topic unless given), once.

    `start` and `end` are moments or offsets by partition; without them from the beginning and up to now. `filter` is a
    SQL condition on the columns of the view `messages`; `select` are SQL expressions whose columns replace what a
    message would keep (`"priority + 10 AS priority"`). `where` names the server that is written to, and read from too
    unless `source` names another place (`{"path": …}`). With `lake` an archive is read, and the log from its end on;
    with `source={}` as well, the archive alone. `name` is the job, as for `load`.
    """
    check_name(name)
    to, target = server_options(where), into or topic
    job = JobFolder(folder if folder is not None else Path(FOLDER) / name)
    log = _Log(spark, dict(where if source is None else source), None if lake is None else str(lake), topic)
    asked = {
        "topic": topic, "into": target, "start": _told(start), "end": _told(end), "filter": filter, "select": select,
        "lake": None if lake is None else str(lake), "path": dict(source or {}).get("path"),
    }  # fmt: skip
    make_active(spark)
    with job.alone(), Server(where) as server:
        kept = keeps(name, server.topic(target).config.fairness == "keys")

        def rows_of(ranges: Ranges) -> Any:
            return reshaped(spark, log.messages(ranges), kept, select, filter)

        def make() -> tuple[list[Any], Json]:
            ranges = log.ranges(start, end)
            sink_columns({**to, "topic": target}, rows_of(ranges))
            size = chunk_rows or (CHUNK_ROWS if rate is None else max(1, round(rate * RATE_SECONDS)))
            return sliced(ranges, min(size, CHUNK_ROWS)), {"ranges": {str(p): list(r) for p, r in ranges.items()}}

        plan = settled_plan(job, "replay", name, asked, server.sinks, make)

        def write(chunk: Any, app: str, number: int) -> None:
            writing = rows_of(_ranges(chunk)).write.format("heapline").options(**to).option("topic", target)
            writing.option("txnAppId", app).option("txnVersion", str(number)).mode("append").save()

        ran = run_chunks(plan, job, server.sinks, write, rate=rate, tell=tell)
    return ReplayResult(
        name, topic, target, _ranges(plan.facts["ranges"]), ran.messages, ran.chunks, ran.chunks_before, ran.seconds,
        ran.was_done,
    )  # fmt: skip


class _Log:
    """Where the messages are read from."""

    def __init__(self, spark: Any, where: dict[str, str], lake: str | None, topic: str) -> None:
        self._spark, self._where, self._lake, self._topic = spark, where, lake, topic
        self._archive: DataFrame | None = None

    def ranges(self, start: Place, end: Place) -> Ranges:
        found = self._lake_ranges(start, end) if self._lake is not None else self._journal_ranges(start, end)
        backwards = [p for p, (first, last) in found.items() if first > last]
        if backwards:
            first, last = found[backwards[0]]
            raise BadRequest(f"partition {backwards[0]}: it would start at offset {first}, behind its end at {last}")
        return found

    def _journal_ranges(self, start: Place, end: Place) -> Ranges:
        options = {**_option("starting", start), **_option("ending", end)}
        whole = ranges_of(self._where, self._topic, **options)
        return {p: _within(r, start, end, p) for p, r in whole.items()}

    def _lake_ranges(self, start: Place, end: Place) -> Ranges:
        from pyspark.sql import functions as F

        rows = self._archived()
        if isinstance(start, datetime):
            rows = rows.where(F.col("timestamp") >= F.lit(start))
        if isinstance(end, datetime):
            rows = rows.where(F.col("timestamp") < F.lit(end))
        found = rows.groupBy("partition").agg(F.min("offset"), F.max("offset")).collect()
        return {row[0]: _within((row[1], row[2] + 1), start, end, row[0]) for row in sorted(found)}

    def _archived(self) -> DataFrame:
        if self._archive is None:
            from heapline.spark.jobs.lake import lake as read_lake

            # With `source={}` the archive alone.
            self._archive = read_lake(self._spark, self._lake or "", self._where or None, self._topic, "messages")
        return self._archive

    def messages(self, ranges: Ranges) -> DataFrame:
        from pyspark.sql import functions as F

        if self._lake is None:
            told = {
                f"{which}Offsets": json.dumps({plain_topic(self._topic): {str(p): r[i] for p, r in ranges.items()}})
                for i, which in enumerate(("starting", "ending"))
            }
            options = {**self._where, "subscribe": self._topic, "includeHeaders": "true", **told}
            found: DataFrame = self._spark.read.format("heapline").options(**options).load()
            return found
        within = F.lit(False)
        for partition, (first, last) in ranges.items():
            offset = F.col("offset")
            within = within | ((F.col("partition") == partition) & (offset >= first) & (offset < last))
        return self._archived().where(within)


def _option(which: str, place: Place) -> dict[str, str]:
    return {f"{which}Timestamp": str(round(place.timestamp() * 1000))} if isinstance(place, datetime) else {}


def _within(found: tuple[int, int], start: Place, end: Place, partition: int) -> tuple[int, int]:
    """Cut to offsets that were given. A partition that they do not name is not replayed."""
    first, last = found
    if isinstance(start, Mapping):
        first = max(first, start[partition]) if partition in start else last
    if isinstance(end, Mapping):
        last = min(last, end[partition]) if partition in end else first
    return first, last


def sliced(ranges: Ranges, chunk_rows: int) -> list[Json]:
    """
    >>> sliced({0: (10, 14), 1: (0, 2)}, 3)
    [{'0': [10, 12], '1': [0, 1]}, {'0': [12, 14], '1': [1, 2]}]
    """
    total = sum(last - first for first, last in ranges.values())
    count = -(-total // chunk_rows)

    def cut(span: tuple[int, int], n: int) -> int:
        return span[0] + (span[1] - span[0]) * n // count

    return [{str(p): [cut(r, n), cut(r, n + 1)] for p, r in ranges.items()} for n in range(count)]


def _ranges(told: Json) -> Ranges:
    return {int(p): (first, last) for p, (first, last) in told.items()}


def _told(place: Place) -> Any:
    if isinstance(place, datetime):
        if place.tzinfo is None:
            raise BadRequest(f"{place.isoformat()} names no time zone: add one, as in 2026-01-31T12:00:00Z")
        return place.isoformat()
    return None if place is None else {str(p): offset for p, offset in sorted(place.items())}


def keeps(name: str, fair: bool) -> dict[str, str]:
    """The sink's columns, each as SQL on the columns of the view: what a message keeps, and is given."""
    given = {REPLAY: f"'{name}'", REPLAYED_FROM: "concat(topic, '/', partition, '/', `offset`)",
             REPLAYED_ID: "message_id"}  # fmt: skip
    pairs = ", ".join(f"struct('{key}' AS key, CAST({value} AS BINARY) AS value)" for key, value in given.items())
    names = ", ".join(f"'{key}'" for key in given)
    return {
        "value": "`value`", "key": "`key`", "priority": "priority",
        "headers": f"concat(filter(coalesce(headers, CAST(array() AS {_PAIRS})), h -> h.key NOT IN ({names})), "
        f"array({pairs}))",
        "ttl": "(unix_millis(expires_at) - unix_millis(coalesce(deliver_at, enqueued_at))) / 1000D",
        **({"fairness_key": "fairness_key"} if fair else {}),
    }  # fmt: skip


def reshaped(
    spark: Any, rows: Any, kept: Mapping[str, str], select: str | None = None, condition: str | None = None
) -> Any:
    """Messages as the sink takes them: what they keep, but for the columns that `select` gives."""
    with told_plainly():
        found = rows if condition is None else rows.where(condition)
        replaced: Sequence[str] = () if select is None else selected(spark, found, select).columns
        rest = [f"{sql} AS `{column}`" for column, sql in kept.items() if column not in replaced]
        return selected(spark, found, ", ".join([*([select] if select is not None else []), *rest]))
