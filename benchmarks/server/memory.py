"""Anonymous memory of the whole server process while messages wait: what is its own, without mapped files."""

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
from heapline.client.wire import WireBroker
from heapline.model import Outgoing

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
        settled = run_loop(settled_mb(server))
    bound = None if quick else Bound("<", WAITING_MB, "MB")
    payloads = count * len(PAYLOAD) / MB
    for moment, value in (("peak", peak), ("settled", settled)):
        yield figure(
            f"memory, {count:,} messages waiting, {moment}", value, "MB", payloads, value / payloads,
            bound and str(bound), bound and bound.holds(value), "lower",
        )  # fmt: skip


async def peak_while_filling(server: Serving, count: int) -> float:
    async with WireBroker(server.target, credential=server.credential()) as hl:
        await hl.create_topic("waiting")
        numbers = iter(range(count // BATCH))
        batch = [Outgoing(PAYLOAD, priority) for priority in priorities(BATCH)]

        async def fill() -> None:
            for _ in numbers:
                await hl.enqueue_batch("waiting", batch)

        filling = asyncio.gather(*(fill() for _ in range(IN_FLIGHT)))
        peak = 0
        while not filling.done():
            peak = max(peak, anonymous_bytes(server.pid))
            await asyncio.wait([filling], timeout=LOOK_S)
        await filling
    return peak / MB


async def settled_mb(server: Serving) -> float:
    await asyncio.sleep(SETTLE_S)
    return anonymous_bytes(server.pid) / MB
