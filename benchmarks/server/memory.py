"""Anonymous memory of the server process while messages wait: its own memory, without mapped files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from benchmarks.drivers.proc import anonymous_bytes
from benchmarks.drivers.window import PAYLOAD, priorities, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import WAITING_MB, WAITING_MESSAGES, Bound
from heapline.client.transports.native import NativeBroker
from heapline.contract.message import Outgoing

BATCH, IN_FLIGHT = 1000, 4
LOOK_S = 0.02
SETTLE_S = 5.0
STEPS = 20
MB = 1e6


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    """The ratio is to the payloads alone. A quick run has a tenth of the messages, and no target."""
    count = WAITING_MESSAGES // 10 if quick else WAITING_MESSAGES
    with heapline_server(directory / "ours") as server:
        peak = 0.0
        for step in range(STEPS):
            yield Step(f"{count:,} messages waiting", step, STEPS)
            peak = max(peak, run_loop(peak_while_filling(server, count // STEPS)))
        settled = run_loop(settled_mb(server, count))
    bound = Bound("<", WAITING_MB, "MB")
    payloads = count * len(PAYLOAD) / MB
    for moment, value in (("peak", peak), ("settled", settled)):
        name = f"memory, {count:,} messages waiting, {moment}"
        target, met = (None, None) if quick else (str(bound), bound.holds(value))
        yield figure(name, value, "MB", payloads, value / payloads, target, met, "lower")


async def peak_while_filling(server: Serving, count: int) -> float:
    async with NativeBroker(server.target, credential=server.credential()) as hl:
        await hl.create_topic("waiting")
        numbers = iter(range(count // BATCH))
        batches = [[Outgoing(PAYLOAD, priority) for priority in priorities(BATCH, seed)] for seed in range(8)]

        async def fill() -> None:
            for number in numbers:
                await hl.enqueue_batch("waiting", batches[number % len(batches)])

        filling = asyncio.gather(*(fill() for _ in range(IN_FLIGHT)))
        peak = 0
        while not filling.done():
            peak = max(peak, anonymous_bytes(server.pid))
            await asyncio.wait([filling], timeout=LOOK_S)
        await filling
    return peak / MB


async def settled_mb(server: Serving, count: int) -> float:
    async with NativeBroker(server.target, credential=server.credential()) as hl:
        if (waiting := (await hl.stats("waiting")).ready) != count:
            raise RuntimeError(f"{waiting} messages wait instead of {count}")
    await asyncio.sleep(SETTLE_S)
    return anonymous_bytes(server.pid) / MB
