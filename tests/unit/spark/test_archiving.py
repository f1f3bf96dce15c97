"""Archives that die, race and repeat themselves, on real journals and real Delta tables, without Spark."""

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
from heapline.errors import BadRequest
from heapline.spark.jobs.archive import ArchiveResult, archive
from heapline.spark.lake import layout
from heapline.spark.lake.claims import Claim, LakeMoved, OtherIncarnation
from heapline.spark.lake.layout import stored_columns
from heapline.spark.lake.sameness import OtherJournal
from heapline.spark.lake.tables import LakeTable, need_table
from heapline.spark.lake.upkeep import contents, drop, maintain
from heapline.spark.lake.writing import write_parts
from heapline.spark.log import DataLost
from heapline.spark.schema import arrow_schema, columns_of
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
    ends = need_table(lake, "events").kept("jobs")
    assert ends is not None
    assert events == [(p, offset) for p, end in ends.ends.items() for offset in range(end)]
    found = rows_in(lake, "messages")
    assert len(found) == len(set(found)) == messages
    assert need_table(lake, "messages").kept("jobs") == ends
    if result is not None:
        assert {dict(table.ends).__repr__() for table in result.tables} == {dict(ends.ends).__repr__()}


def test_archive_brings_what_is_new_and_only_that(hl: Any, tmp_path: Path, lake: Path) -> None:
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


def test_rounds_of_a_few_rows_make_the_same_lake(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 500)
    told: list[tuple[int, int]] = []
    result = run(tmp_path, round_rows=120, on_progress=lambda p: told.append((p.done, p.total)))
    assert result.commits == 2 * 5
    assert told[-1] == (1000, 1000)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    check_whole(lake, 500, result)


def test_each_commit_says_which_rows_it_brought(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 50)
    run(tmp_path)
    fill(hl, 50)
    run(tmp_path)
    newest, before = need_table(lake, "events").table.history(2)
    ranges, earlier = newest["heapline"]["jobs"]["ranges"], before["heapline"]["jobs"]["ranges"]
    assert {p: r[0] for p, r in ranges.items()} == {p: r[1] for p, r in earlier.items()}
    assert sum(end - start for start, end in ranges.values()) == 50


def test_driver_that_dies_between_files_and_commit_leaves_nothing_behind_in_the_lake(
    hl: Any, tmp_path: Path, lake: Path
) -> None:
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


