"""In a real Spark, on a node of the Postgres broker: its backlog and dead letters, its events, and writes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncpg")

import heapline
from heapline.contract.message import Outgoing
from tests.integration.server_process import Process
from tests.integration.sql_processes import connect, sql_node
from tests.postgres import fresh_schema
from tests.spark.conftest import MARKS

pytestmark = MARKS
FAR = 3600.0


class Served:
    """A node, a client of it, and how to read its topic."""

    def __init__(self, node: Process, data: Path, hl: heapline.Broker, spark: Any) -> None:
        self.node, self.hl, self._spark = node, hl, spark
        self.where = {"heapline.url": node.target, "heapline.api_key_file": str(data / "admin.key")}

    def load(self, **options: str) -> Any:
        return self._spark.read.format("heapline").options(**self.where, subscribe="jobs", **options).load()


@pytest.fixture
async def served(spark: Any, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(spark, tmp_path) as found:
        yield found


@asynccontextmanager
async def serving(spark: Any, tmp_path: Path) -> AsyncIterator[Served]:
    data = tmp_path / "node"
    async with sql_node(data, fresh_schema()) as node, connect(node, data) as hl:
        yield Served(node, data, hl, spark)


def rows(df: Any, *expressions: str) -> list[Any]:
    return sorted(tuple(row) for row in df.selectExpr(*expressions).collect())


async def test_backlog_and_dead_letters_are_those_of_the_topic(served: Served) -> None:
    hl = served.hl
    for topic in ("other", "jobs"):
        await hl.create_topic(topic)
        await hl.enqueue_batch(topic, [Outgoing(b"%d" % i, i, key=f"k{i}", headers={"n": str(i)}) for i in range(500)])
    await hl.enqueue("jobs", b"later", priority=-3, delay=FAR)
    for message in await hl.pop("jobs", 20, visibility=FAR):
        await message.bury("broken")
    await hl.pop("jobs", 5, holder="w", visibility=FAR)

    def read() -> None:
        backlog = served.load(view="backlog", minPartitions="3", includeHeaders="true")
        assert backlog.rdd.getNumPartitions() == 3
        counted = backlog.groupBy("state").agg({"priority": "sum", "*": "count"})
        by_state = rows(counted, "state", "`count(1)`", "`sum(priority)`")
        assert by_state == [("delayed", 1, -3), ("leased", 5, sum(range(20, 25))), ("ready", 475, sum(range(25, 500)))]
        [row] = backlog.where("priority = 77").collect()
        assert (bytes(row.value), bytes(row.key), row.topic) == (b"77", b"k77", "jobs")
        assert (row.attempts, row.as_of_offset) == (0, -1)
        assert [(pair.key, bytes(pair.value)) for pair in row.headers] == [("n", b"77")]
        [leased] = backlog.where("priority = 20").collect()
        assert (leased.holder, leased.attempts) == ("w", 1)
        assert leased.deadline > leased.as_of > leased.enqueued_at
        [delayed] = backlog.where("state = 'delayed'").collect()
        assert delayed.due_at > delayed.as_of
        dead = served.load(view="dlq", columns="priority,reason,attempts,id")
        assert rows(dead, "priority", "reason", "attempts") == [(i, "broken", 1) for i in range(20)]

    await asyncio.to_thread(read)
