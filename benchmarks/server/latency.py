"""The time until one enqueue is answered, and until it reaches a waiting consumer, at 500 single enqueues per second.

Raw fsyncs are timed before and after each round, on the same disk, while the servers are idle. A bare frame server,
which commits in the same way, and the gRPC port of our own server get the same load in alternating rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from benchmarks.drivers.proc import cpu_seconds
from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.bare_server import connected
from benchmarks.server.fsyncs import fsync_ms
from benchmarks.server.schedule import open_loop, percentile, poisson
from benchmarks.server.spawned import Serving, bare_server, heapline_server
from benchmarks.server.targets import OF_BARE, OF_GRPC, OPEN_LOOP_PER_S, Bound, answer_bounds, delivery_bounds, judged
from heapline.client.transports.native import NativeBroker
from heapline.contract.columns import unpack
from heapline.contract.leases import Pop
from heapline.contract.message import LeaseRef
from heapline.wire.descriptors import METHODS, pb

Bounds = Mapping[int, Bound | None]
CREDITS = 1000
DELIVERED_S = 30.0
NUMBER = 8  # bytes of the payload that number the message
KINDS = ("answered", "bare", "grpc", "delivered")


@dataclass
class Samples:
    """The results of all rounds together; fsyncs in milliseconds, the rest in seconds."""

    fsyncs: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    grpc: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def take(self, kind: str, server: Serving, work: Coroutine[Any, Any, list[float]]) -> None:
        """Run a round, and add its measurements and the server's CPU time."""
        before = cpu_seconds(server.pid)
        getattr(self, kind).extend(run_loop(work))
        self.cpu[kind] += cpu_seconds(server.pid) - before

    def cpu_us(self, kind: str) -> float:
        """Return the server's CPU microseconds per message."""
        spent: float = self.cpu[kind] / len(getattr(self, kind)) * 1e6
        return spent


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 3.0) if quick else (5, 4.0)
    seen = Samples()
    with heapline_server(directory / "ours") as ours, bare_server(directory / "bare") as bare:
        for number in range(rounds):
            yield Step("open loop", 4 * number, 4 * rounds)
            seen.fsyncs += fsync_ms(directory)
            due = poisson(OPEN_LOOP_PER_S, seconds, seed=number)
            seen.take("answered", ours, answer_times(ours, due, seen.late))
            yield Step("open loop, bare frames", 4 * number + 1, 4 * rounds)
            seen.take("bare", bare, bare_answer_times(bare, due))
            yield Step("open loop, gRPC", 4 * number + 2, 4 * rounds)
            seen.take("grpc", ours, grpc_answer_times(ours, due))
            yield Step("open loop, a consumer waiting", 4 * number + 3, 4 * rounds)
            seen.take("delivered", ours, delivery_times(ours, due))
            seen.fsyncs += fsync_ms(directory)
    yield from all_figures(seen)


def all_figures(seen: Samples) -> Iterator[Figure]:
    raw = percentile(seen.fsyncs, 50)
    for percent in (50, 99):
        ms = percentile(seen.fsyncs, percent)
        yield figure(f"raw fdatasync of 4 KiB, p{percent}", ms, "ms", None, None, None, None, "lower")
    what = f"{OPEN_LOOP_PER_S} enqueues/s"
    unbounded: Bounds = {50: None, 99: None}
    bare = f"{what}: answered by bare frames with fsync"
    yield from figures(f"{what}: answered", seen.answered, seen.bare, answer_bounds(percentile(seen.bare, 50) * 1e3))
    yield from figures(bare, seen.bare, None, unbounded)
    yield from figures(f"{what}: answered over gRPC", seen.grpc, seen.bare, unbounded)
    yield from figures(f"{what}, a consumer waiting: delivered", seen.delivered, seen.bare, delivery_bounds(raw))
    yield from figures(f"{what}: started late by the client itself", seen.late, None, unbounded)
    for how, kind, other, baseline, limit in (
        ("", "answered", "bare frames", "bare", OF_BARE),
        ("", "answered", "gRPC", "grpc", OF_GRPC),
        (", a consumer waiting", "delivered", "bare frames answering", "bare", None),
    ):
        spent, floor = seen.cpu_us(kind), seen.cpu_us(baseline)
        bound = None if limit is None else Bound("≤", limit, "×")
        name = f"{what}{how}: CPU of the server, next to {other}"
        yield figure(name, spent, "µs/message", floor, spent / floor, *judged(bound, spent / floor), "lower")


def figures(what: str, seconds: list[float], floor: list[float] | None, bounds: Bounds) -> Iterator[Figure]:
    """Return percentiles, next to those of the bare server."""
    for percent, bound in bounds.items():
        ms = percentile(seconds, percent) * 1e3
        least = None if floor is None else percentile(floor, percent) * 1e3
        ratio = None if least is None else ms / least
        yield figure(f"{what}, p{percent}", ms, "ms", least, ratio, *judged(bound, ms), "lower")


async def answer_times(server: Serving, due: list[float], late: list[float]) -> list[float]:
    """Return the seconds from when each enqueue was due to its answer; the client's own delays are added to `late`."""
    times: list[float] = []
    async with NativeBroker(server.target, credential=server.credential()) as hl:
        await hl.create_topic("answers")
        await hl.enqueue("answers", PAYLOAD)

        async def call(number: int, due_at: float) -> None:
            await hl.enqueue("answers", PAYLOAD, priority=number)
            times.append(perf_counter() - due_at)

        late += await open_loop(due, call)
    return times


async def bare_answer_times(server: Serving, due: list[float]) -> list[float]:
    times: list[float] = []
    client = await connected(server.port)

    async def call(number: int, due_at: float) -> None:
        await client.call(PAYLOAD, NUMBER)
        times.append(perf_counter() - due_at)

    await open_loop(due, call)
    return times


async def grpc_answer_times(server: Serving, due: list[float]) -> list[float]:
    """Measure like `answer_times`, by unary calls."""
    times: list[float] = []
    metadata = (("authorization", f"Bearer {server.credential()}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        enqueue = channel.unary_unary(METHODS["Enqueue"].path)
        request = pb.EnqueueRequest(topic="answers", payload=PAYLOAD).SerializeToString()
        await enqueue(request, metadata=metadata)

        async def call(number: int, due_at: float) -> None:
            await enqueue(request, metadata=metadata)
            times.append(perf_counter() - due_at)

        await open_loop(due, call)
    return times


async def delivery_times(server: Serving, due: list[float]) -> list[float]:
    """Return the seconds from when each enqueue was due to its arrival at a consumer whose pop waits. The consumer acks
    the messages since its last ack, one call at a time."""
    due_at: dict[int, float] = {}
    arrived: dict[int, float] = {}
    held: list[LeaseRef] = []
    some_held, everything = asyncio.Event(), asyncio.Event()
    async with NativeBroker(server.target, credential=server.credential()) as hl, asyncio.TaskGroup() as tasks:
        await hl.create_topic("deliveries")

        async def consume() -> None:
            while True:
                leased = await hl.do(Pop("deliveries", CREDITS, wait=60.0))
                now, messages = perf_counter(), leased.messages
                if messages is None:
                    continue
                for payload in messages.payloads:
                    arrived.setdefault(int.from_bytes(payload[:NUMBER], "little"), now)
                pairs = zip(unpack(messages.ids), unpack(messages.tokens), strict=True)
                held.extend(LeaseRef(leased.topic, id, token) for id, token in pairs)
                some_held.set()
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
