"""In a real Spark: `backlog` and `dlq` are fixed when planned, consuming leases once, progress is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.spark import ConsumeResult, consume
from heapline.spark.source import HeaplineSource
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS

pytestmark = MARKS
Load = Callable[..., Any]


class Served:
    """A server with a topic of 900 messages, and the options to read it."""

    def __init__(self, server: Process, data: Path, far: Any, spark: Any) -> None:
        self.server, self.far, self._spark = server, far, spark
        self.where = {"heapline.url": server.target, "heapline.api_key_file": str(data / "admin.key")}

    def load(self, stream: bool = False, **options: str) -> Any:
        reader = self._spark.readStream if stream else self._spark.read
        return reader.format("heapline").options(**self.where, subscribe="jobs", **options).load()


@pytest.fixture
async def served(spark: Any, tmp_path: Path) -> AsyncIterator[Served]:
    data = tmp_path / "data"
    async with Process(data) as server:
        far = heapline.connect(server.target, api_key=(data / "admin.key").read_text().strip())
        await far.create_topic("jobs", partitions=2)
        out = [Outgoing(b"%d" % i, i, key=f"k{i}", headers={"n": str(i)}) for i in range(900)]
        await far.enqueue_batch("jobs", out)
        yield Served(server, data, far, spark)
        await far.close()


async def test_backlog_and_dlq_are_fixed_when_planned(served: Served, load: Load) -> None:
    for message in await served.far.pop("jobs", 20, holder="w", visibility=3600.0):
        await message.bury("kaputt")
    await served.far.pop("jobs", 5, holder="w", visibility=3600.0)
    near, far = load(view="backlog", minPartitions="3"), served.load(view="backlog")
    dead = served.load(view="dlq")

    def picture() -> list[Any]:
        sums = "state", "int(string(value)) AS number"
        by_state = []
        for df in (near, far):
            found = df.selectExpr(*sums).groupBy("state").agg({"number": "sum", "*": "count"}).collect()
            by_state.append({row["state"]: (row["count(1)"], row["sum(number)"]) for row in found})
        return [*by_state, sorted(map(tuple, dead.select("priority", "reason", "attempts").collect()))]

    before = await asyncio.to_thread(picture)
    waiting = {"ready": (875, sum(range(25, 900))), "leased": (5, sum(range(20, 25)))}
    assert before == [waiting, waiting, [(i, "kaputt", 1) for i in range(20)]]
    await served.far.ack(await served.far.pop("jobs", 500))
    await served.far.dlq_replay("jobs", where=heapline.DlqFilter())
    for _ in range(2):
        await served.far.enqueue("jobs", b"0")
        await served.far.snapshot("jobs")
    assert await asyncio.to_thread(picture) == before
    assert await asyncio.to_thread(served.load(view="backlog").count) == 402
    with pytest.raises(BadRequest, match="shows one point in time and is batch only"):  # like a failing query
        HeaplineSource({**served.where, "subscribe": "jobs", "view": "dlq"}).streamReader(None)


async def test_consumed_rows_are_the_same_in_every_action(spark: Any, served: Served) -> None:
    seen: list[Any] = []

    def work(df: Any) -> Any:
        seen.append([df.count(), df.count(), df.selectExpr("sum(priority)").first()[0]])
        return df.where("priority >= 95").selectExpr("message_id", "'too slow' AS reason")

    result = await asyncio.to_thread(consume, spark, "jobs", work, 100, where=served.where, partitions=3)
    assert seen == [[100, 100, sum(range(100))]]
    assert result == ConsumeResult(100, 95, 5, ())

    def fail(df: Any) -> None:
        df.selectExpr("raise_error('kaputt')").collect()

    with pytest.raises(Exception, match="kaputt"):
        await asyncio.to_thread(consume, spark, "jobs", fail, 50, where=served.where)
    stats = await served.far.stats("jobs")
    assert (stats.ready + stats.delayed, stats.leased) == (805, 0)


async def test_observer_group_shows_progress_one_batch_late(served: Served, tmp_path: Path) -> None:
    def run() -> None:
        df = served.load(stream=True, startingOffsets="earliest", maxOffsetsPerTrigger="300", group="shown")
        writing = df.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writing.trigger(availableNow=True).start()
        query.awaitTermination(120)
        assert query.exception() is None

    await asyncio.to_thread(run)
    info = await served.far.get_group("jobs", "shown")
    # Of 902 rows, two of which opened a producer, the last batch had two.
    assert (info.config.observer, info.lag) == (True, 2)
    await asyncio.to_thread(run)
    assert (await served.far.get_group("jobs", "shown")).lag == 0
