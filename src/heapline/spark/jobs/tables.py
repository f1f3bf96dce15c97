"""Any file that Spark can read as a DataFrame, by the ending of its name; and Delta tables, without a jar.

A Delta table is read by the list of its files, which `deltalake` gives; one whose files alone do not tell what is in it
(rows that are marked as deleted, columns under other names) is refused rather than read wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heapline.errors import BadRequest

#: By the ending of the name: Spark's format, and options that are set unless others are given.
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
    """The rows of files or folders of one kind, as one DataFrame. Local ones must be there; Spark finds others."""
    if not paths:
        raise BadRequest("say what to read: one file or folder, or several")
    found = [str(path) for path in paths]
    for path in found:
        if "://" not in path and not any(c in path for c in "*?[{") and not Path(path).exists():
            raise BadRequest(f"there is no {path!r}")
    kinds = {kind} if kind is not None else {kind_of(path) for path in found}
    if len(kinds) > 1:
        raise BadRequest(f"these are of several formats ({', '.join(sorted(kinds))}): load them one after the other")
    (chosen,) = kinds
    if chosen == "delta":
        return _delta(spark, found)
    preset = next((preset for name, preset in FORMATS.values() if name == chosen), {})
    if kind is None and all(path.endswith((".tsv", ".tsv.gz")) for path in found):
        preset = FORMATS[".tsv"][1]
    return spark.read.format(chosen).options(**{**preset, **(options or {})}).load(found)


def kind_of(path: str) -> str:
    """
    >>> kind_of("orders.jsonl"), kind_of("s3://b/orders.csv.gz")
    ('json', 'csv')
    """
    folder = Path(path)
    if (folder / "_delta_log").is_dir():
        return "delta"
    kinds = {_by_name(name) for name in _names_in(folder, path)} - {None}
    if len(kinds) != 1:
        why = "which of them is meant" if kinds else "what it is"
        known = ", ".join(sorted({name for name, _ in FORMATS.values()}))
        raise BadRequest(f"the name of {path!r} does not tell {why}: say which format ({known}, delta)")
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
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise BadRequest("deltalake is not here: install it with `pip install 'heapline[lake]'`") from None
    table = DeltaTable(paths[0])
    beyond = _DELTA_BEYOND_FILES & set(table.protocol().reader_features or ())
    if beyond:
        raise BadRequest(
            f"{paths[0]!r} uses {', '.join(sorted(beyond))}, so its files alone do not tell its rows: write it out as "
            "Parquet with what wrote it, and load that"
        )
    files = table.file_uris()
    if not files:
        raise BadRequest(f"{paths[0]!r} has no rows")
    return spark.read.option("basePath", paths[0]).parquet(*files)
