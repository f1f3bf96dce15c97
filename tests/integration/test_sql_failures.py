"""Two served nodes under load while PostgreSQL is killed and restarted, and while a node is killed.

Producers and consumers are SDK clients of both nodes, and record their answers. At the end nothing that was
acknowledged is lost, no acked message was redelivered, and no enqueue counted twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import heapline
from heapline import HeaplineError, Outgoing
from tests.integration.sql_processes import admin_key, sql_node
from tests.postgres import UNSYNCED, KillablePostgres

pytest.importorskip("asyncpg")
TOPIC = "jobs"


class Load:
    def __init__(self, hl: heapline.Broker) -> None:
        self._hl = hl
        self._stopping = asyncio.Event()
        self.enqueued: set[str] = set()  # acknowledged
        self.ids: dict[str, set[int]] = {}  # tokens under which each message was delivered
        self.acked: set[str] = set()
        self.again: list[str] = []  # delivered after their ack
        self.errors = 0

    async def produce(self, number: int) -> None:
        for batch in range(1 << 30):
            if self._stopping.is_set():
                return
            tags = [f"{number}.{batch}.{i}" for i in range(5)]
            try:
                await self._hl.enqueue_batch(TOPIC, [Outgoing(tag.encode(), priority=batch % 7) for tag in tags])
                self.enqueued |= set(tags)
            except HeaplineError:
                self.errors += 1

    async def consume(self) -> None:
        while not self._stopping.is_set():
            try:
                await self.take(wait=0.2)
            except HeaplineError:
                self.errors += 1

    async def take(self, wait: float) -> int:
        messages = await self._hl.pop(TOPIC, 20, visibility=3.0, wait=wait)
        for message in messages:
            tag = message.payload.decode()
            self.ids.setdefault(tag, set()).add(message.id)
            if tag in self.acked:
                self.again.append(tag)
        lost: set[int] = set()
        try:
            await self._hl.ack(messages)
        except heapline.LeaseLost as error:
            lost = set(error.lost)
        self.acked |= {m.payload.decode() for m in messages if m.id not in lost}
        return len(messages)

    async def run(self, while_doing: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(self.produce(number))
                tasks.create_task(self.consume())
            await while_doing()
            self._stopping.set()

    async def more(self, count: int) -> None:
        """Wait until this many more messages were acknowledged and acked."""
        goal = len(self.enqueued) + count, len(self.acked) + count
        async with asyncio.timeout(60):
            while len(self.enqueued) < goal[0] or len(self.acked) < goal[1]:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.02)

    async def check(self) -> None:
        async with asyncio.timeout(60):
            while True:
                stats = await self._hl.stats(TOPIC)
                if not (stats.ready or stats.delayed or stats.leased):
                    break
                await self.take(wait=1.0)
        assert self.enqueued <= self.acked
        assert self.again == []
        assert {tag: ids for tag, ids in self.ids.items() if len(ids) > 1} == {}


async def test_restarted_postgres_and_a_killed_node_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    postgres = KillablePostgres(UNSYNCED)
    try:
        postgres.start()
        async with (
            sql_node(tmp_path / "a", "heapline", postgres.url) as a,
            sql_node(tmp_path / "b", "heapline", postgres.url) as b,
            heapline.connect(endpoints=[a.target, b.target], api_key=admin_key(tmp_path / "a"), deadline=30.0) as hl,
        ):
            await hl.create_topic(TOPIC, max_retries_default=250)
            load = Load(hl)

            async def break_things() -> None:
                await load.more(200)
                await asyncio.to_thread(postgres.kill)
                await asyncio.to_thread(postgres.start)
                await load.more(200)
                await a.kill()
                await load.more(200)

            await load.run(break_things)
            await load.check()
            assert await b.terminate() == 0
            assert b"Traceback" not in b.logged()
    finally:
        postgres.close()
