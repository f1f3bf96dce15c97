"""How soon one enqueue is answered at 500 per second, and one pop from a backlog. Raw fsyncs are the yardstick."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import heapline.sql
from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.fsyncs import fsync_ms
from benchmarks.server.schedule import open_loop, percentile, poisson
from benchmarks.server.targets import OPEN_LOOP_PER_S
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started
from heapline.contract.message import Outgoing


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 3.0) if quick else (5, 4.0)
    fsyncs: list[float] = []
    answered: list[float] = []
    dequeued: list[float] = []
    with started(directory) as database:
        for number in range(rounds):
            fsyncs += fsync_ms(directory)
            yield Step("enqueues", 2 * number, 2 * rounds)
            answered += run_loop(answer_times(database, poisson(OPEN_LOOP_PER_S, seconds, seed=number)))
            yield Step("pops", 2 * number + 1, 2 * rounds)
            dequeued += run_loop(pop_times(database, round(seconds * 100)))
    raw = percentile(fsyncs, 50)
    for what, times, bound in (
        (f"{OPEN_LOOP_PER_S} enqueues/s: answered", answered, targets.ANSWERED_MS),
        ("one pop from a backlog", dequeued, targets.DEQUEUED_MS),
    ):
        for percent in (50, 99):
            ms = percentile(times, percent) * 1e3
            target, met = (str(bound), bound.holds(ms)) if percent == 50 else (None, None)
            name = f"{what}, p{percent}, next to a raw fsync"
            yield figure(name, ms, "ms", raw, ms / raw, target, met, "lower")


async def answer_times(database: Database, due: list[float]) -> list[float]:
    """Return the seconds from when each enqueue was due to its answer."""
    times: list[float] = []
    async with heapline.sql.open([database.url()]) as hl:
        await hl.create_topic("answers")
        await asyncio.gather(*(hl.enqueue("answers", PAYLOAD) for _ in range(20)))  # connects

        async def call(number: int, due_at: float) -> None:
            await hl.enqueue("answers", PAYLOAD, priority=number)
            times.append(perf_counter() - due_at)

        await open_loop(due, call)
    return times


async def pop_times(database: Database, count: int) -> list[float]:
    times: list[float] = []
    async with heapline.sql.open([database.url()]) as hl:
        await hl.create_topic("pops")
        for _ in range(targets.BACKLOG // 1000):
            await hl.enqueue_batch("pops", [Outgoing(PAYLOAD)] * 1000)
        for _ in range(count):
            began = perf_counter()
            messages = await hl.pop("pops")
            times.append(perf_counter() - began)
            await hl.ack(messages)
    return times
