"""In a real Spark, on a node of the Postgres broker: its backlog and dead letters, its events, and writes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncpg")

import heapline
from benchmarks.server.spawned import free_port
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.spark.audit.job import audit
from heapline.spark.jobs.archive import archive
from heapline.spark.jobs.forecast import forecast
from heapline.spark.jobs.lifecycle_updates import keep_lifecycles, read_lifecycles
from heapline.spark.jobs.lifecycles import topic_lifecycles
from heapline.spark.jobs.load import load
from heapline.spark.jobs.rebuild import rebuild
from heapline.spark.jobs.report import Counted, report
from tests.integration.server_process import Process
from tests.integration.sql_processes import connect, sql_node
from tests.postgres import fresh_schema
from tests.spark.conftest import MARKS
from tests.spark.test_load import SELECT, killed_midway, make_source

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


async def test_archive_and_report_equal_what_the_clients_did(served: Served, spark: Any, tmp_path: Path) -> None:
    hl, where, lake = served.hl, served.where, str(tmp_path / "lake")
    await hl.create_topic("jobs", retention=FAR, backoff=heapline.Backoff(base=0.0), max_retries_default=1)
    await hl.create_topic("silent")
    await hl.enqueue_batch("jobs", [Outgoing(b"x" * 10, n) for n in range(100)])
    first = await hl.pop("jobs", 40, holder="w", visibility=FAR)  # priorities 0 to 39
    await hl.ack(first[:30])
    for message in first[30:35]:
        await message.nack(reason="again")
    for message in first[35:]:
        await message.bury("broken")
    archived = await asyncio.to_thread(archive, spark, where, "jobs", lake)
    assert (archived.rows, archived.group) == (100 + 40 + 40, None)
    assert [table.view for table in archived.tables] == ["events"]
    kept = await asyncio.to_thread(keep_lifecycles, spark, where, "jobs", str(tmp_path / "kept"))
    assert (kept.events, kept.rows) == (180, 100)

    again = await hl.pop("jobs", 5, visibility=FAR)  # 30 to 34, once more
    await hl.ack(again[:4])
    await again[4].nack(reason="again")  # dead: it has no retries left
    await hl.enqueue("jobs", b"later", delay=FAR)
    await hl.purge("jobs")
    ended = 5 + 5 + 1 + 61  # leases, their ends, an enqueue, a purge of 60 and one

    def read() -> None:
        events = served.load(view="events")
        assert rows(events.agg({"offset": "max"}), "`max(offset)` + 1") == [(180 + ended,)]
        assert events.count() == events.select("offset").distinct().count() == 180 + ended
        enqueued = events.where("kind = 'enqueued'").orderBy("offset").first()
        assert (enqueued.priority, enqueued.payload_bytes, enqueued.due) == (0, 10, None)
        leased = events.where("kind = 'leased'").orderBy("offset").first()
        assert (leased.holder, leased.attempts, leased.id) == ("w", 1, enqueued.id)
        assert leased.deadline > leased.at >= enqueued.at
        archived = archive(spark, where, "jobs", lake)
        assert archived.rows == ended
        assert archive(spark, where, "jobs", lake).commits == 0, "a repeated archive adds nothing"
        assert keep_lifecycles(spark, where, "jobs", str(tmp_path / "kept")).events == ended
        wanted = {
            ("acked", 1): 30, ("acked", 2): 4, ("dead", 1): 5, ("dead", 2): 1, ("purged", 0): 61,
        }  # fmt: skip
        sources = [
            topic_lifecycles(spark, where, None, "jobs")[0],
            topic_lifecycles(spark, None, lake, "jobs")[0],
            topic_lifecycles(spark, where, lake, "jobs")[0],
            read_lifecycles(spark, str(tmp_path / "kept"), topic="jobs"),
        ]
        for found in sources:
            counted = found.groupBy("outcome", "attempts").count().collect()
            assert {(row.outcome, row.attempts): row["count"] for row in counted} == wanted
        past = rebuild(spark, where, "jobs", offsets={0: 180}).groupBy("state", "attempts").count()
        assert rows(past, "state", "attempts", "count") == [("dead", 1, 5), ("ready", 0, 60), ("ready", 1, 5)]
        assert rows(rebuild(spark, None, "jobs", offsets={0: 180 + ended}, lake=lake), "state") == [("dead",)] * 6
        assert forecast(spark, None, "jobs", lake=lake, workers=[2]).messages > 0
        reported = report(spark, where, "jobs")
        assert (reported.messages, reported.deliveries, reported.retries, reported.with_key) == (101, 45, 5, 0)
        assert reported.dead_reasons == (Counted("broken", 5), Counted("again", 1))
        assert reported.priorities[0].wait.count == 40

    await asyncio.to_thread(read)
    with pytest.raises(BadRequest, match="does not keep past messages"):
        await asyncio.to_thread(archive, spark, where, "jobs", lake, views=("messages",))
    with pytest.raises(BadRequest, match="'silent' does not record events; set its retention"):
        await asyncio.to_thread(archive, spark, where, "silent", lake)
    with pytest.raises(BadRequest, match="the audit needs the log broker"):
        await asyncio.to_thread(audit, spark, where, "jobs")


async def test_stream_of_events_continues_at_its_checkpoint(served: Served, spark: Any, tmp_path: Path) -> None:
    await served.hl.create_topic("jobs", retention=FAR)

    def run() -> list[Any]:
        stream = spark.readStream.format("heapline").options(**served.where, subscribe="jobs", view="events")
        rows = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "30").load()
        writer = rows.select("offset", "kind").writeStream.format("parquet").trigger(availableNow=True)
        paths = {"path": str(tmp_path / "out"), "checkpointLocation": str(tmp_path / "checkpoint")}
        writer.options(**paths).start().awaitTermination()
        return sorted(row.offset for row in spark.read.parquet(str(tmp_path / "out")).collect())

    for count in (50, 70):
        await served.hl.enqueue_batch("jobs", [Outgoing(b"x")] * count)
        found = await asyncio.to_thread(run)
        assert found == list(range(len(found)))
    assert len(found) == 120


async def test_load_sends_each_row_once_if_driver_node_and_tasks_are_killed(spark: Any, tmp_path: Path) -> None:
    data, folder, rows = tmp_path / "node", tmp_path / "job", 1500
    files = make_source(tmp_path / "source", rows)
    async with sql_node(data, fresh_schema(), port=free_port()) as node, connect(node, data) as hl:
        await hl.create_topic("jobs")
        where = {"heapline.url": node.target, "heapline.api_key_file": str(data / "admin.key")}
        command = [
            "load", *files, "--topic", "jobs", "--name", "big", "--select", SELECT, "--folder", str(folder),
            "--to", node.target, "--key-file", str(data / "admin.key"), "--chunk-rows", "250",
        ]  # fmt: skip
        reached = await killed_midway(node, data / "admin.key", command, 1)
        assert 1 <= reached < rows // 250 - 1
        assert 0 < (await hl.stats("jobs")).delayed < rows

        async def kill_node() -> None:
            """Kill the node when the second driver has sent something too, and start another one in its place."""
            while (await hl.list_sinks())[0].version <= reached:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.02)
            await node.kill()
            await node.spawn()
            await node.ready()

        killing = asyncio.create_task(kill_node())
        again = asyncio.to_thread(load, spark, where, files, "jobs", name="big", select=SELECT, folder=folder)
        result, _ = await asyncio.gather(again, killing)
        assert (result.rows, result.messages, result.was_done) == (rows, rows, False)

        def fail_once() -> None:
            """Write 500 more rows. The first attempt of each task sends some, and fails."""
            numbers = spark.range(rows, rows + 500, 1, 2).selectExpr("CAST(id AS STRING) AS value")
            failing = numbers.mapInArrow(_failing_first, "value string").selectExpr(
                "value", "TIMESTAMP'2040-01-01 00:00:00Z' AS deliver_at"
            )
            writer = failing.write.format("heapline").options(**where, topic="jobs", txnAppId="app", txnVersion="1")
            writer.mode("append").save()

        await asyncio.to_thread(fail_once)
        await asyncio.to_thread(fail_once)  # a driver that was killed after the commit repeats it
        stats = await hl.stats("jobs")
        assert (stats.delayed, sum(p.prepared for p in stats.partitions)) == (rows + 500, 0)
        backlog = spark.read.format("heapline").options(**where, subscribe="jobs", view="backlog", columns="value")
        values = await asyncio.to_thread(lambda: [int(bytes(row.value)) for row in backlog.load().collect()])
        assert sorted(values) == list(range(rows + 500))


def _failing_first(batches: Iterator[Any]) -> Iterator[Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        yield batch.slice(0, batch.num_rows // 2)
        if context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")
        yield batch.slice(batch.num_rows // 2)
