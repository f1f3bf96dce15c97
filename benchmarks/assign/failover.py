"""Measure how fast a worker pool reassigns a crashed worker's partitions, and the memory per worker.

Times count from the end of the crashed worker's lease (its last renewal plus a full ttl), because nothing may happen
before. The baseline is a pool that gets no events and polls every second. The NATS rows need the server of the
installed wheel and are omitted without it. Memory is that of all managers of a process divided by their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

from benchmarks.assign.strategies import Figure, partitions, row
from heapline.assign import (
    KV,
    AssignmentConfig,
    Config,
    Entry,
    Hooks,
    Manager,
    MemoryKV,
    NatsKV,
    Partition,
    StaticSource,
)
from heapline.assign.manager import boot_time

TTL = 2.0
PLENTY = 5_000


def run(quick: bool) -> Iterator[Figure]:
    repeats = 2 if quick else 5
    deaf = max(asyncio.run(failover(DeafKV(), 4, PLENTY, 1, interval=1.0)))
    for workers, count in ((4, PLENTY), (16, PLENTY)):
        found = max(asyncio.run(failover(MemoryKV(boot_time), workers, count, repeats)))
        name = f"lease over to re-assigned, {workers} × {count} in memory"
        yield row(name, found, "s", deaf, deaf / found, "≤ 1 s", found <= 1)
    found = max(asyncio.run(failover(MemoryKV(boot_time), 4, PLENTY, repeats, leads=True)))
    name = f"the same if it led, 4 × {PLENTY} in memory"
    yield row(name, found, "s", deaf, deaf / found, "≤ 1 s", found <= 1)
    if (program := Path(sys.executable).parent / "nats-server").exists():
        found = max(asyncio.run(over_nats(str(program), repeats)))
        yield row("lease over to re-assigned, 8 × 1000 on NATS", found, "s", deaf, deaf / found, "≤ 1 s", found <= 1)
    yield memory(16 if quick else 64)


class DeafKV(MemoryKV):
    """A store without events: workers must poll."""

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        await asyncio.Event().wait()
        yield None


class Worker:
    """A manager that records, in a table shared by the pool, when it was assigned which partitions."""

    def __init__(self, kv: KV, config: Config, source: StaticSource, book: dict[Partition, float]) -> None:
        self._book = book
        self.manager = Manager(config, kv, source, hooks=Hooks(on_assignment_changed=self._changed))

    async def _changed(self, added: list[Partition], removed: list[Partition]) -> None:
        self._book.update(dict.fromkeys(added, boot_time()))

    def crash(self) -> float:
        """Stop without releasing anything. Return when its lease is over for all workers."""
        member = self.manager._member
        assert member is not None
        for task in self.manager._tasks:
            task.cancel()
        return member.lease._sent_at + TTL


def settings(interval: float) -> Config:
    return Config(
        heartbeat_interval=interval, heartbeat_ttl=TTL, worker_id_ttl=60, cold_start_window=1, planned_scale_window=0.2,
        startup_timeout=60, assignment=AssignmentConfig(rebalance_cooldown=0),
    )  # fmt: skip


async def failover(
    kv: KV, workers: int, count: int, repeats: int, interval: float = 0.5, leads: bool = False
) -> list[float]:
    """Return, for each crash, the seconds from the end of the lease until all its partitions were reassigned."""
    source = StaticSource(partitions(count, "weighted"))
    book: dict[Partition, float] = {}
    pool = [Worker(kv, settings(interval), source, book) for _ in range(workers + repeats)]
    await asyncio.gather(*(worker.manager.start() for worker in pool))
    found = []
    for _ in range(repeats):
        victim = next(worker for worker in pool if worker.manager.is_leader is leads)
        lost = victim.manager.assignment.partitions
        crashed_at, over_at = boot_time(), victim.crash()
        pool.remove(victim)
        async with asyncio.timeout(60):
            while min(book[p] for p in lost) < crashed_at:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found.append(max(book[p] for p in lost) - over_at)
    await asyncio.gather(*(worker.manager.stop() for worker in pool))
    return found


async def over_nats(program: str, repeats: int) -> list[float]:
    async with server(program) as url, await NatsKV.connect(url, bucket="benchmark") as kv:
        return await failover(kv, 8, 1_000, repeats)


@contextlib.asynccontextmanager
async def server(program: str) -> AsyncIterator[str]:
    directory = tempfile.mkdtemp(prefix="heapline-bench-")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", directory]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def memory(workers: int) -> Figure:
    """Measure the memory of one worker including the source's partitions; the baseline is their plain list."""
    tracemalloc.start()
    source = StaticSource(partitions(PLENTY, "weighted"))
    plain = tracemalloc.get_traced_memory()[0] / 1e6
    held = asyncio.run(_gather(source, workers))
    tracemalloc.stop()
    each = plain + held / workers
    return row(f"memory of a worker, {workers} × {PLENTY}", each, "MB", plain, plain / each, "≤ 10 MB", each <= 10)


async def _gather(source: StaticSource, workers: int) -> float:
    before = tracemalloc.get_traced_memory()[0]
    kv = MemoryKV(boot_time)
    pool = [Worker(kv, settings(0.5), source, {}) for _ in range(workers)]
    await asyncio.gather(*(worker.manager.start() for worker in pool))
    await asyncio.sleep(1)
    held = (tracemalloc.get_traced_memory()[0] - before) / 1e6
    await asyncio.gather(*(worker.manager.stop() for worker in pool))
    return held
