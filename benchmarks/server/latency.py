"""How soon one message is answered, and how soon it reaches a consumer that waits, at 500 single enqueues a second.

The disk is the yardstick: raw fsyncs are timed before and after, on the same disk, while nothing else runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.fsyncs import fsync_ms
from benchmarks.server.schedule import open_loop, percentile, poisson
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import OPEN_LOOP_PER_S, Bound, answer_bounds, delivery_bounds
from heapline.client.wire import WireBroker
from heapline.model import LeaseRef
from heapline.wire.columns import cut, read_ints
from heapline.wire.schema import pb

CREDITS = 1000
DELIVERED_S = 30.0
NUMBER = 8  # bytes of the payload that tell which message it is


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    seconds = 3.0 if quick else 20.0
    with heapline_server(directory / "ours") as server:
        fsyncs = fsync_ms(directory)
        yield Step("open loop", 0, 2)
        answered, late = run_loop(answer_times(server, seconds))
        yield Step("open loop, a consumer waiting", 1, 2)
        delivered = run_loop(delivery_times(server, seconds))
        fsyncs += fsync_ms(directory)
    raw = percentile(fsyncs, 50)
    yield figure("raw fdatasync of 4 KiB, p50", raw, "ms", None, None, None, None, "lower")
    yield figure("raw fdatasync of 4 KiB, p99", percentile(fsyncs, 99), "ms", None, None, None, None, "lower")
    what = f"{OPEN_LOOP_PER_S} enqueues/s"
    yield from figures(f"{what}: answered", answered, raw, answer_bounds(raw))
    yield from figures(f"{what}, a consumer waiting: delivered", delivered, raw, delivery_bounds(raw))
    yield figure(
        f"{what}: started late by the client itself, p50", percentile(late, 50) * 1e3, "ms", None, None, None, None,
        "lower",
    )  # fmt: skip


def figures(what: str, seconds: list[float], raw_ms: float, bounds: dict[int, Bound]) -> Iterator[Figure]:
    for percent, bound in bounds.items():
        ms = percentile(seconds, percent) * 1e3
        yield figure(f"{what}, p{percent}", ms, "ms", raw_ms, ms / raw_ms, str(bound), bound.holds(ms), "lower")


async def answer_times(server: Serving, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds from when each enqueue was due to its answer; and how late the client was with each."""
    times: list[float] = []
    async with WireBroker(server.target, credential=server.credential()) as hl:
        await hl.create_topic("answers")

        async def call(number: int, due_at: float) -> None:
            await hl.enqueue("answers", PAYLOAD, priority=number)
            times.append(perf_counter() - due_at)

        await open_loop(poisson(OPEN_LOOP_PER_S, 0.5), call)  # connect and warm up
        times.clear()
        late = await open_loop(poisson(OPEN_LOOP_PER_S, seconds), call)
    return times, late


async def delivery_times(server: Serving, seconds: float) -> list[float]:
    """Seconds from when each enqueue was due to its arrival at a consumer with an open PopStream, which acks it."""
    due_at: dict[int, float] = {}
    arrived: dict[int, float] = {}
    everything = asyncio.Event()
    due = poisson(OPEN_LOOP_PER_S, seconds)
    async with WireBroker(server.target, credential=server.credential()) as hl, asyncio.TaskGroup() as tasks:
        await hl.create_topic("deliveries")

        async def consume() -> None:
            credits: asyncio.Queue[int] = asyncio.Queue()
            async for answer in hl.calls.stream("PopStream", requests("deliveries", credits)):
                now, columns = perf_counter(), answer.columns
                for payload in cut(columns.payloads, columns.payload_sizes, columns.count):
                    arrived.setdefault(int.from_bytes(payload[:NUMBER], "little"), now)
                pairs = zip(read_ints(columns.ids).tolist(), read_ints(columns.tokens).tolist(), strict=True)
                tasks.create_task(hl.ack([LeaseRef(answer.topic, id, token) for id, token in pairs]))
                credits.put_nowait(columns.count)
                if len(arrived) == len(due):
                    everything.set()

        async def call(number: int, when: float) -> None:
            due_at[number] = when
            await hl.enqueue("deliveries", number.to_bytes(NUMBER, "little") + PAYLOAD[NUMBER:])

        consumer = tasks.create_task(consume())
        await open_loop(due, call)
        await asyncio.wait_for(everything.wait(), DELIVERED_S)
        consumer.cancel()
    return [arrived[number] - when for number, when in due_at.items()]


async def requests(topic: str, credits: asyncio.Queue[int], first: int = CREDITS) -> AsyncIterator[object]:
    """What a consumer says on a PopStream: `first` credits, then those that are put into the queue."""
    yield pb.PopStreamRequest(start=pb.PopStart(topic=topic), credits=first)
    while True:
        yield pb.PopStreamRequest(credits=await credits.get())
