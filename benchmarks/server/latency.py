"""How soon one message is answered, and how soon it reaches a consumer that waits, at 500 single enqueues a second.

The disk is the yardstick: raw fsyncs are timed before and after each round, on the same disk, while our servers rest.
A bare gRPC server gets the same load in turns: what it takes on a busy machine, no queue behind gRPC could save.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from benchmarks.drivers.proc import cpu_seconds
from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.bare_server import METHOD, SIZE
from benchmarks.server.fsyncs import fsync_ms
from benchmarks.server.schedule import open_loop, percentile, poisson
from benchmarks.server.spawned import Serving, bare_server, heapline_server
from benchmarks.server.targets import OPEN_LOOP_PER_S, Bound, answer_bounds, delivery_bounds
from heapline.client.transports.grpc import GrpcBroker
from heapline.client.transports.transport import PopStream
from heapline.contract.columns import unpack
from heapline.contract.leases import Pop
from heapline.contract.message import LeaseRef

Bounds = Mapping[int, Bound | None]
CREDITS = 1000
DELIVERED_S = 30.0
NUMBER = 8  # bytes of the payload that tell which message it is


@dataclass
class Samples:
    """Of all rounds together; fsyncs in milliseconds, the rest in seconds."""

    fsyncs: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("answered", "bare", "delivered"), 0.0))

    def take(self, kind: str, server: Serving, work: Coroutine[Any, Any, list[float]]) -> None:
        """Run a round, and add what it measured and what the server spent."""
        before = cpu_seconds(server.pid)
        getattr(self, kind).extend(run_loop(work))
        self.cpu[kind] += cpu_seconds(server.pid) - before

    def cpu_us(self, kind: str) -> float:
        """CPU microseconds of the server for each message."""
        spent: float = self.cpu[kind] / len(getattr(self, kind)) * 1e6
        return spent


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 3.0) if quick else (5, 4.0)
    seen = Samples()
    with heapline_server(directory / "ours") as ours, bare_server(directory / "bare") as bare:
        for number in range(rounds):
            yield Step("open loop", 3 * number, 3 * rounds)
            seen.fsyncs += fsync_ms(directory)
            due = poisson(OPEN_LOOP_PER_S, seconds, seed=number)
            seen.take("answered", ours, answer_times(ours, due, seen.late))
            yield Step("open loop, bare gRPC", 3 * number + 1, 3 * rounds)
            seen.take("bare", bare, bare_answer_times(bare, due))
            yield Step("open loop, a consumer waiting", 3 * number + 2, 3 * rounds)
            seen.take("delivered", ours, delivery_times(ours, due))
            seen.fsyncs += fsync_ms(directory)
    yield from all_figures(seen)


def all_figures(seen: Samples) -> Iterator[Figure]:
    raw = percentile(seen.fsyncs, 50)
    for percent in (50, 99):
        ms = percentile(seen.fsyncs, percent)
        yield figure(f"raw fdatasync of 4 KiB, p{percent}", ms, "ms", None, None, None, None, "lower")
    what = f"{OPEN_LOOP_PER_S} enqueues/s"
    yield from figures(f"{what}: answered", seen.answered, raw, answer_bounds(raw))
    yield from figures(f"{what}: answered by bare gRPC with fsync", seen.bare, raw, {50: None, 99: None})
    yield from figures(f"{what}, a consumer waiting: delivered", seen.delivered, raw, delivery_bounds(raw))
    floor = seen.cpu_us("bare")
    for how, kind in (("", "answered"), (", a consumer waiting", "delivered")):
        spent = seen.cpu_us(kind)
        name = f"{what}{how}: CPU of the server, next to bare gRPC answering"
        yield figure(name, spent, "µs/message", floor, spent / floor, None, None, "lower")
    yield from figures(f"{what}: started late by the client itself", seen.late, raw, {50: None, 99: None})


def figures(what: str, seconds: list[float], raw_ms: float, bounds: Bounds) -> Iterator[Figure]:
    for percent, bound in bounds.items():
        ms = percentile(seconds, percent) * 1e3
        target, met = (None, None) if bound is None else (str(bound), bound.holds(ms))
        yield figure(f"{what}, p{percent}", ms, "ms", raw_ms, ms / raw_ms, target, met, "lower")


async def answer_times(server: Serving, due: list[float], late: list[float]) -> list[float]:
    """Seconds from when each enqueue was due to its answer; `late` gets what of them was the client's own doing."""
    times: list[float] = []
    async with GrpcBroker(server.target, credential=server.credential()) as hl:
        await hl.create_topic("answers")
        await hl.enqueue("answers", PAYLOAD)

        async def call(number: int, due_at: float) -> None:
            await hl.enqueue("answers", PAYLOAD, priority=number)
            times.append(perf_counter() - due_at)

        late += await open_loop(due, call)
    return times


async def bare_answer_times(server: Serving, due: list[float]) -> list[float]:
    times: list[float] = []
    async with grpc.aio.insecure_channel(server.target) as channel:
        enqueue = channel.unary_unary(METHOD)
        await enqueue(bytes(SIZE))

        async def call(number: int, due_at: float) -> None:
            await enqueue(NUMBER.to_bytes(SIZE, "little") + PAYLOAD)
            times.append(perf_counter() - due_at)

        await open_loop(due, call)
    return times


async def delivery_times(server: Serving, due: list[float]) -> list[float]:
    """Seconds from when each enqueue was due to its arrival at a consumer with an open PopStream. The consumer acks
    what it got since its last ack, one call at a time."""
    due_at: dict[int, float] = {}
    arrived: dict[int, float] = {}
    held: list[LeaseRef] = []
    some_held, everything = asyncio.Event(), asyncio.Event()
    async with GrpcBroker(server.target, credential=server.credential()) as hl, asyncio.TaskGroup() as tasks:
        await hl.create_topic("deliveries")

        async def consume() -> None:
            credits: asyncio.Queue[int] = asyncio.Queue()
            credits.put_nowait(CREDITS)
            async for leased in hl.stream(PopStream(Pop("deliveries"), given(credits))):
                now, messages = perf_counter(), leased.messages
                if messages is None:
                    continue
                for payload in messages.payloads:
                    arrived.setdefault(int.from_bytes(payload[:NUMBER], "little"), now)
                pairs = zip(unpack(messages.ids), unpack(messages.tokens), strict=True)
                held.extend(LeaseRef(leased.topic, id, token) for id, token in pairs)
                some_held.set()
                credits.put_nowait(len(messages))
                if len(arrived) == len(due):
                    everything.set()

        async def ack() -> None:
            while await some_held.wait():
                some_held.clear()
                taken = held[:]
                held.clear()
                await hl.ack(taken)

        async def call(number: int, when: float) -> None:
            due_at[number] = when
            await hl.enqueue("deliveries", number.to_bytes(NUMBER, "little") + PAYLOAD[NUMBER:])

        consumer = [tasks.create_task(consume()), tasks.create_task(ack())]
        await open_loop(due, call)
        await asyncio.wait_for(everything.wait(), DELIVERED_S)
        for task in consumer:
            task.cancel()
        if held:
            await hl.ack(held)
    return [arrived[number] - when for number, when in due_at.items()]


async def given(credits: asyncio.Queue[int]) -> AsyncIterator[int]:
    """The credits of a consumer, as they are put into the queue."""
    while True:
        yield await credits.get()
