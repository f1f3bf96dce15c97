"""The cost of many partitions: pops over 20 of them, a pop over 1 to 1000, a batch spread over 20.

The baseline is always the same work on one partition, in the same process, right before. The garbage collector is
set as `heapline serve` sets it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

import heapline
from benchmarks.engine import best_of, figure
from benchmarks.server.targets import Bound, judged
from heapline.cli.serve import tune_garbage_collection

Figure = dict[str, Any]
PAYLOAD = b"x" * 256
#: (messages per pop, partitions) → the maximum cost, as a multiple of that with one partition.
POP_OF_ONE_PARTITION = {(100, 100): Bound("≤", 2.5, "×"), (100, 1000): Bound("≤", 4.0, "×")}


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    tune_garbage_collection()
    yield from durable_pops(directory, 200_000 if quick else 2_000_000)
    yield from cost_of_a_pop(directory, 50_000 if quick else 200_000)
    yield from batches(directory, 60 if quick else 400)


def durable_pops(directory: Path, count: int) -> Iterator[Figure]:
    pops = min(count // 200, 5000)
    one = best_of(2, lambda: asyncio.run(popping(directory / "pops-1", count, 1, pops)))
    twenty = best_of(2, lambda: asyncio.run(popping(directory / "pops-20", count, 20, pops)))
    yield figure(
        f"durable pops of 100, 16 in flight, 20 partitions holding {count}", twenty, "messages/s", one, twenty / one,
        "≥ 0.5×", twenty / one >= 0.5,
    )  # fmt: skip


async def popping(path: Path, count: int, partitions: int, pops: int) -> float:
    async with heapline.open(str(path), spare_segment_bytes=1 << 26) as hl:
        topic = await filled(hl, count, partitions)
        left = pops

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                assert len(await hl.pop(topic, 100)) == 100

        start = perf_counter()
        await asyncio.gather(*(client() for _ in range(16)))
        spent = perf_counter() - start
        await hl.delete_topic(topic)
    return pops * 100 / spent


async def filled(hl: Any, count: int, partitions: int, **config: Any) -> str:
    """Create a topic of this many messages, spread evenly."""
    topic = f"t{random.getrandbits(40)}"
    await hl.create_topic(topic, partitions=partitions, **config)
    rng = np.random.default_rng(11)
    for start in range(0, count, 1000):  # one call after another: calls that arrive together share a partition
        priorities = rng.integers(0, 1 << 40, min(1000, count - start)).tolist()
        await hl.enqueue_batch(topic, [heapline.Outgoing(PAYLOAD, priority) for priority in priorities])
    return topic


def cost_of_a_pop(directory: Path, count: int) -> Iterator[Figure]:
    """Decided and written, not synced: this measures the work, not the disk."""
    for size in (1, 100):
        base = None
        for partitions in (1, 10, 100, 1000):
            cost = asyncio.run(one_by_one(directory / f"cost-{partitions}", count, partitions, size))
            base = base or cost
            bound = POP_OF_ONE_PARTITION.get((size, partitions))
            name = f"pop of {size} from {partitions} partitions: CPU"
            yield figure(name, cost, "µs", base, cost / base, *judged(bound, cost / base), better="lower")


async def one_by_one(path: Path, count: int, partitions: int, size: int) -> float:
    async with heapline.open(str(path), spare_segment_bytes=0) as hl:
        # Small batches, one after another, so that even a thousand partitions all get some.
        topic = f"t{random.getrandbits(40)}"
        await hl.create_topic(topic, partitions=partitions, fsync="os")
        rng = np.random.default_rng(5)
        for _ in range(0, count, 50):
            await hl.enqueue_batch(topic, [heapline.Outgoing(b"x", p) for p in rng.integers(0, 1 << 40, 50).tolist()])
        pops = 2000 if size == 1 else 200
        await hl.pop(topic, size)
        start = process_time()
        for _ in range(pops):
            assert len(await hl.pop(topic, size)) == size
        spent = process_time() - start
        await hl.delete_topic(topic)
    return spent / pops * 1e6


def batches(directory: Path, count: int) -> Iterator[Figure]:
    one = best_of(3, lambda: asyncio.run(spreading(directory / "batch-1", count, 1)))
    twenty = best_of(3, lambda: asyncio.run(spreading(directory / "batch-20", count, 20)))
    yield figure(
        "batch of 1000 over 20 partitions by key", twenty, "messages/s", one, twenty / one, "≥ 0.6×",
        twenty / one >= 0.6,
    )  # fmt: skip


async def spreading(path: Path, count: int, partitions: int) -> float:
    async with heapline.open(str(path), spare_segment_bytes=1 << 26) as hl:
        topic = f"t{random.getrandbits(40)}"
        await hl.create_topic(topic, partitions=partitions)
        rng = np.random.default_rng(3)
        batch = [heapline.Outgoing(PAYLOAD, p, f"customer-{p % 997}") for p in rng.integers(0, 1 << 40, 1000).tolist()]
        left = count

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await hl.enqueue_batch(topic, batch)

        start = perf_counter()
        await asyncio.gather(*(client() for _ in range(4)))
        spent = perf_counter() - start
        await hl.delete_topic(topic)
    return count * 1000 / spent
