"""The cost of a thousand consumers that wait for work.

Each has one credit. At the end a message is enqueued for each, and each must get one, which proves that they waited.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.drivers.proc import cpu_seconds
from benchmarks.drivers.window import PAYLOAD, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import IDLE_CORE_PERCENT, IDLE_STREAMS, Bound
from heapline.cli.auth import open_auth
from heapline.client.transports.native import NativeBroker
from heapline.contract.message import Outgoing

#: A server may limit the streams of one key; a thousand consumers are several services with a key each.
STREAMS_PER_KEY = 100
SETTLE_S = 3.0
ALL_SERVED_S = 60.0


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    seconds = 10.0 if quick else 30.0  # complete cycles of what a stream does every ten seconds
    with heapline_server(directory / "ours") as server:
        yield Step(f"{IDLE_STREAMS} idle pops", 0, 1)
        empty, busy = run_loop(core_percents(server, seconds))
    bound = Bound("<", IDLE_CORE_PERCENT, "%")
    what = f"idle, {IDLE_STREAMS} waiting pops: CPU of the server"
    yield figure(what, busy, "% of a core", empty, None, f"{bound} of a core", bound.holds(busy), "lower")


async def core_percents(server: Serving, seconds: float) -> tuple[float, float]:
    """Return the percent of one core that the server uses without any stream, and with all of them."""
    auth = open_auth(server.directory)
    keys = [
        auth.keys.create(f"consumer {n}", ["*:consume"])[1].reveal() for n in range(IDLE_STREAMS // STREAMS_PER_KEY)
    ]
    async with contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(NativeBroker(server.target, credential=server.credential()))
        await admin.create_topic("quiet")
        await asyncio.sleep(SETTLE_S)
        empty = await core_percent(server.pid, seconds / 2)
        async with asyncio.TaskGroup() as streams:
            waiting = []
            for key in keys:
                consumer = await stack.enter_async_context(NativeBroker(server.target, credential=key))
                waiting += [streams.create_task(wait_for_one(consumer)) for _ in range(STREAMS_PER_KEY)]
            await asyncio.sleep(SETTLE_S)
            busy = await core_percent(server.pid, seconds)
            if any(stream.done() for stream in waiting):
                raise RuntimeError("an idle pop did not wait")
            await admin.enqueue_batch("quiet", [Outgoing(PAYLOAD)] * len(waiting))
            async with asyncio.timeout(ALL_SERVED_S):
                await asyncio.wait(waiting)
    return empty, busy


async def wait_for_one(hl: NativeBroker) -> None:
    if not await hl.pop("quiet", wait=3600.0):
        raise RuntimeError("an idle pop ended")


async def core_percent(pid: int, seconds: float) -> float:
    began, before = perf_counter(), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - before) / (perf_counter() - began) * 100
