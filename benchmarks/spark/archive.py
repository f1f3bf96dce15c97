"""The speed of the archive, compared with a streaming copy of the same rows from Parquet to Parquet.

The archive decodes the journal, writes Parquet with zstd and commits Delta tables. The copy is Spark's own file stream,
read and written in the JVM, with a checkpoint. Both copy messages alone, and messages and events. After one warm-up
run, the best of some rounds counts, in which the cases take turns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.spark.read import Figure, best, fill, reported

TARGET = 0.5
BOTH = ("messages", "events")


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    from heapline.spark import session

    count = 200_000 if quick else 1_000_000
    home = directory.resolve()
    data = home / "ours"
    fill(data, count)
    spark = session()
    try:
        for view in BOTH:
            reader = spark.read.format("heapline").options(path=str(data), subscribe="orders", view=view)
            reader.option("includeHeaders", "true").load().write.option("compression", "zstd").parquet(f"{home}/{view}")
        cases: dict[str, Callable[[], None]] = {}
        for name, views in {"messages": ("messages",), "messages and events": BOTH}.items():
            cases[f"copy {name}"] = lambda views=views: copied(spark, home, views)  # type: ignore[misc]
            cases[name] = lambda views=views: archived(spark, home, data, views)  # type: ignore[misc]
        found = best(cases)
        for name, target in {"messages": None, "messages and events": TARGET}.items():
            baseline = count / found[f"copy {name}"]
            yield reported(f"archive of {name}, {count} messages", count / found[name], baseline, target)
    finally:
        spark.stop()


def archived(spark: Any, home: Path, data: Path, views: tuple[str, ...]) -> None:
    from heapline.spark.jobs.archive import archive

    lake = home / "lake"
    shutil.rmtree(lake, ignore_errors=True)
    archive(spark, {"path": str(data)}, "orders", lake, views=views)


def copied(spark: Any, home: Path, views: tuple[str, ...]) -> None:
    """Views together, as the archive copies them."""
    copy = home / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    queries = []
    for view in views:
        source = f"{home}/{view}"
        rows = spark.readStream.schema(spark.read.parquet(source).schema).parquet(source)
        writing = rows.writeStream.format("parquet").option("compression", "zstd").option("path", f"{copy}/{view}")
        writing = writing.option("checkpointLocation", f"{copy}/checkpoint-{view}")
        queries.append(writing.trigger(availableNow=True).start())
    for query in queries:
        query.awaitTermination()
