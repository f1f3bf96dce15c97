"""The job `load`: send the rows of any table or file to a topic, each exactly once, even if the driver is killed.

*Why chunk n is the same after a restart.* The source is read only once: its rows, as they are to be sent, are first
copied to files of the job (`rows/` in its folder). Only when the copy is complete and durable is the plan made, which
names the files of each chunk. From then on the source may change or disappear, and `rand()` or `current_timestamp()` in
the select keep their values. If the driver is killed before the plan exists, the copy is made again, because nothing
has been sent. The copy is deleted when all rows are sent; the plan stays.

Files are recognized by their extension. A Delta table is read without a jar, by the list of its files that `deltalake`
returns. A table whose files alone do not determine its rows (deletion vectors, mapped columns) is rejected.

chunked_write.py sends each chunk once. The order in which the messages enter the topic is not defined; use priorities.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heapline.contract.errors import BadRequest
from heapline.journal.disk import RealDisk
from heapline.spark.jobs import chunked_write
from heapline.spark.jobs.chunked_write import (
    JobFolder,
    Json,
    Plan,
    Server,
    Tell,
    selected,
    short_sql_errors,
    sink_columns,
)
from heapline.spark.lake.tables import delta
from heapline.spark.target import server_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS = "rows"


@dataclass(frozen=True)
class LoadResult:
    name: str
    topic: str
    rows: int  # of the source, as selected
    messages: int  # fewer than rows only if bad rows were written to files
    chunks: int
    chunks_before: int  # chunks that earlier runs sent
    seconds: float
    was_done: bool  # whether the job was complete before this run


def load(
    spark: SparkSession,
    where: Mapping[str, str],
    source: DataFrame | str | Path | Sequence[str | Path],
    topic: str,
    *,
    name: str,
    select: str | None = None,
    filter: str | None = None,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    rate: float | None = None,
    chunk_rows: int | None = None,
    folder: str | Path | None = None,
    bad_records: str | Path | None = None,
    tell: Tell | None = None,
) -> LoadResult:
    """Send every row of `source` (a DataFrame, or files) to `topic` as a message, exactly once.

    `name` identifies the job: the same call again continues it, or returns that it was done. `select` has SQL
    expressions for the sink's columns (`"to_json(struct(*)) AS value, prio AS priority"`). Without it, a table with a
    column `value` is sent as it is; of any other table each row is sent as a JSON object. `filter` is a SQL condition
    on the rows of the source. `rate` is in messages per second. `folder` must be shared by driver and executors.
    """
    chunked_write.check_name(name)
    to = server_options(where)
    job = JobFolder(folder, name)
    asked = {
        "topic": topic,
        "source": _describe(source),
        "select": select,
        "filter": filter,
        "format": format,
        "options": dict(options or {}),
        "bad_records": None if bad_records is None else str(bad_records),
    }
    chunked_write.make_active(spark)
    with job.locked(), Server(where) as server:
        server.topic(topic)
        staging = _Staging(spark, job, chunked_write.chunk_size(chunk_rows, rate))

        def make() -> tuple[list[Any], Json]:
            table = source if _is_table(source) else read_table(spark, _paths(source), format, options)
            rows = _shaped(spark, table, select, filter)
            sink_columns({**to, "topic": topic}, rows)  # before the expensive copy
            return staging.copy(rows)

        plan = chunked_write.load_or_make_plan(job, "load", name, asked, server.sinks, make)

        def write(chunk: Any, app: str, number: int) -> None:
            bad = {} if bad_records is None else {"badRecordsPath": str(bad_records)}
            chunked_write.write_chunk(staging.read(plan, chunk), to, topic, app, number, **bad)

        ran = chunked_write.run_chunks(plan, job, server.sinks, write, rate=rate, tell=tell)
        staging.clear()
    return LoadResult(name, topic, plan.facts["rows"], **vars(ran))


class _Staging:
    """The copy of the rows, as they are to be sent."""

    def __init__(self, spark: Any, job: JobFolder, chunk_rows: int) -> None:
        if chunk_rows < 1:
            raise BadRequest(f"chunk_rows must be at least 1, not {chunk_rows}")
        self._spark, self._path, self._chunk_rows = spark, job.path.resolve() / _ROWS, chunk_rows

    def copy(self, rows: Any) -> tuple[list[Any], Json]:
        shutil.rmtree(self._path, ignore_errors=True)  # an incomplete copy of a driver that was killed
        # As many files per chunk as tasks can read in parallel.
        per_file = max(1, -(-self._chunk_rows // _parallelism(self._spark)))
        rows.write.option("maxRecordsPerFile", str(per_file)).parquet(self._path.as_uri())
        files = sorted(self._path.glob("*.parquet"))
        counts = [_durable_rows(file) for file in files]
        RealDisk().fsync_dir(str(self._path))
        chunks = grouped([file.name for file in files], counts, self._chunk_rows)
        return chunks, {"rows": sum(counts), "schema": rows.schema.json()}

    def read(self, plan: Plan, chunk: Any) -> Any:
        from pyspark.sql.types import StructType

        missing = [name for name in chunk["files"] if not (self._path / name).is_file()]
        if missing:
            raise BadRequest(f"{self._path / missing[0]} is missing; it has rows that were not sent yet")
        schema = StructType.fromJson(json.loads(plan.facts["schema"]))
        return self._spark.read.schema(schema).parquet(*((self._path / name).as_uri() for name in chunk["files"]))

    def clear(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def grouped(files: Sequence[str], counts: Sequence[int], chunk_rows: int) -> list[Json]:
    """Group files into chunks.

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
    """Sync a file and return its row count. The plan must describe the rows that are sent."""
    import pyarrow.parquet as pq

    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return int(pq.read_metadata(file).num_rows)


