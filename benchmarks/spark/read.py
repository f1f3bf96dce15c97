"""The speed of reading the log from its directory and from a server, compared with Parquet; and as a stream.

The stream is compared with a minimal source of Arrow files. Values have 200 bytes, half of which do not compress. After
one warm-up run per case, the best of some rounds counts, in which the cases take turns. The time includes planning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

import heapline
from benchmarks.engine import figure
from benchmarks.server.spawned import heapline_server
from heapline.contract.message import Outgoing

ROUNDS = 5
PARTITIONS = 4
TARGETS = {"directory": 0.7, "server": 0.35, "stream": 0.5}
Figure = dict[str, Any]


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    from heapline.spark import session

    count = 200_000 if quick else 1_000_000
    data, parquet, arrow = (directory.resolve() / name for name in ("ours", "parquet", "arrow"))
    fill(data, count)
    spark = session()
    try:
        loaded(spark, path=str(data)).write.option("compression", "zstd").parquet(str(parquet))
        write_arrow(spark, parquet, arrow)
        with heapline_server(data) as server:
            yield from figures(spark, count, data, parquet, arrow, server)
    finally:
        spark.stop()


def figures(spark: Any, count: int, data: Path, parquet: Path, arrow: Path, server: Any) -> Iterator[Figure]:
    from benchmarks.spark.bare_source import BareSource

    spark.dataSource.register(BareSource)
    near = {"path": str(data)}
    far = {"heapline.url": server.target, "heapline.api_key_file": str(data / "admin.key")}
    batches = best(
        {
            "parquet": lambda: summed(spark.read.parquet(str(parquet))),
            "directory": lambda: summed(loaded(spark, columns="value", **near)),
            "server": lambda: summed(loaded(spark, columns="value", **far)),
            "all columns": lambda: summed(loaded(spark, **near)),
        }
    )
    baseline = count / batches.pop("parquet")
    for name, seconds in batches.items():
        yield reported(f"batch read, {name}, values summed, {count} rows", count / seconds, baseline, TARGETS.get(name))
    streams = best(
        {
            "bare": lambda: drained(spark.readStream.format("bare_arrow").load(str(arrow))),
            "directory": lambda: drained(loaded(spark, True, columns="value", **near)),
            "server": lambda: drained(loaded(spark, True, columns="value", **far)),
        }
    )
    baseline = count / streams.pop("bare")
    for name, seconds in streams.items():
        yield reported(f"streaming read, {name}, to noop, {count} rows", count / seconds, baseline, TARGETS["stream"])


def reported(name: str, value: float, baseline: float, target: float | None) -> Figure:
    ratio = value / baseline
    said = None if target is None else f"≥ {target:g}×"
    return figure(name, value, "messages/s", baseline, ratio, said, None if target is None else ratio >= target)


def best(cases: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the seconds of each, the best of the rounds after the first."""
    found = dict.fromkeys(cases, float("inf"))
    for number in range(ROUNDS):
        for name, act in cases.items():
            start = perf_counter()
            act()
            if number:
                found[name] = min(found[name], perf_counter() - start)
    return found


def fill(path: Path, count: int) -> None:
    random = np.random.default_rng(1)
    with heapline.open_sync(path) as hl:
        hl.create_topic("orders", partitions=PARTITIONS)
        for first in range(0, count, 1000):
            numbers, half = range(first, first + 1000), b"x" * 100
            hl.enqueue_batch("orders", [Outgoing(random.bytes(100) + half, i % 10, key=f"k{i % 97}") for i in numbers])


def loaded(spark: Any, stream: bool = False, **options: str) -> Any:
    reader = (spark.readStream if stream else spark.read).format("heapline").option("subscribe", "orders")
    return (reader.option("startingOffsets", "earliest") if stream else reader).options(**options).load()


def write_arrow(spark: Any, parquet: Path, arrow: Path) -> None:
    arrow.mkdir()
    schema = pa.schema([pa.field("value", pa.binary(), nullable=False)])
    table = spark.read.parquet(str(parquet)).select("value").toArrow().cast(schema)
    share = -(-len(table) // PARTITIONS)
    for number in range(PARTITIONS):
        with pa.OSFile(str(arrow / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_table(table.slice(number * share, share), max_chunksize=10_000)


def summed(df: Any) -> None:
    df.selectExpr("sum(length(value))").collect()


def drained(df: Any) -> None:
    with tempfile.TemporaryDirectory() as checkpoint:
        writing = df.writeStream.format("noop").option("checkpointLocation", checkpoint)
        writing.trigger(availableNow=True).start().awaitTermination()
