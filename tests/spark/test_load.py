"""Loading files into a topic: each row becomes one message, even if the driver is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import heapline
from heapline.contract.errors import BadRequest
from heapline.spark.jobs.load import LoadResult, load
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS

pytestmark = MARKS
SELECT = (
    "CAST(n AS STRING) AS value, n % 100 AS priority, CONCAT('k', n % 1000) AS key, "
    "TIMESTAMP'2040-01-01 00:00:00Z' + make_interval(0, 0, 0, 0, 0, 0, n % 86400) AS deliver_at"
)


def make_source(folder: Path, rows: int, files: int = 4) -> list[str]:
    folder.mkdir()
    for number, numbers in enumerate(np.array_split(np.arange(rows), files)):
        pq.write_table(
            pa.table({"n": numbers, "text": pa.nulls(len(numbers), pa.string())}), folder / f"{number}.parquet"
        )
    return [str(path) for path in sorted(folder.iterdir())]


async def killed_midway(server: Process, key_file: Path, command: list[str], chunks: int) -> int:
    """Start the command in a separate process, and kill it and its Java once some chunks are enqueued."""
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "heapline", "pipeline", *command, start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with heapline.connect(server.target, api_key=key_file.read_text().strip()) as hl:
        while not any(sink.version >= chunks for sink in await hl.list_sinks()):
            assert driver.returncode is None, "it ended by itself"
            await asyncio.sleep(0.05)
        os.killpg(driver.pid, signal.SIGKILL)
        await driver.wait()
        return (await hl.list_sinks())[0].version


async def load_through_a_kill(spark: Any, tmp_path: Path, rows: int, chunk_rows: int) -> None:
    data, folder = tmp_path / "data", tmp_path / "job"
    files = make_source(tmp_path / "source", rows)
    async with Process(data) as server:
        key_file = data / "admin.key"
        where = {"heapline.url": server.target, "heapline.api_key_file": str(key_file)}
        async with heapline.connect(server.target, api_key=key_file.read_text().strip()) as hl:
            await hl.create_topic("jobs", partitions=2)
            command = [
                "load", *files, "--topic", "jobs", "--name", "big", "--select", SELECT, "--folder", str(folder),
                "--to", server.target, "--key-file", str(key_file), "--chunk-rows", str(chunk_rows),
            ]  # fmt: skip
            reached = await killed_midway(server, key_file, command, 1)
            assert 1 <= reached < rows // chunk_rows - 1
            assert 0 < (await hl.stats("jobs")).delayed < rows

            def again() -> LoadResult:
                return load(spark, where, files, "jobs", name="big", select=SELECT, folder=folder)

            result = await asyncio.to_thread(again)
            assert (result.rows, result.messages, result.was_done) == (rows, rows, False)
            assert result.chunks_before >= 2
            assert (await hl.stats("jobs")).delayed == rows
            [reported] = await asyncio.to_thread(found, spark, where)
            assert (reported.rows, reported.values, reported.total) == (rows, rows, rows * (rows - 1) // 2)
            assert reported.wrong == 0
            assert (await asyncio.to_thread(again)).was_done
            assert (await hl.stats("jobs")).delayed == rows
            assert sorted(path.name for path in folder.iterdir()) == ["lock", "plan.json", "progress.json"]


def found(spark: Any, where: dict[str, str]) -> Any:
    """Like the format reads the topic."""
    rows = spark.read.format("heapline").options(**where, subscribe="jobs").load()
    return rows.selectExpr(
        "count(*) AS rows", "count(DISTINCT CAST(value AS STRING)) AS values",
        "sum(CAST(CAST(value AS STRING) AS BIGINT)) AS total",
        "count_if(priority != CAST(CAST(value AS STRING) AS BIGINT) % 100 OR deliver_at < '2040-01-01') AS wrong",
    ).collect()  # fmt: skip


async def test_load_enqueues_each_row_once_if_the_driver_is_killed(spark: Any, tmp_path: Path) -> None:
    await load_through_a_kill(spark, tmp_path, 200_000, 25_000)


@pytest.mark.soak
async def test_ten_million_rows_are_loaded_once_if_the_driver_is_killed(spark: Any, tmp_path: Path) -> None:
    await load_through_a_kill(spark, tmp_path, 10_000_000, 100_000)


async def test_load_reads_tables_files_and_delta_and_rejects_bad_sql(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"name": "ann", "age": 3}\n{"name": "bob", "age": 70}\n', encoding="utf-8")
    data = tmp_path / "data"
    async with Process(data) as server:
        where = {"heapline.url": server.target, "heapline.api_key_file": str(data / "admin.key")}
        async with heapline.connect(server.target, api_key=(data / "admin.key").read_text().strip()) as hl:
            await hl.create_topic("jobs")

            def run(source: Any, name: str, **more: Any) -> LoadResult:
                return load(spark, where, source, "jobs", name=name, folder=tmp_path / name, **more)

            for select, why in (
                ("nam AS value", "Spark rejected the SQL"), ("name AS value, age AS prio", "unknown column 'prio'"),
                ("name", "unknown column 'name'|column value is missing"),
            ):  # fmt: skip
                with pytest.raises(BadRequest, match=why):
                    await asyncio.to_thread(run, tmp_path / "a.jsonl", "bad", select=select)
            assert (await hl.stats("jobs")).ready == 0
            await asyncio.to_thread(run, tmp_path / "a.jsonl", "json", filter="age > 5")
            table = spark.createDataFrame([("x", 1), ("y", 2)], "value string, priority int")
            await asyncio.to_thread(run, table, "table", rate=1000.0)
            delta = pa.table({"value": ["z"], "priority": [3]})
            deltalake.write_deltalake(str(tmp_path / "delta"), delta)
            deltalake.write_deltalake(str(tmp_path / "delta"), delta, mode="overwrite")
            await asyncio.to_thread(run, tmp_path / "delta", "delta")
            peeked = [(m.payload, m.priority) for m in await hl.peek("jobs", 10)]
            assert sorted(peeked) == [(b"x", 1), (b"y", 2), (b"z", 3), (b'{"age":70,"name":"bob"}', 0)]
