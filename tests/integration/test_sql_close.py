"""A node ends when it is closed, in whatever its tasks are, and however the servers behave meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline import Outgoing
from tests.postgres import UNSYNCED, KillablePostgres, fresh_schema, shared_url
from tests.valkey import Valkey

pytest.importorskip("asyncpg")
from heapline.owned_tasks import OwnedTasks

DEADLINE = 60.0  # seconds after which a node that is closing hangs: no wait in it takes more than ten
FAULTS = ("none", "redis killed", "redis stalled", "two nodes", "all stalled", "postgres stalled")
QUICK = FAULTS[:-1]  # closing takes 12 seconds while PostgreSQL is stalled


class Servers:
    def __init__(self) -> None:
        self.postgres, self.valkey = KillablePostgres(UNSYNCED), Valkey().start()
        self.postgres.start()

    def break_(self, fault: str) -> None:
        if fault == "redis killed":
            self.valkey.kill()
        if fault in ("redis stalled", "all stalled"):
            self.valkey.signal(signal.SIGSTOP)
        if fault in ("postgres stalled", "all stalled"):
            self.postgres.stall()

    def mend(self, fault: str) -> None:
        if fault == "redis killed":
            self.valkey.start()
        if fault in ("redis stalled", "all stalled"):
            self.valkey.signal(signal.SIGCONT)
        if fault in ("postgres stalled", "all stalled"):
            self.postgres.resume()

    def close(self) -> None:
        self.valkey.close()
        self.postgres.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    found = Servers()
    yield found
    found.close()


class Load:
    """Clients that keep the prefetcher, the flusher and pops busy until their node is closed."""

    def __init__(self, node: Any, topics: list[str]) -> None:
        self._node, self._topics, self._tasks = node, topics, OwnedTasks()

    def start(self) -> None:
        for topic in self._topics:
            for work in (self._enqueue, self._take, self._wait):
                self._tasks.spawn(self._repeat(work, topic))

    async def stop(self) -> None:
        await self._tasks.cancel()

    async def _repeat(self, work: Any, topic: str) -> None:
        with contextlib.suppress(heapline.Closed):
            while True:
                with contextlib.suppress(heapline.UnavailableError):
                    await work(topic)
                await asyncio.sleep(0)

    async def _enqueue(self, topic: str) -> None:
        await self._node.enqueue_batch(topic, [Outgoing(b"x", priority=n) for n in range(20)])

    async def _take(self, topic: str) -> None:
        await self._node.ack(await self._node.pop(topic, 7))

    async def _wait(self, topic: str) -> None:
        await self._node.pop("idle", wait=1.0)


async def close(nodes: list[Any]) -> None:
    """Close nodes. Fail with the stacks of all tasks if that does not end."""
    closing = [asyncio.ensure_future(node.close()) for node in nodes]
    _, left = await asyncio.wait(closing, timeout=DEADLINE)
    if left:
        for task in asyncio.all_tasks():
            task.print_stack()
    assert not left, "the node does not end; its tasks are above"
    for task in closing:
        task.result()


async def live(servers: Servers, schema: str, durability: str, fault: str, steps: int, wal: str) -> None:
    """Open a node, break a server after some steps of its event loop, and close it."""
    config: dict[str, Any] = {"redis": servers.valkey.url(), "durability": durability, "poll_interval": 0.02}
    if durability == "wal":
        config["wal"] = wal
    count = 2 if fault == "two nodes" and durability == "redis" else 1
    opening = (
        heapline.sql.open([servers.postgres.url], schema=schema, drain_seconds=0.2, **config) for _ in range(count)
    )
    nodes = [await node.__aenter__() for node in opening]
    loads = [Load(node, ["one", "two"]) for node in nodes]
    others = asyncio.all_tasks()
    for topic in ("one", "two", "idle"):
        await nodes[0].create_topic(topic, k=50)
    for load in loads:
        load.start()
    for _ in range(steps):
        await asyncio.sleep(0)
    servers.break_(fault)
    try:
        await close(nodes)
    finally:
        for load in loads:
            await load.stop()
        servers.mend(fault)
    left = {task for task in asyncio.all_tasks() - others if not task.done()}
    assert not left, left


async def run(servers: Servers, plan: Iterable[tuple[str, str]], seed: int, wal: str) -> None:
    rng, schema = random.Random(seed), fresh_schema()
    for durability, fault in plan:
        await live(servers, schema, durability, fault, rng.randrange(2000), wal)


async def test_node_ends_whatever_its_servers_do(servers: Servers, tmp_path: Any) -> None:
    await run(servers, (("redis", fault) for fault in QUICK), 1, str(tmp_path / "wal"))


async def test_cancellation_ends_transactions_on_a_connection_that_breaks_just_then() -> None:
    """Without this, what a node does in the background would run on if the database fails as the node closes."""
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as broker:
        shard = broker.node.shards[0]

        async def work(connection: Any) -> None:
            await connection.fetchval("SELECT 1")

        async def forever() -> None:
            while True:
                with contextlib.suppress(heapline.UnavailableError):
                    await shard.run(work)
                await asyncio.sleep(0)

        for steps in range(50):
            shard.circuit.is_up = True
            await shard.run(work)
            next_pool = await shard._create_pool()
            task = asyncio.ensure_future(forever())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            shard._pool.terminate()
            shard._pool = next_pool
            _, running = await asyncio.wait([task], timeout=5.0)
            task.cancel()
            assert not running, f"cancelled after {steps} steps of the event loop, it did not end"


@pytest.mark.soak
async def test_nodes_end_hundreds_of_times(servers: Servers, tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    await run(servers, itertools.product(("redis", "wal", "postgres"), FAULTS * 15), seed, str(tmp_path / "wal"))
