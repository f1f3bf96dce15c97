"""The loads on an in-memory broker; the bench uses only its own topic."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli import bench as command
from heapline.cli import main
from heapline.cli.bench.load import Drive, Loads, fsynced_writes
from heapline.contract.errors import BadRequest, StorageFull
from heapline.testing.memory import MemoryBroker

SECONDS = 0.05
runner = CliRunner()


def wanted(scratch: Path, **given: Any) -> command.Plan:
    fields: dict[str, Any] = {"seconds": SECONDS, "size": 64, "concurrency": 4, "topic": "bench", "data": scratch}
    return command.Plan(**{**fields, **given})


@pytest.mark.parametrize("index", range(5))
async def test_every_load_counts_its_messages(index: int) -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("bench")
        found = await Loads(hl, "bench", 64, 4, SECONDS).run(index)
        stats = await hl.stats("bench")
    assert found.messages == stats.enqueued_total > 0
    assert found.samples
    assert found.seconds > 0
    assert stats.leased == 0
    if index >= 2:
        assert (stats.acked_total, stats.ready) == (found.messages, 0)


async def test_large_messages_use_smaller_batches() -> None:
    async with MemoryBroker() as hl:
        assert Loads(hl, "bench", 256, 4, 1.0).batch == 100
        assert Loads(hl, "bench", 1 << 18, 4, 1.0).batch == 4
        assert Loads(hl, "bench", 1 << 20, 4, 1.0).batch == 1


async def test_drive_ends_at_its_limit_of_messages() -> None:
    drive = Drive(60.0, 10)

    async def turn() -> int:
        await asyncio.sleep(0)
        return 1

    await drive.run(turn, 2)
    assert 10 <= drive.messages <= 11
    assert len(drive.samples) == drive.messages


async def test_error_of_one_turn_ends_the_drive_and_is_raised() -> None:
    drive, turns = Drive(60.0), iter(range(100))

    async def turn() -> int:
        if next(turns) == 5:
            raise StorageFull("no room")
        await asyncio.sleep(0)
        return 1

    with pytest.raises(StorageFull):
        await drive.run(turn, 3)
    assert len(asyncio.all_tasks()) == 1


async def test_bench_leaves_no_topic_and_no_file_behind(tmp_path: Path) -> None:
    async with MemoryBroker() as hl:
        report = await command._measure(hl, wanted(tmp_path), "in memory")
        assert await hl.list_topics() == []
    assert [row.is_baseline for row in report.rows] == [False] * 5 + [True] * 2
    assert all(report.ratio(row) for row in report.rows[:5])
    assert list(tmp_path.iterdir()) == []


async def test_bench_rejects_an_existing_topic_and_leaves_it_unchanged(tmp_path: Path) -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("bench", max_backlog=command.BACKLOG_MIN)
        await hl.enqueue("bench", b"precious")
        with pytest.raises(BadRequest, match=r"topic 'bench' already exists.*--topic.*heapline topic delete bench"):
            await command._measure(hl, wanted(tmp_path), "in memory")
        assert (await hl.stats("bench")).ready == 1


async def test_bench_that_fails_deletes_its_topic_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise StorageFull("no room")

    async with MemoryBroker() as hl:
        monkeypatch.setattr(hl, "enqueue_batch", fail)
        with pytest.raises(StorageFull):
            await command._measure(hl, wanted(tmp_path), "in memory")
        assert await hl.list_topics() == []


async def test_worker_that_fails_ends_the_load_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise StorageFull("no room")

    async with MemoryBroker() as hl:
        await hl.create_topic("bench")
        monkeypatch.setattr(heapline.Message, "ack", fail)
        with pytest.raises(StorageFull):
            await Loads(hl, "bench", 64, 4, 60.0).run(3)


def test_unwritable_disk_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="with --scratch"):
        fsynced_writes(tmp_path / "absent", "writes", 64, 1, SECONDS)


def test_embedded_bench_measures_in_a_scratch_directory_and_removes_it(tmp_path: Path) -> None:
    options = ["--seconds", "0.1", "--size", "32", "--concurrency", "2", "--json"]
    result = runner.invoke(main.app, ["bench", "--data", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["size"], printed["concurrency"], len(printed["loads"]), len(printed["baselines"])) == (32, 2, 5, 2)
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    result = runner.invoke(main.app, ["bench", "--data", str(tmp_path / "absent")])
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
