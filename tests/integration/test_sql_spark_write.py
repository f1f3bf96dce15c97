"""The tasks and driver of a Spark write to a sql node, without Spark: the exactly-once sink works on its batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncpg")
pa = pytest.importorskip("pyarrow")

from heapline.spark.prepared_batches import Batch, Written, abort, commit, write, write_batch  # noqa: E402
from heapline.spark.write_options import WriteOptions, parse_write  # noqa: E402
from tests.integration.sql_processes import admin_key, connect, sql_node  # noqa: E402
from tests.postgres import fresh_schema  # noqa: E402


class Spark:
    """Runs tasks and commits as Spark would."""

    def __init__(self, target: str, data: Path, **options: str) -> None:
        where = {"heapline.url": target, "heapline.api_key": admin_key(data), "topic": "jobs", **options}
        self.options: WriteOptions = parse_write(where, {"value": "string"}, streaming=False, overwrite=False)

    def batch(self) -> Batch:
        return write_batch(self.options.txn, self.options.topic)

    async def task(self, batch: Batch, *values: str, partition: int = 0, attempt: int = 0) -> Written:
        rows = [pa.record_batch({"value": pa.array(list(values), pa.string())})]
        return await asyncio.to_thread(write, self.options, batch, rows, partition, attempt)

    async def commit(self, batch: Batch, *written: Written) -> Any:
        return await asyncio.to_thread(commit, self.options, batch, written)

    async def abort(self, batch: Batch, *written: Written) -> None:
        await asyncio.to_thread(abort, self.options, batch, written)


async def test_rows_of_retried_tasks_and_repeated_transactions_are_written_once(tmp_path: Path) -> None:
    data = tmp_path / "a"
    async with sql_node(data, fresh_schema()) as node, connect(node, data) as hl:
        await hl.create_topic("jobs")
        for _ in range(2):  # the driver was killed after the commit, and repeats the transaction
            spark = Spark(node.target, data, txnAppId="load", txnVersion="0")
            batch = spark.batch()
            await spark.task(batch, "a", "b", attempt=0)  # an attempt that was not committed: its rows are dropped
            written = [await spark.task(batch, "a", "b", attempt=1), await spark.task(batch, "c", partition=1)]
            await spark.commit(batch, *written)
        failed = Spark(node.target, data)
        batch = failed.batch()
        await failed.abort(batch, await failed.task(batch, "never"))
        stats = await hl.stats("jobs")
        assert (stats.ready, sum(p.prepared for p in stats.partitions)) == (3, 0)
        assert sorted(m.payload for m in await hl.pop("jobs", 10)) == [b"a", b"b", b"c"]
        assert [(sink.name, sink.version) for sink in await hl.list_sinks()] == [("txn:load@jobs", 0)]
