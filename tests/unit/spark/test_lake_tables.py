"""Delta tables of the lake: creation by concurrent archives, durable commits, and files that were removed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from heapline import open_sync
from heapline.spark.jobs.archive import archive
from heapline.spark.lake import tables
from heapline.spark.lake.maintenance import maintain
from heapline.spark.lake.tables import LakeFilesGone, ensure_table, require_table
from tests.unit.spark.lake_rig import TasksAtOnce, fill, rows_in


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


def test_commit_syncs_delta_checkpoints_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta readers start with the newest checkpoint, so a power cut that truncates it would destroy the table."""
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
    """The driver may have been suspended for a week, or vacuum may remove young files. The journal has the rows."""
    where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
    with open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs")
        fill(hl, 10)
        with pytest.raises(LakeFilesGone, match="Archive again"):
            archive(TasksAtOnce(lambda: maintain(lake, vacuum_hours=0) and None), where, "jobs", lake)
        assert require_table(lake, "events").extent("jobs") is None
        archive(TasksAtOnce(), where, "jobs", lake)
        assert len(rows_in(lake, "messages")) == len(rows_in(lake, "events")) == 10
