"""Code that all drivers share: the same load, counted in one window of time, with the CPU time of both sides in it.

A driver connects and provides one `turn` (enqueue a batch, pop as many, ack them); `in_flight` tasks repeat it until
time is over. The window ends when the last turn has: the tasks of a slow queue run in step, and a window that cuts
their turns would count more of one half than of the other. This module knows no queue.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from benchmarks.drivers.proc import cpu_seconds

PAYLOAD = bytes(range(256))
PRIORITIES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """A driver's job."""

    port: int
    batch: int
    in_flight: int
    seconds: float
    server_pid: int
    messages_max: int | None = None  # no new turn after this many, if that is reached first
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    messages: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def client_us(self) -> float:
        """Return CPU microseconds per message."""
        return self.client_cpu_s / max(self.messages, 1) * 1e6

    @property
    def server_us(self) -> float:
        return self.server_cpu_s / max(self.messages, 1) * 1e6


class Window:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._finished = 0

    async def measure(self, turn: Callable[[], Awaitable[int]]) -> Outcome:
        """Return the messages that `in_flight` tasks complete by repeating `turn`, which returns its count."""
        began, client, server = perf_counter(), own_cpu_seconds(), cpu_seconds(self._job.server_pid)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._job.in_flight):
                tasks.create_task(self._repeat(turn, began + self._job.seconds))
        return Outcome(
            messages=self._finished, seconds=perf_counter() - began, client_cpu_s=own_cpu_seconds() - client,
            server_cpu_s=cpu_seconds(self._job.server_pid) - server,
        )  # fmt: skip

    async def _repeat(self, turn: Callable[[], Awaitable[int]], until: float) -> None:
        enough = self._job.messages_max or sys.maxsize
        while perf_counter() < until and self._finished < enough:
            seen_through = await turn()  # separate from the sum, which other tasks change meanwhile
            self._finished += seen_through


def own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def drive(work: Callable[[Job, Window], Awaitable[Outcome]]) -> None:
    """Run a driver: its complete `main`."""
    job = Job(**json.load(sys.stdin))

    async def run() -> Outcome:
        return await work(job, Window(job))

    print(json.dumps(asdict(run_loop(run()))), flush=True)


def run_loop(work: Any) -> Any:
    """Run on uvloop if it is installed, as `heapline serve` does: all drivers alike."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def priorities(count: int, seed: int = 7) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(PRIORITIES) for _ in range(count)]
