"""Publishing to one partition in batches of 1000, each durable before its answer.

The baseline is the disk itself: as many writes of the same bytes, each followed by fdatasync, in the same process right
after (as for lifecycles in engine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import heapline
from benchmarks.engine import Figure, best_of, figure, raw_disk
from heapline.contract.message import Outgoing

PAYLOAD = b"x" * 256
BATCH = 1000
IN_FLIGHT = 4


def run(quick: bool, directory: Path, scale: float) -> Iterator[Figure]:
    count = sized(1_000_000, quick, scale)
    reported = best_of(2, lambda: asyncio.run(publishing(directory / "publish", count)))
    raw = raw_disk(
        directory, reported["commits"], reported["bytes"], reported["bytes"] // max(1, reported["commits"]), whole=True
    )
    yield figure(
        f"publish {count:,} in batches of {BATCH}, {IN_FLIGHT} in flight, one partition", reported["rate"],
        "messages/s",
        count / raw, reported["rate"] * raw / count, "≥ 100 k/s", reported["rate"] >= 100_000,
    )  # fmt: skip


def sized(full: int, quick: bool, scale: float, least: int = 5000) -> int:
    """Return a number of messages, in whole thousands."""
    return max(least, round(full * scale * (0.1 if quick else 1) / 1000) * 1000)


async def publishing(path: Path, count: int) -> dict[str, float]:
    async with heapline.open(str(path), spare_segment_bytes=1 << 26) as hl:
        await hl.create_topic("events")
        start = perf_counter()
        await publish(hl, "events", count)
        spent = perf_counter() - start
        stats = await hl.stats("events")
        assert stats.ready == count
        await hl.delete_topic("events")
    return {"rate": count / spent, "commits": stats.log.commits_total, "bytes": stats.log.journal_bytes_written_total}


async def publish(hl: heapline.Broker, topic: str, count: int) -> None:
    left = count // BATCH

    async def publisher() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await hl.enqueue_batch(topic, [Outgoing(PAYLOAD, left) for _ in range(BATCH)])

    await asyncio.gather(*(publisher() for _ in range(IN_FLIGHT)))
