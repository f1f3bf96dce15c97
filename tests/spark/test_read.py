"""The format `heapline` in a real Spark: found automatically, read in tasks, stable while the engine works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

import heapline
from heapline.contract.message import Outgoing
from heapline.spark.schema import VIEWS, arrow_schema, columns_of
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS

pytestmark = MARKS
Load = Callable[..., Any]


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[Any]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as broker:
        broker.create_topic("jobs", partitions=3, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield broker


def fill(hl: Any, count: int, size: int = 200) -> None:
    for first in range(0, count, 500):
        numbers = range(first, min(first + 500, count))
        hl.enqueue_batch("jobs", [Outgoing(b"%06d" % i + bytes(size), i % 7, key=f"k{i % 31}") for i in numbers])


def exact(df: Any) -> pa.Table:
    return df.orderBy("partition", "offset").toArrow()


@pytest.mark.parametrize("view", VIEWS)
def test_view_schema_equals_sparks(load: Load, hl: Any, view: str) -> None:
    df = load(view=view, includeHeaders="true")
    assert to_arrow_schema(df.schema, timezone="UTC").equals(arrow_schema(columns_of(view, headers=True)))


def test_range_is_stable_while_the_engine_works_and_restarts(load: Load, hl: Any, tmp_path: Path) -> None:
    fill(hl, 6000, 400)
    df = load(minPartitions="3")
    before = exact(df)
    assert before.num_rows == 6000
    assert [v[:6] for v in sorted(before["value"].to_pylist())] == [b"%06d" % i for i in range(6000)]
    while got := hl.pop("jobs", 1000):
        hl.ack(got)
    for _ in range(2):
        fill(hl, 500, 400)
        hl.snapshot("jobs")
    assert exact(df).equals(before)
    hl.close()
    with heapline.open_sync(tmp_path / "data") as again:
        fill(again, 500)
        assert exact(df).equals(before)
        assert load().count() == 7500


def test_both_views_work_in_sql_and_join(spark: Any, load: Load, hl: Any, tmp_path: Path) -> None:
    fill(hl, 700)
    hl.ack(hl.pop("jobs", 100))
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW happened USING heapline "
        f"OPTIONS (path '{tmp_path}/data', subscribe 'jobs', view 'events')"
    )
    load().createOrReplaceTempView("sent")
    kinds = spark.sql("SELECT kind, count(*) AS n, count(DISTINCT id) AS ids FROM happened GROUP BY kind").collect()
    assert {row.kind: (row.n, row.ids) for row in kinds} == {
        "enqueued": (700, 700), "leased": (100, 100), "acked": (100, 100),
    }  # fmt: skip
    left = spark.sql("SELECT sent.id FROM sent ANTI JOIN happened ON happened.id = sent.id AND happened.kind = 'acked'")
    assert left.count() == 600


def test_pushdown_does_not_change_results(load: Load, hl: Any) -> None:
    fill(hl, 3000)
    whole = exact(load(columns="partition,offset,timestamp")).to_pylist()
    middle = sorted(row["timestamp"] for row in whole)[1500]
    where = f"partition IN (0, 2) AND offset >= 100 AND offset < 700 AND timestamp >= TIMESTAMP'{middle}'"
    narrow = load(columns="partition,offset,timestamp", pushdown="true", maxPartitionBytes="200000").where(where)
    assert 0 < len(found := exact(narrow).to_pylist()) < 1500
    assert found == [
        row for row in whole
        if row["partition"] in (0, 2) and 100 <= row["offset"] < 700 and row["timestamp"] >= middle
    ]  # fmt: skip
    assert narrow.rdd.getNumPartitions() < load(maxPartitionBytes="200000").rdd.getNumPartitions()


def test_empty_topic_has_no_rows_and_unknown_options_are_rejected(load: Load, hl: Any) -> None:
    assert load().collect() == []
    with pytest.raises(Exception, match="unknown option 'startingofsets' for reading"):
        load(startingOfsets="earliest").collect()


def test_restarted_stream_returns_every_message_once(load: Load, hl: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    sizes: list[int] = []

    def keep(batch: Any, number: int) -> None:
        ids = [row.id for row in batch.select("id").collect()]
        seen.extend(ids)
        sizes.append(len(ids))

    def run() -> None:
        df = load(stream=True, startingOffsets="earliest", maxOffsetsPerTrigger="400", columns="id,value")
        writing = df.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writing.trigger(availableNow=True).start()
        query.awaitTermination(120)
        assert query.exception() is None

    fill(hl, 1000)
    run()
    assert sizes == [400, 400, 200]
    hl.ack(hl.pop("jobs", 50))
    fill(hl, 300)
    run()
    assert len(seen) == len(set(seen)) == 1300


async def test_server_returns_the_rows_of_its_directory_and_hides_the_key(
    spark: Any, load: Load, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    async with Process(data) as server:
        key_file = data / "admin.key"
        key = key_file.read_text().strip()
        async with heapline.connect(server.target, api_key=key) as far:
            await far.create_topic("jobs", partitions=2)
            await far.enqueue_batch("jobs", [Outgoing(b"%d" % i, i, key=f"k{i}") for i in range(900)])
            await far.ack(await far.pop("jobs", 100))

        def there(**options: str) -> Any:
            given = {"subscribe": "jobs", "heapline.url": server.target, "includeHeaders": "true", **options}
            return spark.read.format("heapline").options(**given).load()

        for view in ("messages", "events"):
            near = await asyncio.to_thread(lambda view=view: exact(load(view=view, includeHeaders="true")))
            named = there(view=view, **{"heapline.api_key": key})
            assert (await asyncio.to_thread(exact, named)).equals(near)
        filed = there(**{"heapline.api_key_file": str(key_file)})
        assert await asyncio.to_thread(filed.count) == 900
        await asyncio.to_thread(named.explain, "extended")
        with pytest.raises(Exception, match="Unauthenticated"):
            await asyncio.to_thread(there(**{"heapline.api_key": f"{key[:-4]}0000"}).count)
        assert key not in "".join(capfd.readouterr())
