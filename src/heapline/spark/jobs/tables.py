"""Read any file or table as a DataFrame, and shape its rows to the sink's columns with SQL.

Files are recognized by their extension. A Delta table is read without a jar, by the list of its files that `deltalake`
returns. A table whose files alone do not determine its rows (deletion vectors, mapped columns) is rejected.

The SQL is Spark's: a condition, and named expressions as between SELECT and FROM. Errors in the SQL, or in the columns
that it returns, are raised before anything is written.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heapline.contract.errors import BadRequest
from heapline.spark.lake.tables import delta
from heapline.spark.write_options import parse_write, spark_columns

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


def shaped(spark: Any, rows: Any, select: str | None = None, condition: str | None = None) -> Any:
    """Filter and select rows.

    Without a select, a table that has a column `value` is unchanged; of any other table each row becomes a JSON object.
    """
    with short_sql_errors():
        found = rows if condition is None else rows.where(condition)
        if select is None:
            return found if VALUE in found.columns else found.selectExpr(AS_JSON)
        return selected(spark, found, select)


def selected(spark: Any, rows: Any, select: str) -> Any:
    """Return `SELECT {select} FROM rows`."""
    view = f"heapline_rows_{secrets.token_hex(6)}"
    rows.createOrReplaceTempView(view)
    try:
        return spark.sql(f"SELECT {select} FROM {view}")
    finally:
        spark.catalog.dropTempView(view)


def sink_columns(options: Mapping[str, str], rows: Any) -> tuple[str, ...]:
    """Return the columns. Raises BadRequest if the sink does not accept one."""
    return parse_write(options, spark_columns(rows.schema), streaming=False, overwrite=False).columns


@contextmanager
def short_sql_errors() -> Iterator[None]:
    """Raise the first line of Spark's SQL errors, without the plan and the stack that Spark adds and logs."""
    from pyspark.errors import AnalysisException, ParseException

    log = logging.getLogger("SQLQueryContextLogger")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise BadRequest(f"Spark rejected the SQL: {str(error).strip().splitlines()[0]}") from None
    finally:
        log.disabled = was_off
