"""One group, and ten, reading a backlog in one process with the broker.

The baseline of one group is reading the same journal's files in order and checksumming them: the least
work that returns correct bytes. Each row is delivered, accessed and acked, durably, while the next rows are
read; the clock stops when the group is at the end. CPU is of the whole process, because it
does not depend on other work on the machine.

*Ten groups* read the same rows at the same time, compared with one that reads them alone: pages are shared, so only the
work of each group itself is done ten times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import heapline
from benchmarks.engine import Figure, figure, read_and_checksum
from benchmarks.streams.publishing import publish, sized

CREDITS = 20_000
ACK_ROWS = 1000
GROUPS = 10
Reading = Callable[[Any, str, int], Awaitable[int]]


def run(quick: bool, directory: Path, scale: float) -> Iterator[Figure]:
    yield from asyncio.run(reading(directory / "groups", sized(1_000_000, quick, scale)))


class Spent(NamedTuple):
    rate: float  # rows a second
    cpu_us: float  # of a row

    @classmethod
    def since(cls, start: tuple[float, float], rows: int) -> Spent:
        return cls(rows / (perf_counter() - start[0]), (time.process_time() - start[1]) / rows * 1e6)


def clocks() -> tuple[float, float]:
    return perf_counter(), time.process_time()


async def reading(path: Path, count: int) -> list[Figure]:
    async with heapline.open(str(path), spare_segment_bytes=1 << 26) as hl:
        await hl.create_topic("events")
        await publish(hl, "events", count)
        plain = max([files_alone(path, count) for _ in range(2)])
        batches = max([await timed(hl, in_batches, f"b{turn}", count) for turn in range(3)])
        messages = max([await timed(hl, one_by_one, f"m{turn}", count) for turn in range(2)])
        share = max(count // 4, 1000)
        alone = max([await timed(hl, in_batches, f"alone{turn}", share) for turn in range(3)])
        ten = max([await ten_groups(hl, f"ten{turn}", share) for turn in range(2)])
    return [
        *figures(f"a group reads {count:,}, batches=True", batches, plain, 500_000),
        *figures(f"a group reads {count:,}, as messages", messages, plain, 150_000),
        figure(
            f"ten groups read {share:,} each, next to one, batches=True", share / ten.rate, "s", share / alone.rate,
            alone.rate / ten.rate, "≤ 4×", alone.rate / ten.rate <= 4, better="lower",
        ),
        figure(
            f"ten groups read {share:,} each, next to one: CPU", ten.cpu_us, "µs/row", alone.cpu_us,
            ten.cpu_us / alone.cpu_us, None, None, better="lower",
        ),
    ]  # fmt: skip


def figures(name: str, spent: Spent, plain: Spent, least: int) -> Iterator[Figure]:
    target = f"≥ {least // 1000} k/s"
    yield figure(name, spent.rate, "messages/s", plain.rate, spent.rate / plain.rate, target, spent.rate >= least)
    ratio = spent.cpu_us / plain.cpu_us
    yield figure(f"{name}: CPU", spent.cpu_us, "µs/message", plain.cpu_us, ratio, None, None, better="lower")


def files_alone(path: Path, count: int) -> Spent:
    (topic,) = (path / "topics" / "default").iterdir()
    start = clocks()
    read_and_checksum(sorted(topic.glob("*.seg")))
    return Spent.since(start, count)


async def timed(hl: heapline.Broker, read: Reading, group: str, count: int) -> Spent:
    """Create a new group, from the start of the topic on."""
    start = clocks()
    got = await read(hl, group, count)
    spent = Spent.since(start, got)
    await hl.delete_group("events", group)
    return spent


async def ten_groups(hl: heapline.Broker, name: str, count: int) -> Spent:
    """Return the rate by the rows of one of them."""
    start = clocks()
    await asyncio.gather(*(in_batches(hl, f"{name}-{number}", count) for number in range(GROUPS)))
    spent = Spent.since(start, count)
    for number in range(GROUPS):
        await hl.delete_group("events", f"{name}-{number}")
    return spent


class Acks:
    """Ack one page at a time, while the next rows are processed."""

    def __init__(self) -> None:
        self._last: asyncio.Task[None] | None = None

    async def add(self, ack: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.end()
        self._last = asyncio.create_task(ack())

    async def end(self) -> None:
        if self._last is not None:
            await self._last


async def in_batches(hl: heapline.Broker, group: str, count: int) -> int:
    """Read until the group has acked this many rows; return the count."""
    got, seen, acks = 0, 0, Acks()
    async with hl.subscribe("events", group=group, credits=CREDITS, batches=True) as rows:
        async for batch in rows:
            got += len(batch)
            seen += int(batch.offsets[-1]) + len(batch.payloads)
            await acks.add(batch.ack)
            if got >= count:
                break
        await acks.end()
    return got


async def one_by_one(hl: heapline.Broker, group: str, count: int) -> int:
    """Read a group as single messages, acked by the thousand."""
    got, seen, acks, done = 0, 0, Acks(), []
    async with hl.subscribe("events", group=group, credits=CREDITS) as rows:
        async for message in rows:
            got += 1
            seen += len(message.payload)
            done.append(message)
            if len(done) == ACK_ROWS or got == count:
                await acks.add(partial(rows.ack, done))
                done = []
                if got == count:
                    break
        await acks.end()
    return got
