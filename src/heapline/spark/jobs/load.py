"""Any table or file into a topic, each row exactly once, however often the driver is killed and started again.

*What makes chunk n the same after a restart?* Nothing that is read twice need be: the rows, as they are to be sent, are
first written to files of the job's own (`rows/` in its folder), and only when that copy is whole and durable is the
plan made, which names the files of each chunk. From there on the source is not looked at again; it may change or go,
and a `rand()` or `current_timestamp()` in the select has the value that it had. Killed before the plan is there, the
copy is made anew, for nothing has been sent. The copy goes when all is sent; the plan stays and says that it was.

How chunks are sent once is in chunked.py. In which order the messages of a load come into the topic is not promised:
that is what priorities are for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapline.errors import BadRequest
from heapline.spark.jobs.chunked import JobFolder, Json, Plan, Tell, check_name, run_chunks, settled_plan, sync_folder
from heapline.spark.jobs.server import Server, make_active, server_options
from heapline.spark.jobs.shaping import shaped, sink_columns
from heapline.spark.jobs.tables import read_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHUNK_ROWS = 100_000  # large enough that Spark's second a job does not count, small enough to see it go on
RATE_SECONDS = 2.0  # with a rate: a chunk is what may be sent in so many seconds
FOLDER = "heapline-jobs"  # in the working directory, unless said otherwise
_ROWS = "rows"


@dataclass(frozen=True)
class LoadResult:
    name: str
    topic: str
    rows: int  # of the source, as selected
    messages: int  # that they became: fewer only where bad rows were put aside
    chunks: int
    chunks_before: int  # of them, sent by earlier runs
    seconds: float
    was_done: bool  # before this run


def load(
    spark: SparkSession, where: Mapping[str, str], source: DataFrame | str | Path | Sequence[str | Path], topic: str, *,
    name: str, select: str | None = None, filter: str | None = None, format: str | None = None,
    options: Mapping[str, str] | None = None, rate: float | None = None, chunk_rows: int | None = None,
    folder: str | Path | None = None, bad_records: str | Path | None = None, tell: Tell | None = None,
) -> LoadResult:  # fmt: skip
    """Send every row of `source` (a DataFrame, or files) to `topic` as a message, once.

    `name` is the job: the same call again goes on where it was, or says that it was done. `select` are SQL expressions
    that give the sink's columns (`"to_json(struct(*)) AS value, prio AS priority"`); without it a table with a column
    `value` is sent as it is, any other as JSON, a row a message. `filter` is a SQL condition on the source's rows.
    `rate` is messages a second. `folder` must be where driver and executors find the same files.
    """
    check_name(name)
    to = server_options(where)
    job = JobFolder(folder if folder is not None else Path(FOLDER) / name)
    asked = {
        "topic": topic, "source": _told(source), "select": select, "filter": filter, "format": format,
        "options": dict(options or {}), "bad_records": None if bad_records is None else str(bad_records),
    }  # fmt: skip
    make_active(spark)
    with job.alone(), Server(where) as server:
        server.topic(topic)
        staging = _Staging(spark, job, chunk_rows or _chunk_rows(rate))

        def make() -> tuple[list[Any], Json]:
            table = source if _is_table(source) else read_table(spark, _paths(source), format, options)
            rows = shaped(spark, table, select, filter)
            sink_columns({**to, "topic": topic}, rows)  # before the work of a copy
            return staging.copy(rows)

        plan = settled_plan(job, "load", name, asked, server.sinks, make)

        def write(chunk: Any, app: str, number: int) -> None:
            writing = staging.read(plan, chunk).write.format("heapline").options(**to).option("topic", topic)
            if bad_records is not None:
                writing = writing.option("badRecordsPath", str(bad_records))
            writing.option("txnAppId", app).option("txnVersion", str(number)).mode("append").save()

        ran = run_chunks(plan, job, server.sinks, write, rate=rate, tell=tell)
        staging.clear()
    return LoadResult(
        name, topic, plan.facts["rows"], ran.messages, ran.chunks, ran.chunks_before, ran.seconds, ran.was_done
    )  # fmt: skip


class _Staging:
    """The copy of the rows, as they are to be sent."""

    def __init__(self, spark: Any, job: JobFolder, chunk_rows: int) -> None:
        if chunk_rows < 1:
            raise BadRequest(f"a chunk has at least one row, not {chunk_rows}")
        self._spark, self._path, self._chunk_rows = spark, job.path.resolve() / _ROWS, chunk_rows

    def copy(self, rows: Any) -> tuple[list[Any], Json]:
        shutil.rmtree(self._path, ignore_errors=True)  # half of one, by a driver that was killed
        # As many files a chunk as tasks can read at once.
        per_file = max(1, -(-self._chunk_rows // _parallelism(self._spark)))
        rows.write.option("maxRecordsPerFile", str(per_file)).parquet(self._path.as_uri())
        files = sorted(self._path.glob("*.parquet"))
        counts = [_durable_rows(file) for file in files]
        sync_folder(self._path)
        chunks = grouped([file.name for file in files], counts, self._chunk_rows)
        return chunks, {"rows": sum(counts), "schema": rows.schema.json()}

    def read(self, plan: Plan, chunk: Any) -> Any:
        from pyspark.sql.types import StructType

        missing = [name for name in chunk["files"] if not (self._path / name).is_file()]
        if missing:
            raise BadRequest(f"{self._path / missing[0]} is gone, with rows that are not sent yet")
        schema = StructType.fromJson(_json(plan.facts["schema"]))
        return self._spark.read.schema(schema).parquet(*((self._path / name).as_uri() for name in chunk["files"]))

    def clear(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def grouped(files: Sequence[str], counts: Sequence[int], chunk_rows: int) -> list[Json]:
    """
    >>> grouped(["a", "b", "c", "d"], [5, 5, 0, 7], 10)
    [{'files': ['a', 'b'], 'rows': 10}, {'files': ['d'], 'rows': 7}]
    """
    chunks: list[Json] = []
    for file, count in zip(files, counts, strict=True):
        if not count:
            continue
        if not chunks or chunks[-1]["rows"] + count > chunk_rows:
            chunks.append({"files": [], "rows": 0})
        chunks[-1]["files"].append(file)
        chunks[-1]["rows"] += count
    return chunks


def _durable_rows(file: Path) -> int:
    """How many rows it has; on disk for good, since what is sent must be what the plan was made for."""
    import pyarrow.parquet as pq

    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return int(pq.read_metadata(file).num_rows)


def _chunk_rows(rate: float | None) -> int:
    """
    >>> _chunk_rows(None), _chunk_rows(5000), _chunk_rows(0.5)
    (100000, 10000, 1)
    """
    return CHUNK_ROWS if rate is None else min(CHUNK_ROWS, max(1, round(rate * RATE_SECONDS)))


def _parallelism(spark: Any) -> int:
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except Exception:  # Spark Connect has no context, and says so in ways that differ by version
        return 4


def _is_table(source: Any) -> bool:
    return hasattr(source, "schema") and hasattr(source, "write")


def _paths(source: Any) -> list[str | Path]:
    return [source] if isinstance(source, str | Path) else list(source)


def _told(source: Any) -> Any:
    if _is_table(source):
        return {"table": source.schema.simpleString()}
    return [str(path) if "://" in str(path) else str(Path(path).absolute()) for path in _paths(source)]


def _json(text: str) -> Any:
    import json

    return json.loads(text)
