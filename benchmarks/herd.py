"""Bursts of timers, and fast answers: how a million messages that become due together delay other callers.

The baseline is the same topic with the same messages just before they become due: a few tasks enqueue one
message at a time and a few pop and ack one at a time, on a real disk with an fsync per commit. Then the broker's clock
is set ahead (as after an outage), and the same tasks continue while the burst fires. Ratios are of 99th percentiles.

`stats` is measured on a topic of few messages and on one of many: the ratio shows whether it reads messages.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import heapline
from benchmarks.engine import Figure, figure
from heapline.clock import SystemClock
from heapline.contract.config import BrokerConfig
from heapline.contract.message import Outgoing
from heapline.engine import EmbeddedBroker

PAYLOAD = b"x" * 64
HOUR = 3600.0
ENQUEUERS, ACKERS = 4, 4


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    yield from herds(directory, 200_000 if quick else 1_000_000, 2.0 if quick else 4.0)
    yield from answers(directory, 200_000 if quick else 2_000_000)


class ShiftedClock(SystemClock):
    """The system's clock, which can be set ahead: everything in that time becomes due together."""

    ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms

    def boot_ms(self) -> int:
        return super().boot_ms() + self.ahead_ms


# -- herds -------------------------------------------------------------------------------------------------------------


def herds(directory: Path, count: int, quiet_s: float) -> Iterator[Figure]:
    for partitions in (1, 16):
        quiet, herd, spent = asyncio.run(herd_of(directory / f"herd{partitions}", count, quiet_s, partitions))
        for what in ("enqueue", "ack"):
            before, during = p(quiet[what], 99), p(herd[what], 99)
            ratio = during / before
            yield figure(
                f"{what} p99 while {count} timers fire, {partitions} partitions", during, "ms", before, ratio, "≤ 3×",
                ratio <= 3, better="lower",
            )  # fmt: skip
            before, during = p(quiet[what], 50), p(herd[what], 50)
            yield figure(
                f"{what} p50 while {count} timers fire, {partitions} partitions", during, "ms", before,
                during / before, None, None, better="lower",
            )  # fmt: skip
        yield figure(
            f"firing {count} timers meanwhile, {partitions} partitions", count / spent, "timers/s", None, None, None,
            None,
        )  # fmt: skip


def p(samples: list[float], percent: float) -> float:
    return float(np.percentile(samples, percent)) * 1000


async def herd_of(path: Path, count: int, quiet_s: float, partitions: int) -> tuple[Any, Any, float]:
    """Return latencies of a quiet phase and of the phase in which `count` timers fire, and how long that took."""
    clock = ShiftedClock()
    async with EmbeddedBroker(str(path), config=BrokerConfig(), clock=clock) as hl:
        await hl.create_topic("jobs", partitions=partitions)
        await fill(hl, "jobs", count, delay=HOUR)
        await hl.enqueue_batch("jobs", [Outgoing(PAYLOAD)] * 5000)
        gc.collect()
        deadline = perf_counter() + quiet_s
        quiet = await load(hl, lambda: perf_counter() < deadline)
        topic = hl.topics._runners["jobs"].loaded.topic
        clock.ahead_ms += round(1.1 * HOUR * 1000)
        start = perf_counter()
        herd = await load(hl, lambda: any(p.entries.delayed for p in topic.partitions))
        return quiet, herd, perf_counter() - start


async def fill(hl: heapline.Broker, topic: str, count: int, delay: float | None = None) -> None:
    rng = random.Random(7)
    for start in range(0, count, 16_000):
        await asyncio.gather(*(
            hl.enqueue_batch(
                topic, [Outgoing(PAYLOAD, rng.randrange(1 << 20), delay=delay) for _ in range(s, min(s + 1000, count))]
            )
            for s in range(start, min(start + 16_000, count), 1000)
        ))  # fmt: skip


async def load(hl: heapline.Broker, goes_on: Callable[[], bool]) -> dict[str, list[float]]:
    """Enqueue, pop and ack one message at a time in several tasks; return the seconds of each call."""
    spent: dict[str, list[float]] = {"enqueue": [], "pop": [], "ack": []}

    async def timed(what: str, call: Awaitable[Any]) -> Any:
        start = perf_counter()
        result = await call
        spent[what].append(perf_counter() - start)
        return result

    async def enqueuer() -> None:
        while goes_on():
            await timed("enqueue", hl.enqueue("jobs", PAYLOAD, priority=len(spent["enqueue"])))

    async def acker() -> None:
        while goes_on():
            for message in await timed("pop", hl.pop("jobs", wait=0.05)):
                await timed("ack", message.ack())

    await asyncio.gather(*(enqueuer() for _ in range(ENQUEUERS)), *(acker() for _ in range(ACKERS)))
    return spent


# -- stats -------------------------------------------------------------------------------------------------------------


def answers(directory: Path, count: int) -> Iterator[Figure]:
    small, large = asyncio.run(stats_times(directory / "stats", 10_000, count))
    yield figure(
        f"stats of {count} messages", large, "ms", small, large / small, None, None,
        better="lower",
    )  # fmt: skip


async def stats_times(path: Path, *counts: int) -> list[float]:
    """Return milliseconds, the median of many, alternating; half of the messages are delayed, spread over a day."""
    samples: dict[int, list[float]] = {count: [] for count in counts}
    async with EmbeddedBroker(str(path), config=BrokerConfig()) as hl:
        for count in counts:
            await fill_both(hl, f"t{count}", count)
        for _ in range(101):
            for count in counts:
                start = perf_counter()
                await hl.stats(f"t{count}")
                samples[count].append(perf_counter() - start)
    return [p(samples[count], 50) for count in counts]


async def fill_both(hl: heapline.Broker, topic: str, count: int) -> None:
    await hl.create_topic(topic)
    await fill(hl, topic, count // 2)
    rng = random.Random(9)
    for start in range(0, count // 2, 10_000):
        size = min(10_000, count // 2 - start)
        await hl.enqueue_batch(
            topic, [Outgoing(PAYLOAD, delay=rng.random() * 86400) for _ in range(size)], atomic=False
        )
    await hl.snapshot(topic)  # now, not during the measurement
