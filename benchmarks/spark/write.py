"""The speed of exactly-once writes: a stream of Arrow files into the sink, compared with a process using the SDK.

That process enqueues the same rows, a thousand per call. Values have 200 bytes, half of which do not compress; both
sides use one server, whose answers are durable. Each round uses new topics, and the sides take turns. After one warm-up
run per side, the median ratio of the rounds counts. The time includes starting a query, planning, checkpointing and
committing, about two seconds for any number of rows (20 000 took 2.3 s, 800 000 took 4.5 s), so few rows would measure
only that.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

import heapline
from benchmarks.engine import figure
from benchmarks.rows import Step
from benchmarks.server.spawned import Serving, heapline_server
from heapline.contract.message import Outgoing

TARGET = 0.7
PARTITIONS = 4
BATCH, UNDER_WAY = 1000, 4  # of the SDK
Figure = dict[str, Any]


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    from benchmarks.spark.bare_source import BareSource
    from heapline.spark import session

    count, rounds = (500_000, 2) if quick else (1_000_000, 5)
    arrow = directory.resolve() / "rows"
    values = make_rows(arrow, count)
    spark = session()
    try:
        spark.dataSource.register(BareSource)
        with heapline_server(directory.resolve() / "ours") as server:
            seen: list[tuple[float, float]] = []
            for number in range(rounds + 1):
                yield Step("streaming sink", number, rounds + 1)
                seen.append(one_round(spark, server, arrow, values, number))
    finally:
        spark.stop()
    sinks, sdks = ([count / seconds for seconds in side] for side in zip(*seen[1:], strict=True))
    ratio = median(sink / sdk for sink, sdk in zip(sinks, sdks, strict=True))
    what = f"streaming sink, durable, exactly once, {count} rows, next to enqueue_batch of {BATCH}"
    yield figure(what, median(sinks), "messages/s", median(sdks), ratio, f"≥ {TARGET:g}×", ratio >= TARGET)


def one_round(spark: Any, server: Serving, arrow: Path, values: list[bytes], number: int) -> tuple[float, float]:
    """Return the seconds of the sink and of the SDK."""
    sides = {
        "sink": lambda topic: stream(spark, server, arrow, topic),
        "sdk": lambda topic: enqueue(server, values, topic),
    }
    seconds = {}
    for side in sorted(sides, reverse=bool(number % 2)):
        topic = f"{side}-{number}"
        with heapline.connect_sync(server.target, api_key=server.credential()) as hl:
            hl.create_topic(topic, partitions=PARTITIONS)
            start = perf_counter()
            sides[side](topic)
            seconds[side] = perf_counter() - start
            assert hl.stats(topic).ready == len(values), "rows in are messages out"
            hl.delete_topic(topic)
    return seconds["sink"], seconds["sdk"]


def make_rows(folder: Path, count: int) -> list[bytes]:
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    values = [random.bytes(100) + b"x" * 100 for _ in range(count)]
    schema = pa.schema([pa.field("value", pa.binary(), nullable=False)])
    share = -(-count // PARTITIONS)
    for number in range(PARTITIONS):
        table = pa.table([pa.array(values[number * share : (number + 1) * share], pa.binary())], schema=schema)
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_table(table, max_chunksize=10_000)
    return values


def stream(spark: Any, server: Serving, arrow: Path, topic: str) -> None:
    where = {"heapline.url": server.target, "heapline.api_key_file": str(server.key_file), "topic": topic}
    with tempfile.TemporaryDirectory() as checkpoint:
        rows = spark.readStream.format("bare_arrow").load(str(arrow))
        writer = rows.writeStream.format("heapline").options(**where).option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()


def enqueue(server: Serving, values: list[bytes], topic: str) -> None:
    asyncio.run(_enqueue(server, values, topic))


async def _enqueue(server: Serving, values: list[bytes], topic: str) -> None:
    starts = iter(range(0, len(values), BATCH))
    async with heapline.connect(server.target, api_key=server.credential()) as hl:

        async def work() -> None:
            for start in starts:
                await hl.enqueue_batch(topic, [Outgoing(value) for value in values[start : start + BATCH]])

        await asyncio.gather(*(work() for _ in range(UNDER_WAY)))
