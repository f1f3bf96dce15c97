"""The time until one enqueue is answered at 500 per second, and one pop from a backlog, compared with raw fsyncs.

The order is strict with k=1: both go to Postgres. With k=1000 enqueues are acknowledged by the write-ahead log, and
pops take from the ready queue in Valkey.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import heapline.sql
from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.harness import SCRATCH
from benchmarks.peers.redis import Redis
from benchmarks.rows import Step
from benchmarks.server.fsyncs import fsync_ms
from benchmarks.server.schedule import open_loop, percentile, poisson
from benchmarks.server.targets import OPEN_LOOP_PER_S
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started
from heapline.contract.message import Outgoing

RELAXED = 1000
ENQUEUES = f"{OPEN_LOOP_PER_S} enqueues/s: answered"


class Cache(Redis):
    """Valkey that syncs nothing, because the ready queue can be lost."""

    fsync: ClassVar[str] = "no"


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 3.0) if quick else (5, 4.0)
    fsyncs: list[float] = []
    times: dict[str, list[float]] = {}
    with started(directory) as database, cache(directory) as redis:
        for number in range(rounds):
            fsyncs += fsync_ms(directory)
            for n, (what, measured) in enumerate(measurements(database, redis, directory, seconds, number)):
                yield Step(what, 4 * number + n, 4 * rounds)
                times.setdefault(what, []).extend(run_loop(measured))
    raw = percentile(fsyncs, 50)
    for what, found in times.items():
        bound = targets.ANSWERED_MS if what.startswith(ENQUEUES) else targets.DEQUEUED_MS
        for percent in (50, 99):
            ms = percentile(found, percent) * 1e3
            has_target = percent == 50 and f"k={RELAXED}" in what
            target, met = (str(bound), bound.holds(ms)) if has_target else (None, None)
            yield figure(f"{what}, p{percent}, next to a raw fsync", ms, "ms", raw, ms / raw, target, met, "lower")


@contextlib.contextmanager
def cache(directory: Path) -> Iterator[str]:
    server = Cache(SCRATCH / "peers" / "redis")
    server.install()
    place = directory / "valkey"
    place.mkdir(exist_ok=True)
    with server.start(place) as running:
        yield f"redis://127.0.0.1:{running.port}/0"


def measurements(
    database: Database, redis: str, directory: Path, seconds: float, number: int
) -> Iterator[tuple[str, Any]]:
    """Yield the name of each case, and the coroutine that returns its seconds."""
    due, pops = poisson(OPEN_LOOP_PER_S, seconds, seed=number), round(seconds * 100)
    wal = {"wal": str(directory / "wal")}
    yield f"{ENQUEUES} by Postgres, k=1", answer_times(database, due, 1)
    yield f"{ENQUEUES} by the write-ahead log, k={RELAXED}", answer_times(database, due, RELAXED, **wal)
    yield "one pop from a backlog in Postgres, k=1", pop_times(database, pops, 1)
    yield f"one pop from the ready queue, k={RELAXED}", pop_times(database, pops, RELAXED, redis=redis)


async def answer_times(database: Database, due: list[float], k: int, **settings: Any) -> list[float]:
    """Return the seconds from when each enqueue was due to its answer."""
    times: list[float] = []
    async with heapline.sql.open([database.url()], **settings) as hl:
        topic = f"answers-{k}"
        await hl.create_topic(topic, k=k)
        await asyncio.gather(*(hl.enqueue(topic, PAYLOAD) for _ in range(20)))  # connects

        async def call(number: int, due_at: float) -> None:
            await hl.enqueue(topic, PAYLOAD, priority=number)
            times.append(perf_counter() - due_at)

        await open_loop(due, call)
    return times


async def pop_times(database: Database, count: int, k: int, **settings: Any) -> list[float]:
    times: list[float] = []
    async with heapline.sql.open([database.url()], **settings) as hl:
        topic = f"pops-{k}"
        await hl.create_topic(topic, k=k)
        for _ in range(targets.BACKLOG // 1000):
            await hl.enqueue_batch(topic, [Outgoing(PAYLOAD)] * 1000)
        for _ in range(count):
            began = perf_counter()
            messages = await hl.pop(topic)
            times.append(perf_counter() - began)
            await hl.ack(messages)
    return times
