"""One group, and ten, reading a backlog in one process with the broker.

The baseline of one group is reading the same journal's files one after the other and checksumming them: what has to be
done at least to hand out bytes that are right. Each row is delivered, looked at and acked, durably; the group is at the
end when the clock stops. A topic is made once and read by a group of its own each time.

*Ten groups* read the same rows side by side, next to one that reads them alone: pages are shared, so only what is each
group's own comes ten times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import heapline
from benchmarks.engine import Figure, figure, read_and_checksum
from benchmarks.streams.publishing import publish, sized

CREDITS = 20_000
ACK_ROWS = 1000
GROUPS = 10


def run(quick: bool, directory: Path, scale: float) -> Iterator[Figure]:
    yield from asyncio.run(reading(directory / "groups", sized(1_000_000, quick, scale)))


async def reading(path: Path, count: int) -> list[Figure]:
    async with heapline.open(str(path), spare_segment_bytes=1 << 26) as hl:
        await hl.create_topic("events")
        await publish(hl, "events", count)
        (topic,) = (path / "topics" / "default").iterdir()
        plain = count / min(read_and_checksum(sorted(topic.glob("*.seg"))) for _ in range(2))
        batches = max([await one_group(hl, f"b{turn}", count) for turn in range(2)])
        messages = max([await one_by_one(hl, f"m{turn}", count) for turn in range(2)])
        share = max(count // 4, 1000)
        alone = share / max([await one_group(hl, f"alone{turn}", share) for turn in range(2)])
        start = perf_counter()
        await asyncio.gather(*(one_group(hl, f"ten{number}", share) for number in range(GROUPS)))
        ten = perf_counter() - start
    return [
        figure(
            f"a group reads {count:,}, batches=True", batches, "messages/s", plain, batches / plain, "≥ 500 k/s",
            batches >= 500_000,
        ),
        figure(
            f"a group reads {count:,}, as messages", messages, "messages/s", plain, messages / plain, "≥ 150 k/s",
            messages >= 150_000,
        ),
        figure(
            f"ten groups read {share:,} each, next to one, batches=True", ten, "s", alone, ten / alone, "≤ 4×",
            ten / alone <= 4, better="lower",
        ),
    ]  # fmt: skip


async def one_group(hl: heapline.Broker, group: str, count: int) -> float:
    """Rows a second of a new group from the start on, until it has acked so many."""
    start, got, total = perf_counter(), 0, 0
    async with hl.subscribe("events", group=group, credits=CREDITS, batches=True) as rows:
        async for batch in rows:
            got += len(batch)
            total += int(batch.offsets.sum()) + len(batch.payloads)
            await batch.ack()
            if got >= count:
                break
    spent = perf_counter() - start
    await hl.delete_group("events", group)
    return got / spent


async def one_by_one(hl: heapline.Broker, group: str, count: int) -> float:
    """The same as messages, acked by the thousand."""
    start, got, total, done = perf_counter(), 0, 0, []
    async with hl.subscribe("events", group=group, credits=CREDITS) as rows:
        async for message in rows:
            got += 1
            total += len(message.payload)
            done.append(message)
            if len(done) == ACK_ROWS or got == count:
                await rows.ack(done)
                done = []
                if got == count:
                    break
    spent = perf_counter() - start
    await hl.delete_group("events", group)
    return got / spent
