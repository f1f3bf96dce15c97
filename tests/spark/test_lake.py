"""The lake on a real Spark: archived by tasks, joined with the live journal, read by other Delta readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import BadRequest
from heapline.spark.jobs.archive import archive
from heapline.spark.jobs.lake import lake
from heapline.spark.lake.maintenance import maintain
from heapline.spark.topic_log import DataLost
from tests.spark.conftest import MARKS
from tests.unit.spark.lake_rig import fill, reclaim

pytestmark = MARKS


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[Any]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as broker:
        broker.create_topic("jobs", partitions=3, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield broker


@pytest.fixture
def where(tmp_path: Path) -> dict[str, str]:
    return {"path": str(tmp_path / "data")}


def places(df: Any) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in df.select("partition", "offset").collect())


def test_lake_joins_archive_and_journal_while_rows_are_archived(
    spark: Any, hl: Any, where: dict[str, str], tmp_path: Path
) -> None:
    at = tmp_path / "lake"
    fill(hl, 600)
    hl.ack(hl.pop("jobs", 100))
    assert archive(spark, where, "jobs", at, round_rows=500).rows == 600 + 800
    fill(hl, 200, first=600)
    events, messages = (lake(spark, at, where, "jobs", view) for view in ("events", "messages"))
    log = spark.read.format("heapline").options(**where, subscribe="jobs", includeHeaders="true").load()
    assert messages.columns == [*log.columns, "namespace", "date"]
    whole = places(events)
    assert len(whole) == len(set(whole)) == 1000
    assert messages.selectExpr("count(*)", "sum(CAST(CAST(value AS STRING) AS INT))").collect() == [
        (800, sum(range(800)))
    ]
    fill(hl, 50, first=800)
    archive(spark, where, "jobs", at)
    maintain(at)
    assert places(events) == whole  # fixed when it was created
    assert len(places(lake(spark, at, view="events", topic="jobs"))) == 1050
    days = lake(spark, at, where, "jobs").select("namespace", "date").distinct().collect()
    assert [(day.namespace, str(day.date)) for day in days] == [("default", str(hl_day(messages)))]


def hl_day(messages: Any) -> str:
    return str(messages.selectExpr("min(enqueued_at) AS day").collect()[0].day.date())


def test_gap_between_lake_and_journal_is_data_loss(spark: Any, hl: Any, where: dict[str, str], tmp_path: Path) -> None:
    fill(hl, 10)
    archive(spark, where, "jobs", tmp_path / "lake", views=("messages",))
    reclaim(hl)
    with pytest.raises(DataLost, match="are missing"):
        lake(spark, tmp_path / "lake", where, "jobs")
    assert lake(spark, tmp_path / "lake", topic="jobs").count() == 10
    with pytest.raises(BadRequest, match="no lake with events exists"):
        lake(spark, tmp_path / "lake", topic="jobs", view="events")


def test_duckdb_polars_and_deltalake_read_the_lake_like_spark(
    spark: Any, hl: Any, where: dict[str, str], tmp_path: Path
) -> None:
    import duckdb
    import polars
    from deltalake import DeltaTable

    hl.create_topic("billing/jobs", partitions=1)
    fill(hl, 300)
    fill(hl, 200, "billing/jobs", first=300)
    at = tmp_path / "lake"
    archive(spark, where, ["jobs", "billing/jobs"], at)
    query = "topic, count(*) AS n, sum(priority) AS priorities, sum(octet_length(value)) AS bytes"
    rows = lake(spark, at).groupBy("topic").agg({"*": "count", "priority": "sum"}).collect()
    expected = sorted((row[0], row["count(1)"], row["sum(priority)"]) for row in rows)
    assert [row[:2] for row in expected] == [("billing/jobs", 200), ("jobs", 300)]
    table = DeltaTable(str(at / "messages"))
    duck = duckdb.connect()
    duck.register("messages", table.to_pyarrow_dataset())
    found = duck.sql(f"SELECT {query} FROM messages GROUP BY topic ORDER BY topic").fetchall()
    assert [row[:3] for row in found] == expected
    assert [row[3] for row in found] == [1200, 1800]
    pl = polars.scan_delta(str(at / "messages")).group_by("topic").agg(polars.len(), polars.col("priority").sum())
    assert sorted(pl.collect().rows()) == expected
    files = polars.read_parquet(table.file_uris(), hive_partitioning=True)
    assert files.height == table.count() == 500
