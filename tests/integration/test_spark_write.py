"""The tasks and driver of a Spark write, without Spark: attempts, replays, repeats and kills in any order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet  # noqa: E402

from heapline.contract.errors import UnknownPart  # noqa: E402
from heapline.spark import enqueue_rows as outgoing  # noqa: E402
from heapline.spark.prepared_batches import (  # noqa: E402
    BadRows,
    Batch,
    Written,
    abort,
    commit,
    stream_batch,
    write,
    write_batch,
)
from heapline.spark.write_options import WriteOptions, parse_write  # noqa: E402
from tests.integration.server_rig import Rig  # noqa: E402

CONFIG: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 1000, "partitions": 2}


class Spark:
    """Runs tasks and commits as Spark would."""

    def __init__(self, rig: Rig, **options: str) -> None:
        self.rig = rig
        where = {"heapline.url": rig.target, "heapline.api_key": "hl_any", "topic": "jobs", **options}
        self.options: WriteOptions = parse_write(where, {"value": "string"}, streaming=False, overwrite=False)

    async def task(self, batch: Batch, *values: str | None, partition: int = 0, attempt: int = 0) -> Written:
        rows = [pa.record_batch({"value": pa.array(list(values), pa.string())})]
        return await asyncio.to_thread(write, self.options, batch, rows, partition, attempt)

    async def commit(self, batch: Batch, *written: Written) -> int:
        return await asyncio.to_thread(commit, self.options, batch, written)

    async def abort(self, batch: Batch, *written: Written) -> None:
        await asyncio.to_thread(abort, self.options, batch, written)

    async def found(self) -> list[str]:
        """Return the content of the queue; nothing may be left prepared."""
        stats = await self.rig.broker.stats("jobs")
        assert sum(p.prepared for p in stats.partitions) == 0
        return sorted((m.payload or b"").decode() for m in await self.rig.broker.peek("jobs", 100))


@pytest.fixture
async def rig(tmp_path: Path) -> Any:
    async with Rig(tmp_path / "data") as made:
        await made.broker.create_topic("jobs", **CONFIG)
        yield made


async def test_only_successful_attempts_are_committed(rig: Rig) -> None:
    spark, batch = Spark(rig), stream_batch("q", 0)
    lost = await spark.task(batch, "a", "b")
    won = await spark.task(batch, "a", "b", attempt=1)
    other = await spark.task(batch, "c", partition=1)
    empty = await spark.task(batch, partition=2)
    assert (lost.names() == won.names(), empty.names()) == (False, [])
    assert await spark.commit(batch, won, other, empty) == 3
    assert await spark.found() == ["a", "b", "c"]


async def test_replayed_batch_sends_nothing_and_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    spark, batch = Spark(rig), stream_batch("q", 0)
    assert await spark.commit(batch, await spark.task(batch, "a")) == 1
    monkeypatch.setattr(outgoing, "PART_ROWS", 1)
    again = await spark.task(batch, *"abcdefghijklmnop")
    assert again.parts < 16, "it stops once its batch was committed"
    assert await spark.commit(batch, again) == 1
    assert await spark.found() == ["a"]


async def test_older_version_of_a_sink_changes_nothing(rig: Rig) -> None:
    spark = Spark(rig)
    for number in range(20):
        batch = stream_batch("q", number)
        await spark.commit(batch, await spark.task(batch, str(number)))
    await rig.behind.topics.batches.forget_old(3600.0)
    old = stream_batch("q", 0)
    late = await spark.task(old, "late")
    assert "late" not in await spark.found(), "nothing stays prepared, even if the late attempt is never committed"
    assert await spark.commit(old, late) == 0
    assert "late" not in await spark.found()


async def test_write_without_transaction_is_new_and_can_be_aborted(rig: Rig) -> None:
    spark = Spark(rig)
    for _ in range(2):
        batch = write_batch(None)
        await spark.commit(batch, await spark.task(batch, "a"))
    batch = write_batch(None)
    gone = await spark.task(batch, "b")
    await spark.abort(batch, gone)
    with pytest.raises(UnknownPart, match="Write the batch again"):
        await spark.commit(batch, gone)
    assert await spark.found() == ["a", "a"]


async def test_abort_after_commit_changes_nothing(rig: Rig) -> None:
    spark, batch = Spark(rig), write_batch(("app", 0))
    done = await spark.task(batch, "a")
    await spark.commit(batch, done)
    await spark.abort(batch, done)
    assert await spark.found() == ["a"]


async def test_empty_batch_advances_the_version(rig: Rig) -> None:
    spark, batch = Spark(rig), stream_batch("q", 3)
    assert await spark.commit(batch, await spark.task(batch)) == 0
    assert [(sink.name, sink.version) for sink in await rig.broker.list_sinks()] == [("query:q", 3)]


async def test_bad_row_fails_its_task(rig: Rig) -> None:
    spark, batch = Spark(rig), stream_batch("q", 0)
    with pytest.raises(BadRows, match=r"2 row\(s\) .* row 1 for topic 'jobs': value is null; row 2 .* 2000 bytes"):
        await spark.task(batch, "a", None, "s" * 2000)
    assert await spark.found() == []


def aside(folder: Path) -> list[tuple[int, str]]:
    """Return (row, reason) of everything that readers see."""
    files = [path for path in folder.rglob("*.parquet") if "_staging" not in path.parts]
    rows = [row for path in files for row in parquet.read_table(path, partitioning=None).to_pylist()]
    return sorted((row["_row"], row["_reason"]) for row in rows)


async def test_bad_rows_are_published_once_with_the_commit(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    spark, batch = Spark(rig, badRecordsPath=str(folder)), stream_batch("q", 0)
    lost = await spark.task(batch, "a", None)
    won = await spark.task(batch, "a", None, attempt=1)
    assert aside(folder) == []
    assert lost.bad is not None
    await spark.commit(batch, won)
    again = await spark.task(batch, "a", None, attempt=2)
    await spark.commit(batch, again)
    assert aside(folder) == [(1, "value is null")]
    assert not list(folder.rglob("_staging/**/*.parquet"))
    assert await spark.found() == ["a"]


async def test_bad_rows_are_published_after_a_kill_at_the_commit(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bad"
    spark, batch = Spark(rig, badRecordsPath=str(folder)), stream_batch("q", 0)
    task = await spark.task(batch, "a", None, "b", None)
    await rig.broker.commit_batch(batch.id, task.names(), sink=batch.sink, version=batch.version)
    monkeypatch.setattr(outgoing, "PART_ROWS", 1)
    await spark.commit(batch, await spark.task(batch, "a", None, "b", None, attempt=1))
    assert aside(folder) == [(1, "value is null"), (3, "value is null")]
    assert await spark.found() == ["a", "b"]


async def test_parts_are_prepared_again_after_a_server_restart(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    spark, batch = Spark(rig), stream_batch("q", 0)
    monkeypatch.setattr(outgoing, "PART_ROWS", 1)
    working = asyncio.ensure_future(spark.task(batch, *(f"{i:03}" for i in range(60))))
    await asyncio.sleep(0)
    port = rig.server.port
    await rig.stop()
    rig._settings = msgspec.structs.replace(rig._settings, port=port)
    await rig.start()
    assert await spark.commit(batch, await working) == 60
    assert await spark.found() == [f"{i:03}" for i in range(60)]
