"""An archive from a server: its group holds the journal until rows are in the lake; its own moves are not news."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from tests.integration.server_process import Process

if importlib.util.find_spec("deltalake") is None or importlib.util.find_spec("pyarrow") is None:
    pytest.skip("the lake needs deltalake and pyarrow", allow_module_level=True)

from heapline.spark.jobs.archive import ArchiveResult, archive
from tests.unit.spark.lake_rig import TasksAtOnce, rows_in


async def run(server: Process, data: Path, lake: Path, **more: Any) -> ArchiveResult:
    where = {"heapline.url": server.target, "heapline.api_key_file": str(data / "admin.key")}
    return await asyncio.to_thread(lambda: archive(TasksAtOnce(), where, "jobs", lake, **more))


async def test_group_holds_the_journal_from_the_lakes_end(tmp_path: Path) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    async with Process(data) as server, heapline.connect(server.target, api_key=key_of(data)) as hl:
        await hl.create_topic("jobs", partitions=2)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=f"k{i}") for i in range(300)])
        result = await run(server, data, lake)
        assert result.group == "archive"
        ends = dict(result.tables[0].ends)
        held = await hl.get_group("jobs", "archive")
        assert held.holding
        assert {offset.partition: offset.committed for offset in held.offsets} == ends
        # What counts is this lake, which is behind the group because it is a different one.
        other = await run(server, data, tmp_path / "other", views=("messages",), until=iter([False, True]).__next__)
        assert [table.rows for table in other.tables] == [300]
        assert len(rows_in(lake, "messages")) == len(rows_in(tmp_path / "other", "messages")) == 300
        await run(server, data, lake)
        assert len(rows_in(lake, "messages")) == 300


async def test_continuous_archive_ignores_its_own_group_moves(tmp_path: Path) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    async with Process(data) as server, heapline.connect(server.target, api_key=key_of(data)) as hl:
        await hl.create_topic("jobs", partitions=2)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=f"k{i}") for i in range(100)])
        looks = 0

        def enough() -> bool:
            nonlocal looks
            looks += 1
            return looks > 40

        result = await run(server, data, lake, available_now=False, trigger=0.1, until=enough)
        # The second round archives the events of creating the group; after that there are no more.
        assert 2 <= result.commits <= 4
        assert {table.view: table.rows for table in result.tables}["messages"] == 100


async def test_topic_without_streams_is_archived_without_a_group(tmp_path: Path) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    async with Process(data) as server, heapline.connect(server.target, api_key=key_of(data)) as hl:
        await hl.create_topic("jobs", streams=False)
        await hl.enqueue("jobs", b"1")
        with pytest.raises(BadRequest, match="streams=False"):
            await run(server, data, lake)
        assert (await run(server, data, lake, group=None)).group is None
        assert len(rows_in(lake, "messages")) == 1


def key_of(data: Path) -> str:
    return (data / "admin.key").read_text().strip()