def _parallelism(spark: Any) -> int:
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except Exception:  # Spark Connect has no context; the error differs between versions
        return 4


def _is_table(source: Any) -> bool:
    return hasattr(source, "schema") and hasattr(source, "write")


def _paths(source: Any) -> list[str | Path]:
    return [source] if isinstance(source, str | Path) else list(source)


def _describe(source: Any) -> Any:
    if _is_table(source):
        return {"table": source.schema.simpleString()}
    return [str(path) if "://" in str(path) else str(Path(path).absolute()) for path in _paths(source)]


# -- the source --------------------------------------------------------------------------------------------------------

#: By extension: Spark's format and its default options.
FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    ".parquet": ("parquet", {}), ".pq": ("parquet", {}), ".orc": ("orc", {}), ".json": ("json", {}),
    ".jsonl": ("json", {}), ".ndjson": ("json", {}), ".csv": ("csv", {"header": "true"}),
    ".tsv": ("csv", {"header": "true", "sep": "\t"}), ".txt": ("text", {}), ".log": ("text", {}),
}  # fmt: skip
_PACKED = (".gz", ".bz2", ".zst", ".lz4", ".snappy")
_DELTA_BEYOND_FILES = {"deletionVectors", "columnMapping"}


def read_table(
    spark: Any, paths: Sequence[str | Path], kind: str | None = None, options: Mapping[str, str] | None = None
) -> Any:
    """Return the rows of files or directories of one format as a DataFrame.

    Local paths must exist; Spark checks others.
    """
    if not paths:
        raise BadRequest("nothing to read; give one or more files or directories")
    found = [str(path) for path in paths]
    for path in found:
        if "://" not in path and not any(c in path for c in "*?[{") and not Path(path).exists():
            raise BadRequest(f"{path!r} does not exist")
    kinds = {kind} if kind is not None else {kind_of(path) for path in found}
    if len(kinds) > 1:
        raise BadRequest(f"the files have several formats ({', '.join(sorted(kinds))}); load each format separately")
    (chosen,) = kinds
    if chosen == "delta":
        return _delta(spark, found)
    preset = next((preset for name, preset in FORMATS.values() if name == chosen), {})
    if kind is None and all(path.endswith((".tsv", ".tsv.gz")) for path in found):
        preset = FORMATS[".tsv"][1]
    return spark.read.format(chosen).options(**{**preset, **(options or {})}).load(found)


def kind_of(path: str) -> str:
    """Return the format of a file or directory.

    >>> kind_of("orders.jsonl"), kind_of("s3://b/orders.csv.gz")
    ('json', 'csv')
    """
    folder = Path(path)
    if (folder / "_delta_log").is_dir():
        return "delta"
    kinds = {_by_name(name) for name in _names_in(folder, path)} - {None}
    if len(kinds) != 1:
        known = ", ".join(sorted({name for name, _ in FORMATS.values()}))
        why = "contains files of several formats" if kinds else "does not have a known extension"
        raise BadRequest(f"{path!r} {why}; specify the format ({known}, delta)")
    return str(kinds.pop())


def _names_in(folder: Path, path: str) -> list[str]:
    if folder.is_dir():
        return [f.name for f in folder.rglob("*") if f.is_file() and not f.name.startswith(("_", "."))]
    return [path]


def _by_name(name: str) -> str | None:
    stem = name
    for packed in _PACKED:
        stem = stem.removesuffix(packed)
    ending = Path(stem).suffix.lower()
    return FORMATS[ending][0] if ending in FORMATS else None


def _delta(spark: Any, paths: list[str]) -> Any:
    if len(paths) > 1:
        raise BadRequest("load one Delta table at a time")
    table = delta().DeltaTable(paths[0])
    beyond = _DELTA_BEYOND_FILES & set(table.protocol().reader_features or ())
    if beyond:
        raise BadRequest(
            f"{paths[0]!r} uses {', '.join(sorted(beyond))}, so its rows cannot be read from its files alone; export "
            "it as Parquet with the tool that wrote it, and load that"
        )
    files = table.file_uris()
    if not files:
        raise BadRequest(f"{paths[0]!r} has no rows")
    return spark.read.option("basePath", paths[0]).parquet(*files)


VALUE = "value"
AS_JSON = f"to_json(struct(*)) AS {VALUE}"


def _shaped(spark: Any, rows: Any, select: str | None = None, condition: str | None = None) -> Any:
    """Filter and select rows.

    Without a select, a table that has a column `value` is unchanged; of any other table each row becomes a JSON object.
    """
    with short_sql_errors():
        found = rows if condition is None else rows.where(condition)
        if select is None:
            return found if VALUE in found.columns else found.selectExpr(AS_JSON)
        return selected(spark, found, select)
