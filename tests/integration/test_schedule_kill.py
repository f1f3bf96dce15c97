"""A broker with schedules is killed with SIGKILL repeatedly: each firing is in its topic exactly once.

Time runs fifty times as fast in these processes, so that many firings are in each of their short lives.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

from heapline.clock import SystemClock
from heapline.contract.schedules import ScheduleInfo
from heapline.engine import EmbeddedBroker

SPEED = 50
TOPIC = {"segment_bytes": 1 << 20, "partitions": 2, "dedup_window": 1.0}
NAMES = [f"tick{n}" for n in range(3)]


class FastClock(SystemClock):
    def __init__(self, began_ms: int) -> None:
        self._began_ms = began_ms

    def wall_ms(self) -> int:
        return self._began_ms + (super().wall_ms() - self._began_ms) * SPEED


async def serve(path: Path, clock: FastClock, serving: int) -> None:
    async with EmbeddedBroker(str(path), clock=clock) as hl:
        for name in NAMES:
            await hl.create_schedule(name, every=1, topic="jobs", misfire="all", makeup_max=1000)
        os.write(serving, b"!")
        while True:
            await hl.fire_schedules()
            await asyncio.sleep(0.001)


def live(path: Path, clock: FastClock, seconds: float) -> None:
    """Run a broker in a separate process for a random time."""
    look, serving = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            asyncio.run(serve(path, clock, serving))
        finally:
            os._exit(1)
    os.close(serving)
    assert os.read(look, 1) == b"!"
    os.close(look)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


async def make(path: Path, clock: FastClock) -> None:
    async with EmbeddedBroker(str(path), clock=clock) as hl:
        await hl.create_topic("jobs", **TOPIC)


async def look(path: Path, clock: FastClock) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the times that were fired, and those that should be, by schedule."""
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    async with EmbeddedBroker(str(path), clock=clock) as hl:
        await hl.fire_schedules()
        for name in NAMES:
            await hl.pause_schedule(name)
        owed = {info.name: moments(info) for info in await hl.list_schedules()}
        while messages := await hl.pop("jobs", 1000):
            for m in messages:
                found[m.headers["heapline-schedule"].removeprefix("default/")].append(
                    m.headers["heapline-scheduled-at"]
                )
            await hl.ack(messages)
    return found, owed


def moments(info: ScheduleInfo) -> list[str]:
    assert info.created_at is not None
    assert info.fired_at is not None
    every = timedelta(seconds=1)
    count = (info.fired_at - info.created_at) // every
    return [(info.created_at + n * every).isoformat(timespec="milliseconds") for n in range(1, count + 1)]


def test_each_firing_is_stored_once_across_repeated_kills(tmp_path: Path) -> None:
    clock, rng = FastClock(time.time_ns() // 1_000_000), random.Random(7)
    asyncio.run(make(tmp_path, clock))
    for _ in range(7):
        live(tmp_path, clock, rng.uniform(0.01, 0.2))
    found, owed = asyncio.run(look(tmp_path, clock))
    for name in NAMES:
        assert sorted(found[name]) == owed[name]
        assert len(found[name]) > 7
