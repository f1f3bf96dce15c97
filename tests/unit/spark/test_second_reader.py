"""What a second reader found between the queue and Spark. Each test stands for a defect that was there once."""

from __future__ import annotations

from pathlib import Path

import pytest

from heapline import open_sync
from heapline.journal.disk import RealDisk
from heapline.journal.log_start import read_log_start
from heapline.model import Outgoing
from heapline.spark.jobs.archive import archive
from tests.unit.engine.rig import opened
from tests.unit.spark.lake_rig import TasksAtOnce
from tests.unit.spark.log_rig import rows
from tests.unit.spark.test_prepared_ranges import far_apart, squeezed


@pytest.mark.parametrize("name", ["startingTimestamp", "startingOffsetsByTimestamp"])
async def test_moment_before_the_logs_start_means_its_start_also_where_that_lies_above_the_first_segments(
    name: str,
) -> None:
    async with opened() as rig:
        await far_apart(rig)
        await squeezed(rig)
        earliest = rows(rig)
        moment = "1" if name == "startingTimestamp" else '{"jobs": {"0": 1}}'
        assert rows(rig, **{name: moment}) == earliest


def test_lake_that_was_begun_above_its_first_segment_is_still_taken_for_the_same_journal(tmp_path: Path) -> None:
    with open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0, rewrite_below=0.0) as hl:
        hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        hl.prepare_batch("b", "p", [Outgoing(b"prepared", -200)], topic="jobs")
        for _ in range(3):
            hl.enqueue_batch("jobs", [Outgoing(bytes(100_000))] * 5)
            hl.ack(hl.pop("jobs", 100))
        hl.commit_batch("b", ["p"])
        hl.ack(hl.pop("jobs", 1))
        for _ in range(3):
            hl.enqueue("jobs", b"mark")
            hl.snapshot("jobs")
        hl._run(hl._broker._runner("jobs").upkeep.reclaim())
        assert read_log_start(RealDisk(), hl._broker._runner("jobs").loader.directory)
        where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
        assert archive(TasksAtOnce(), where, "jobs", lake).rows
        hl.enqueue("jobs", b"more")
        assert {table.rows for table in archive(TasksAtOnce(), where, "jobs", lake).tables} == {1}
