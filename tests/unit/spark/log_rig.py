"""Read a rig's log as Spark's tasks do, but without Spark: planned, split, each task read separately."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from heapline.spark.directory import DirectorySource
from heapline.spark.options import parse_options
from heapline.spark.read_plan import ReadTask, plan_batch, read
from heapline.spark.schema import arrow_schema
from tests.unit.engine.rig import PATH, Rig


def source_of(rig: Rig) -> DirectorySource:
    return DirectorySource(PATH, disk=rig.disk)


def planned(rig: Rig, **options: str) -> tuple[list[ReadTask], Any]:
    asked = parse_options({"path": PATH, "subscribe": "jobs", **options}, streaming=False)
    return plan_batch(source_of(rig), asked), asked


def read_work(rig: Rig, work: list[ReadTask], asked: Any) -> Any:
    batches = [batch for piece in work for batch in read(source_of(rig), piece, asked)]
    release(rig)
    return pa.Table.from_batches(batches, arrow_schema(asked.columns))


def table(rig: Rig, **options: str) -> Any:
    """All rows that a read with these options gives, by partition and offset."""
    found = read_work(rig, *planned(rig, **options))
    if {"partition", "offset"} <= set(found.column_names):
        found = found.sort_by([("partition", "ascending"), ("offset", "ascending")])
    return found


def release(rig: Rig) -> None:
    """End the leases that planning creates for tasks; otherwise they expire after minutes."""
    for path in rig.files(".lease"):
        rig.disk.unlink(path)


def rows(rig: Rig, **options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table(rig, **options).to_pylist()
    return found


def values(rig: Rig, **options: str) -> list[bytes]:
    return [row["value"] for row in rows(rig, **options)]
