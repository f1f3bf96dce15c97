"""Archives that are killed, race and repeat, on real journals and real Delta tables, without Spark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import heapline
from heapline import open_sync
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.journal.disk import RealDisk
from heapline.journal.log_bounds import read_log_start
from heapline.spark.jobs.archive import ArchiveResult, archive
from heapline.spark.lake import files as layout
from heapline.spark.lake.claims import Claim, LakeMoved, OtherIncarnation
from heapline.spark.lake.files import stored_columns, write_parts
from heapline.spark.lake.maintenance import contents, drop, maintain
from heapline.spark.lake.tables import LakeTable, OtherJournal, require_table
from heapline.spark.schema import arrow_schema, columns_of
from heapline.spark.topic_log import DataLost
from tests.unit.spark.lake_rig import TasksAtOnce, fill, reclaim, rows_in

VIEWS = ("messages", "events")
ROOT = Path(__file__).parents[3]


class Died(Exception):
    pass


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[Any]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as broker:
        broker.create_topic("jobs", partitions=3, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield broker


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def run(tmp_path: Path, spark: TasksAtOnce | None = None, **more: Any) -> ArchiveResult:
    more = {"topic": "jobs", "lake_dir": tmp_path / "lake", **more}
    return archive(spark or TasksAtOnce(), {"path": str(tmp_path / "data")}, **more)


def check_whole(lake: Path, messages: int, result: ArchiveResult | None = None) -> None:
    """Every offset of the log once, every message once."""
    events = rows_in(lake, "events")
    ends = require_table(lake, "events").extent("jobs")
    assert ends is not None
    assert events == [(p, offset) for p, end in ends.ends.items() for offset in range(end)]
    found = rows_in(lake, "messages")
    assert len(found) == len(set(found)) == messages
    assert require_table(lake, "messages").extent("jobs") == ends
    if result is not None:
        assert {dict(table.ends).__repr__() for table in result.tables} == {dict(ends.ends).__repr__()}


def test_archive_adds_only_new_rows(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 500)
    hl.ack(hl.pop("jobs", 100))
    first = run(tmp_path)
    assert {table.view: table.rows for table in first.tables} == {"messages": 500, "events": 700}
    again = run(tmp_path)
    assert (again.rows, again.commits) == (0, 0)
    fill(hl, 300, first=500)
    third = run(tmp_path)
    assert {table.view: table.rows for table in third.tables} == {"messages": 300, "events": 300}
    check_whole(lake, 800, third)


def test_small_rounds_make_the_same_lake(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 500)
    reported: list[tuple[int, int]] = []
    result = run(tmp_path, round_rows=120, on_progress=lambda p: reported.append((p.done, p.total)))
    assert result.commits == 2 * 5
    assert reported[-1] == (1000, 1000)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    check_whole(lake, 500, result)


def test_commit_records_its_ranges(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 50)
    run(tmp_path)
    fill(hl, 50)
    run(tmp_path)
    newest, before = require_table(lake, "events").table.history(2)
    ranges, earlier = newest["heapline"]["jobs"]["ranges"], before["heapline"]["jobs"]["ranges"]
    assert {p: r[0] for p, r in ranges.items()} == {p: r[1] for p, r in earlier.items()}
    assert sum(end - start for start, end in ranges.values()) == 50


def test_kill_between_files_and_commit_adds_nothing_to_the_lake(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 200)

    def die() -> None:
        raise Died

    with pytest.raises(Died):
        run(tmp_path, TasksAtOnce(after=die))
    assert rows_in(lake, "events") == []
    orphans = len(list(lake.rglob("*.zstd.parquet")))
    assert orphans
    check_whole(lake, 200, run(tmp_path))
    assert sum(done.files_removed for done in maintain(lake, vacuum_hours=0)) >= orphans
    check_whole(lake, 200)


def test_archive_continues_with_the_other_view_after_a_kill(
    hl: Any, tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hl, 200)
    commit = LakeTable.commit

    def die_after(self: LakeTable, *args: Any) -> None:
        commit(self, *args)
        raise Died

    monkeypatch.setattr(LakeTable, "commit", die_after)
    with pytest.raises(Died):
        run(tmp_path)
    monkeypatch.undo()
    assert [len(rows_in(lake, view)) for view in VIEWS] == [200, 0]
    fill(hl, 100, first=200)
    check_whole(lake, 300, run(tmp_path))


def test_archive_overtaken_before_its_commit_adds_nothing_twice(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 200)
    raced = []

    def overtake() -> None:
        if not raced:
            raced.append(run(tmp_path, round_rows=150))  # less in a round, so that the ranges differ

    result = run(tmp_path, TasksAtOnce(after=overtake))
    assert result.conflicts == 1
    assert (raced[0].rows, result.rows) == (400, 0)
    check_whole(lake, 200, result)


def test_archive_overtaken_by_another_adds_the_rest(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 200)
    done: list[int] = []

    def overtake() -> None:
        if not done:
            done.append(1)
            run(tmp_path, round_rows=50, until=iter([False, True]).__next__)

    result = run(tmp_path, TasksAtOnce(after=overtake))
    assert result.conflicts == 1
    assert result.rows == 400 - 100
    check_whole(lake, 200, result)


def test_concurrent_archives_add_every_row_once(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 400)
    together = threading.Barrier(3)
    found: list[ArchiveResult] = []

    def race() -> None:
        together.wait()
        found.append(run(tmp_path, round_rows=150))

    racers = [threading.Thread(target=race) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sum(result.rows for result in found) == 800
    check_whole(lake, 400)


def test_delta_rejects_the_second_commit_on_the_same_version(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 20)
    run(tmp_path)
    one, other = require_table(lake, "events"), require_table(lake, "events")
    kept = one.extent("jobs")
    assert kept is not None
    claim = Claim(kept.incarnation, {p: (end, end + 1) for p, end in kept.ends.items()})
    one.commit({"jobs": claim}, [])
    with pytest.raises(LakeMoved):
        other.commit({"jobs": claim}, [])


def test_rows_reclaimed_before_archiving_fail_unless_loss_is_accepted(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 20)
    run(tmp_path)
    reclaim(hl)
    with pytest.raises(DataLost, match=r"are missing.*--accept-loss"):
        run(tmp_path)
    result = run(tmp_path, fail_on_loss=False)
    assert result.rows > 0
    [commit] = require_table(lake, "events").table.history(1)
    assert commit["heapline"]["jobs"]["lost"]
    found = rows_in(lake, "events")
    assert len(found) == len(set(found))
    assert run(tmp_path).rows == 0


def test_recreated_topic_is_rejected_until_its_rows_are_dropped(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 50)
    run(tmp_path)
    hl.delete_topic("jobs")
    hl.create_topic("jobs", partitions=2)
    fill(hl, 30)
    with pytest.raises(OtherIncarnation, match="lake drop --topic jobs"):
        run(tmp_path)
    assert len(rows_in(lake, "messages")) == 50
    assert drop(lake, "jobs") == 100
    assert rows_in(lake, "messages") == []
    run(tmp_path)
    assert [len(rows_in(lake, view)) for view in VIEWS] == [30, 30]
    with pytest.raises(BadRequest, match="does not contain topic 'other'"):
        drop(lake, "other")


def test_recreated_directory_is_not_mistaken_for_the_old_one(tmp_path: Path, lake: Path) -> None:
    for count in (20, 50):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
            hl.create_topic("jobs", partitions=1, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
            fill(hl, count)
            if count == 20:
                run(tmp_path)
                assert run(tmp_path).rows == 0
            else:
                with pytest.raises(OtherJournal, match="directory was recreated"):
                    run(tmp_path)
    assert len(rows_in(lake, "events")) == 20


def test_maintenance_joins_files_drops_days_and_keeps_the_ends(hl: Any, tmp_path: Path, lake: Path) -> None:
    for first in range(0, 300, 100):
        fill(hl, 100, first=first)
        run(tmp_path)
    before = contents(lake)
    assert [topic.files for topic in before] == [3, 3]
    done = maintain(lake, vacuum_hours=0)
    assert [(d.files_before, d.files) for d in done] == [(3, 1), (3, 1)]
    assert all(d.files_removed >= 3 for d in done)
    check_whole(lake, 300)
    after = contents(lake)
    assert [(t.rows, t.ends) for t in after] == [(t.rows, t.ends) for t in before]
    maintain(lake, keep_days=400, vacuum_hours=0)
    check_whole(lake, 300)
    gone = maintain(lake, keep_days=1, today=date(2100, 1, 1), vacuum_hours=0)
    assert [d.rows_dropped for d in gone] == [300, 300]
    for view in VIEWS:
        table = require_table(lake, view).table
        table.create_checkpoint()
        table.cleanup_metadata()
    assert [(t.topic, t.rows, t.ends) for t in contents(lake)] == [(t.topic, 0, t.ends) for t in before]
    assert run(tmp_path).rows == 0


def test_older_lake_gets_new_columns_of_its_view(
    hl: Any, tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tuple(column for column in layout.VIEWS["events"] if column.name != "details")
    monkeypatch.setitem(layout.VIEWS, "events", short)
    fill(hl, 20)
    run(tmp_path, views=("events",))
    monkeypatch.undo()
    hl.ack(hl.pop("jobs", 5))
    run(tmp_path, views=("events",))
    found = require_table(lake, "events").table.to_pyarrow_table()
    assert (found.num_rows, found["details"].type) == (30, "string")


def test_killed_archive_can_be_continued(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 400)
    code = (
        "from heapline.spark.jobs.archive import archive\n"
        "from tests.unit.spark.lake_rig import TasksAtOnce\n"
        f"archive(TasksAtOnce(), {{'path': {str(tmp_path / 'data')!r}}}, 'jobs', {str(lake)!r}, round_rows=7,\n"
        "        on_progress=lambda p: print(p.done, flush=True))"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    for _ in range(3):
        assert killed.stdout.readline()
    killed.kill()  # in the middle of its fourth round
    killed.wait()
    killed.stdout.close()
    assert 0 < len(rows_in(lake, "events")) < 400
    check_whole(lake, 400, run(tmp_path))


def test_namespaces_are_separate_and_a_pattern_matches_both(hl: Any, tmp_path: Path, lake: Path) -> None:
    hl.create_topic("billing/jobs", partitions=1)
    fill(hl, 20)
    fill(hl, 30, "billing/jobs")
    run(tmp_path, topic=None, pattern=".*jobs")
    table = require_table(lake, "messages")
    assert {(f.topic, f.rows) for f in table.files()} == {("jobs", 20), ("billing/jobs", 30)}
    folders = {str(path.relative_to(lake / "messages").parent.parent) for path in lake.rglob("messages/**/*.parquet")}
    assert folders == {"namespace=default/topic=jobs", "namespace=billing/topic=billing%2Fjobs"}


def test_failed_write_task_leaves_no_file(tmp_path: Path) -> None:
    schema = arrow_schema(columns_of("events"))

    def batches() -> Iterator[Any]:
        column = {"int32": 1, "int64": 1, "string": "x", "bool": True}
        yield pa.RecordBatch.from_pylist([{f.name: column.get(str(f.type), datetime.now(UTC)) for f in schema}], schema)
        raise Died

    with pytest.raises(Died):
        write_parts(str(tmp_path), "events", "jobs", (batch.drop_columns(["topic"]) for batch in batches()))
    assert list(tmp_path.rglob("*.parquet")) == []


def test_each_day_has_its_own_file_with_statistics(tmp_path: Path) -> None:
    columns = stored_columns("messages")
    at = [datetime(2026, 1, 31, 23, 59, 59, 999_000, UTC), datetime(2026, 2, 1, tzinfo=UTC)] * 3
    rows = [
        {"value": b"x", "partition": 0, "offset": i, "timestamp": at[i], "timestampType": 1, "message_id": "x", "id": i,
         "priority": -i, "enqueued_at": at[i], "unit": 1} for i in range(6)
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(rows, arrow_schema(columns))
    found = sorted(write_parts(str(tmp_path), "messages", "jobs", [batch]))
    assert [(file.date, file.rows) for file in found] == [("2026-01-31", 3), ("2026-02-01", 3)]
    stats = json.loads(found[0].stats)
    assert (stats["minValues"]["offset"], stats["maxValues"]["offset"]) == (0, 4)
    assert stats["maxValues"]["enqueued_at"] == "2026-01-31T23:59:59.999Z"
    assert [os.path.getsize(tmp_path / file.path) for file in found] == [file.nbytes for file in found]


def test_invalid_archive_is_rejected_and_creates_nothing(hl: Any, tmp_path: Path, lake: Path) -> None:
    for wrong, reported in [
        ({"topic": None}, "no topics selected"),
        ({"pattern": "x"}, "no topics selected"),
        ({"views": ("messages", "messages")}, "views must be distinct and among messages, events"),
        ({"lake_dir": "s3://bucket/lake"}, "a directory that driver and executors share"),
        ({"round_rows": 0}, "round_rows"),
    ]:
        with pytest.raises(BadRequest, match=reported):
            run(tmp_path, **wrong)
    assert not lake.exists()


def test_archive_continues_a_lake_that_began_above_the_first_segment(tmp_path: Path) -> None:
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
        hl._run(hl._broker.topics.runner("jobs").maintenance.reclaim())
        assert read_log_start(RealDisk(), hl._broker.topics.runner("jobs").loader.directory)
        where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
        assert archive(TasksAtOnce(), where, "jobs", lake).rows
        hl.enqueue("jobs", b"more")
        assert {table.rows for table in archive(TasksAtOnce(), where, "jobs", lake).tables} == {1}
