"""A hundred messages per second through `heapline worker`: the share of a core that the server and the worker use.

The load is open: messages are enqueued when they are due, by this process, whose CPU does not count. The baseline is
the same pair of processes without messages.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from time import perf_counter

import heapline
from benchmarks.drivers.proc import cpu_seconds
from benchmarks.drivers.window import run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sdk.targets import TRICKLE_PER_S, TRICKLE_SERVER_PERCENT, TRICKLE_WORKER_PERCENT
from benchmarks.server.schedule import open_loop, poisson
from benchmarks.server.spawned import Serving, child, heapline_server, wait_for
from benchmarks.server.targets import Bound

APP = """
import heapline
app = heapline.App()
@app.task(name="handle")
async def handle(number: int) -> None:
    if number < 0:
        print("ready", flush=True)
"""


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    seconds = 5.0 if quick else 20.0
    (directory / "trickle_app.py").write_text(APP)
    said = directory / "worker.log"
    with heapline_server(directory / "ours") as server, said.open("w") as log:
        yield Step(f"{TRICKLE_PER_S} messages/s through a worker", 0, 1)
        command = [sys.executable, "-m", "heapline", "worker", "trickle_app:app"]
        with child(command, log, cwd=directory, env=worker_environment(server)) as worker:
            run_loop(enqueue_all(server, [0.0], first=-1))
            wait_for(worker, said, lambda: re.search("ready\n", said.read_text()))
            pids = (server.pid, worker.pid)
            idle = run_loop(shares(pids, asyncio.sleep(seconds / 2)))
            due = poisson(TRICKLE_PER_S, seconds)
            busy = run_loop(shares(pids, enqueue_all(server, due)))
    yield from figures(busy, idle)


def worker_environment(server: Serving) -> dict[str, str]:
    key_file = str(server.key_file.resolve())
    return {**os.environ, "HEAPLINE_URL": f"heapline://{server.target}", "HEAPLINE_API_KEY_FILE": key_file}


async def enqueue_all(server: Serving, due: list[float], first: int = 0) -> None:
    """Enqueue one message at each time, and return when all have been handled."""
    app = heapline.App(server.target, api_key=server.credential())

    @app.task(name="handle")
    async def handle(number: int) -> None: ...

    async def call(number: int, due_at: float) -> None:
        await handle.enqueue(first + number)

    async with app, heapline.connect(server.target, api_key=server.credential()) as hl:
        await open_loop(due, call)
        while (stats := await hl.stats("tasks")).ready + stats.leased:  # noqa: ASYNC110 - another process handles them
            await asyncio.sleep(0.01)


async def shares(pids: tuple[int, int], work: Awaitable[None]) -> list[float]:
    """Percent of one core that each process used while the work was done."""
    began, before = perf_counter(), [cpu_seconds(pid) for pid in pids]
    await work
    seconds = perf_counter() - began
    return [(cpu_seconds(pid) - was) / seconds * 100 for pid, was in zip(pids, before, strict=True)]


def figures(busy: list[float], idle: list[float]) -> Iterator[Figure]:
    for side, percent, base, limit in zip(
        ("server", "worker"), busy, idle, (TRICKLE_SERVER_PERCENT, TRICKLE_WORKER_PERCENT), strict=True
    ):
        bound = Bound("≤", limit, "%")
        name = f"{TRICKLE_PER_S} messages/s through a task worker: CPU of the {side}"
        yield figure(name, percent, "% of a core", base, None, f"{bound} of a core", bound.holds(percent), "lower")
