"""Measure how much a full scan by Spark slows the queue: lifecycles with and without repeated reads of a large topic.

The engine is in this process, the work of Spark in others. With as few cores as here, any scan takes some of them. So
the CPU time per message is reported as well; this is the cost of reading for the queue itself. Rounds with and without
the scan take turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from benchmarks.engine import batched, figure
from benchmarks.spark.read import fill, loaded, summed

ROUNDS = 3
TARGET = 0.6
Figure = dict[str, Any]


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    from heapline.spark import session

    data = directory.resolve() / "ours"
    fill(data, 200_000 if quick else 1_000_000)
    batches = 400 if quick else 3000
    spark = session()
    try:
        scan = lambda: summed(loaded(spark, path=str(data)))  # noqa: E731  # all columns
        scan()  # starts Spark's workers and fills the page cache
        asyncio.run(batched(data, batches // 4, 1))
        rounds = [(lived(data, batches), lived_while(scan, data, batches)) for _ in range(ROUNDS)]
    finally:
        spark.stop()
    yield from figures([without for without, _ in rounds], [during for _, during in rounds])


def figures(without: list[Figure], during: list[Figure]) -> Iterator[Figure]:
    alone, beside = (median(found["rate"] for found in rounds) for rounds in (without, during))
    scans = sum(found["scans"] for found in during)
    yield figure(
        f"lifecycle during a full scan ({scans} scans in {len(during)} rounds)", beside, "messages/s", alone,
        beside / alone, f"≥ {TARGET:g}×", beside / alone >= TARGET,
    )  # fmt: skip
    alone, beside = (median(found["cpu_us"] for found in rounds) for rounds in (without, during))
    yield figure("processor time of the queue for it", beside, "µs/message", alone, beside / alone, None, None, "lower")


def lived(data: Path, batches: int) -> Figure:
    before = process_time()
    found: Figure = dict(asyncio.run(batched(data, batches, 1)))
    return found | {"cpu_us": (process_time() - before) * 1e6 / found["messages"]}


def lived_while(scan: Callable[[], None], data: Path, batches: int) -> Figure:
    with repeated(scan) as count:
        found = lived(data, batches)
        return found | {"scans": count()}


@contextmanager
def repeated(scan: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Repeat the scan in a thread that waits for Spark; return how many have begun."""
    over, begun, failed = threading.Event(), [0], []

    def work() -> None:
        try:
            while not over.is_set():
                begun[0] += 1
                scan()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: begun[0]
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
