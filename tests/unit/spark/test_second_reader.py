"""Regressions found in a review of the queue and Spark. Each test stands for a defect that existed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from heapline import open_sync
from heapline.contract.message import Outgoing
from heapline.journal.disk import RealDisk
from heapline.journal.log_start import read_log_start
from heapline.journal.reader_lease import read_leases
from heapline.spark.jobs.archive import _read_options, archive
from heapline.spark.jobs.lifecycle_updates import Extent, LifecycleTable, TableMoved
from heapline.spark.lake import tables
from heapline.spark.lake.maintenance import drop, maintain
from heapline.spark.lake.rounds import Rounds
from heapline.spark.lake.tables import LakeFilesGone, ensure_table, require_table
from heapline.spark.offsets import Subscription
from heapline.spark.target import source_of
from tests.unit.engine.rig import opened
from tests.unit.spark.lake_rig import TasksAtOnce, fill, rows_in
from tests.unit.spark.log_rig import rows
from tests.unit.spark.test_prepared_ranges import far_apart, squeezed


@pytest.mark.parametrize("name", ["startingTimestamp", "startingOffsetsByTimestamp"])
async def test_time_before_the_log_start_means_the_log_start(
    name: str,
) -> None:
    async with opened() as rig:
        await far_apart(rig)
        await squeezed(rig)
        earliest = rows(rig)
        moment = "1" if name == "startingTimestamp" else '{"jobs": {"0": 1}}'
        assert rows(rig, **{name: moment}) == earliest


def test_lake_started_above_the_first_segment_matches_its_journal(tmp_path: Path) -> None:
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
        hl._run(hl._broker.runner("jobs").upkeep.reclaim())
        assert read_log_start(RealDisk(), hl._broker.runner("jobs").loader.directory)
        where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
        assert archive(TasksAtOnce(), where, "jobs", lake).rows
        hl.enqueue("jobs", b"more")
        assert {table.rows for table in archive(TasksAtOnce(), where, "jobs", lake).tables} == {1}


def test_delta_checkpoints_are_durable_before_the_group_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers begin with the newest one, so a power cut that leaves half of it would take the table with it."""
    log = tmp_path / "events" / "_delta_log"
    log.mkdir(parents=True)
    for name in ("98.json", "98.checkpoint.parquet", "99.json", "99.checkpoint.parquet", "_last_checkpoint"):
        (log / name).touch()
    synced: list[str] = []
    monkeypatch.setattr(tables, "sync_path", lambda path: synced.append(Path(path).name))
    tables._sync_log(str(tmp_path / "events"), 98)
    assert set(synced[:3]) == {"99.json", "99.checkpoint.parquet", "_last_checkpoint"}
    assert synced[3:] == ["_delta_log", "events", tmp_path.name]


def test_files_removed_by_maintenance_are_not_committed(tmp_path: Path) -> None:
    """A driver that stood still for a week, or upkeep told to remove young files: the journal still has the rows."""
    where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
    with open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs")
        fill(hl, 10)
        with pytest.raises(LakeFilesGone, match="Archive again"):
            archive(TasksAtOnce(lambda: maintain(lake, vacuum_hours=0) and None), where, "jobs", lake)
        assert require_table(lake, "events").extent("jobs") is None
        archive(TasksAtOnce(), where, "jobs", lake)
        assert len(rows_in(lake, "messages")) == len(rows_in(lake, "events")) == 10


def test_journal_is_held_for_the_view_furthest_behind(tmp_path: Path) -> None:
    """Both are planned on one log, which has one lease: that of the second must not take the place of the first's."""
    where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
    with open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as hl:
        hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        for _ in range(6):
            hl.enqueue_batch("jobs", [Outgoing(bytes(100_000))] * 5)
        archive(TasksAtOnce(), where, "jobs", lake, views=("events",))
        fill(hl, 10)
        directory = hl._broker.runner("jobs").loader.directory
        held: list[int] = []

        class Watched(TasksAtOnce):
            def range(self, *args: int) -> Any:
                held.extend(lease.segment for lease in read_leases(RealDisk(), directory, 0))
                return super().range(*args)

        archive(Watched(), where, "jobs", lake)
        assert held == [1]


def test_archive_of_one_view_holds_rows_that_the_other_view_lacks(tmp_path: Path) -> None:
    """Two archives, one for each view, share the lake and the group: the quick one must not let go for the slow one."""
    where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
    with open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs")
        fill(hl, 10)
        archive(TasksAtOnce(), where, "jobs", lake)
        fill(hl, 10)
        archive(TasksAtOnce(), where, "jobs", lake, views=("messages",))
        assert _held_by(where, lake, ("messages",)) == _held_by(where, lake, ("messages", "events")) == {0: 10}
        drop(lake, "jobs")
        archive(TasksAtOnce(), where, "jobs", lake, views=("messages",))
        assert _held_by(where, lake, ("messages",)) == {0: 20}, "the other view has nothing of this topic to go on from"


def _held_by(where: dict[str, str], lake: Path, views: tuple[str, ...]) -> dict[int, int]:
    """From where on the group would hold the journal."""
    options = {view: _read_options(where, {"subscribe": "jobs"}, view, True) for view in views}
    source = source_of(options[views[0]])
    subscription = Subscription(source, options[views[0]].selection)
    subscription.find()
    found: dict[int, int] = {}

    class Group:
        def move(self, topic: str, places: dict[int, int]) -> None:
            found.update(places)

    group: Any = Group()
    Rounds(None, source, options, str(lake), group, subscription, True).hold()
    subscription.close()
    return found


def test_concurrent_first_archives_create_each_table_once(tmp_path: Path) -> None:
    for number in range(8):
        versions: list[int] = []
        together = threading.Barrier(3)

        def begin(lake: str = str(tmp_path / str(number)), together: threading.Barrier = together) -> None:
            together.wait()
            versions.append(ensure_table(lake, "events").version)  # noqa: B023

        threads = [threading.Thread(target=begin) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert versions == [0, 0, 0]


def test_second_of_two_first_lifecycle_runs_is_rejected(tmp_path: Path) -> None:
    columns = {"topic": "string", "id": "bigint", "is_over": "boolean"}
    runs = [LifecycleTable(str(tmp_path), columns) for _ in range(2)]  # both find no table, and begin at the beginning
    folders = [run.new_folder() for run in runs]
    for folder in folders:
        (tmp_path / folder / "is_over=true").mkdir(parents=True)
        parquet.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / folder / "is_over=true" / "part.parquet")
    assert runs[0].commit("jobs", folders[0], Extent(1, {0: 9})) == 3
    with pytest.raises(TableMoved):
        runs[1].commit("jobs", folders[1], Extent(1, {0: 9}))
    (over,) = LifecycleTable(str(tmp_path), columns).files("jobs").values()
    assert len(over) == 1