def test_driver_that_dies_after_one_views_commit_goes_on_with_the_other(
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


def test_second_archive_that_commits_first_takes_nothing_twice(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 200)
    raced = []

    def overtake() -> None:
        if not raced:
            raced.append(run(tmp_path, round_rows=150))  # less in a round, so that the ranges differ

    result = run(tmp_path, TasksAtOnce(after=overtake))
    assert result.conflicts == 1
    assert (raced[0].rows, result.rows) == (400, 0)
    check_whole(lake, 200, result)


def test_archive_that_was_overtaken_halfway_brings_the_rest(hl: Any, tmp_path: Path, lake: Path) -> None:
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


def test_archives_that_race_bring_every_row_once(hl: Any, tmp_path: Path, lake: Path) -> None:
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


def test_delta_refuses_the_second_of_two_commits_upon_the_same_version(hl: Any, tmp_path: Path, lake: Path) -> None:
    fill(hl, 20)
    run(tmp_path)
    one, other = need_table(lake, "events"), need_table(lake, "events")
    kept = one.kept("jobs")
    assert kept is not None
    claim = Claim(kept.incarnation, {p: (end, end + 1) for p, end in kept.ends.items()})
    one.commit({"jobs": claim}, [])
    with pytest.raises(LakeMoved):
        other.commit({"jobs": claim}, [])


def test_rows_that_were_reclaimed_before_they_were_archived_are_told_and_may_be_left_out(
    hl: Any, tmp_path: Path, lake: Path
) -> None:
    fill(hl, 20)
    run(tmp_path)
    reclaim(hl)
    with pytest.raises(DataLost, match=r"are missing.*--accept-loss"):
        run(tmp_path)
    result = run(tmp_path, fail_on_loss=False)
    assert result.rows > 0
    [commit] = need_table(lake, "events").table.history(1)
    assert commit["heapline"]["jobs"]["lost"]
    found = rows_in(lake, "events")
    assert len(found) == len(set(found))
    assert run(tmp_path).rows == 0


def test_topic_that_was_made_again_is_refused_until_its_rows_are_dropped(hl: Any, tmp_path: Path, lake: Path) -> None:
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
    with pytest.raises(BadRequest, match="nothing of topic 'other'"):
        drop(lake, "other")


def test_directory_that_was_begun_anew_is_not_taken_for_the_old_one(tmp_path: Path, lake: Path) -> None:
    for count in (20, 50):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
            hl.create_topic("jobs", partitions=1, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
            fill(hl, count)
            if count == 20:
                run(tmp_path)
                assert run(tmp_path).rows == 0
            else:
                with pytest.raises(OtherJournal, match="begun anew"):
                    run(tmp_path)
    assert len(rows_in(lake, "events")) == 20


def test_upkeep_joins_files_and_drops_days_and_the_lake_still_knows_how_far_it_goes(
    hl: Any, tmp_path: Path, lake: Path
) -> None:
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
        table = need_table(lake, view).table
        table.create_checkpoint()
        table.cleanup_metadata()
    assert [(t.topic, t.rows, t.ends) for t in contents(lake)] == [(t.topic, 0, t.ends) for t in before]
    assert run(tmp_path).rows == 0


def test_lake_of_an_older_version_gets_the_columns_that_its_view_has_got_since(
    hl: Any, tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tuple(column for column in layout.VIEWS["events"] if column.name != "details")
    monkeypatch.setitem(layout.VIEWS, "events", short)
    fill(hl, 20)
    run(tmp_path, views=("events",))
    monkeypatch.undo()
    hl.ack(hl.pop("jobs", 5))
    run(tmp_path, views=("events",))
    found = need_table(lake, "events").table.to_pyarrow_table()
    assert (found.num_rows, found["details"].type) == (30, "string")


def test_killed_archive_leaves_a_lake_that_another_goes_on_with(hl: Any, tmp_path: Path, lake: Path) -> None:
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
    killed.kill()  # in the middle of its fourth round, wherever it is
    killed.wait()
    killed.stdout.close()
    assert 0 < len(rows_in(lake, "events")) < 400
    check_whole(lake, 400, run(tmp_path))


def test_topics_of_other_namespaces_lie_apart_and_a_pattern_takes_both(hl: Any, tmp_path: Path, lake: Path) -> None:
    hl.create_topic("billing/jobs", partitions=1)
    fill(hl, 20)
    fill(hl, 30, "billing/jobs")
    run(tmp_path, topic=None, pattern=".*jobs")
    table = need_table(lake, "messages")
    assert {(f.topic, f.rows) for f in table.files()} == {("jobs", 20), ("billing/jobs", 30)}
    folders = {str(path.relative_to(lake / "messages").parent.parent) for path in lake.rglob("messages/**/*.parquet")}
    assert folders == {"namespace=default/topic=jobs", "namespace=billing/topic=billing%2Fjobs"}


def test_task_that_fails_while_it_writes_leaves_no_file(tmp_path: Path) -> None:
    schema = arrow_schema(columns_of("events"))

    def batches() -> Iterator[Any]:
        column = {"int32": 1, "int64": 1, "string": "x", "bool": True}
        yield pa.RecordBatch.from_pylist([{f.name: column.get(str(f.type), datetime.now(UTC)) for f in schema}], schema)
        raise Died

    with pytest.raises(Died):
        write_parts(str(tmp_path), "events", "jobs", (batch.drop_columns(["topic"]) for batch in batches()))
    assert list(tmp_path.rglob("*.parquet")) == []


def test_rows_of_several_days_go_to_a_file_each_and_every_file_says_what_is_in_it(tmp_path: Path) -> None:
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


def test_what_cannot_be_archived_is_told_and_nothing_is_made(hl: Any, tmp_path: Path, lake: Path) -> None:
    for wrong, told in [
        ({"topic": None}, "say which topics"),
        ({"pattern": "x"}, "say which topics"),
        ({"views": ("messages", "messages")}, "views are some of messages, events"),
        ({"lake_dir": "s3://bucket/lake"}, "a directory that driver and executors share"),
        ({"round_rows": 0}, "round_rows"),
    ]:
        with pytest.raises(BadRequest, match=told):
            run(tmp_path, **wrong)
    assert not lake.exists()
