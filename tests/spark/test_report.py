"""The report's numbers, from handmade lifecycles and from a used queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.message import Outgoing
from heapline.spark.jobs.forecast import forecast
from heapline.spark.jobs.report import Bucket, Counted, Percentiles, Report, report
from heapline.spark.jobs.report_page import report_page
from tests.spark.conftest import MARKS
from tests.spark.lifecycle_rows import SCHEMA, at, lifecycle

pytestmark = MARKS


@pytest.fixture(scope="module")
def frames(spark: Any) -> dict[str, Any]:
    """200 messages, two per second: even ones of priority 1 wait 0 to 99 ms, odd ones of 9 ten times that."""
    rows = [lifecycle(i, 500 * i, priority=1 + i % 2 * 8, wait=(i // 2) * (1 + i % 2 * 9)) for i in range(200)]
    rows += [
        lifecycle(200, 100_000, wait=None, service=None, outcome="waiting"),
        lifecycle(201, 100_000, delay=1000, wait=30, retries=2, expiries=1, outcome="dead", reason="no <b>stock</b>"),
        lifecycle(202, 100_000, delay=1000, wait=70, retries=12, outcome="dead"),
        lifecycle(203, 100_000, delay=1000, wait=900_000),  # was moved to a later time
    ]
    fired = [("fired", 201, at(101_004)), ("fired", 202, at(101_006)), ("fired", 202, at(109_000))]
    events = spark.createDataFrame(
        [*fired, ("rescheduled", 203, at(100_500)), ("fired", 203, at(1_001_000)), ("fired", None, at(0))],
        "kind string, id bigint, timestamp timestamp",
    )
    keys = [b"tea", b"tea", "键".encode(), None] * 5
    messages = spark.createDataFrame([(key, at(0)) for key in keys], "key binary, enqueued_at timestamp")
    return {"lifecycles": spark.createDataFrame(rows, SCHEMA), "events": events, "messages": messages}


@pytest.fixture(scope="module")
def found(spark: Any, frames: dict[str, Any]) -> Report:
    return report(spark, None, "jobs", **frames)


def test_report_equals_the_lifecycles(found: Report) -> None:
    assert (found.messages, found.retries, found.lease_expiries) == (204, 14, 1)
    assert found.deliveries == 200 + 4 + 13 + 1
    of = {row.priority: row for row in found.priorities}
    assert [row.priority for row in found.priorities] == [None, 1, 5, 9]
    assert of[1].wait == Percentiles(100, 49, 89, 98, 99)
    assert of[9].wait == Percentiles(100, 490, 890, 980, 990)
    assert of[1].service == Percentiles(100, 10, 10, 10, 10)
    assert (of[5].messages, of[5].never_leased, of[5].wait.count) == (4, 1, 3)
    assert of[None].messages == 204
    assert set(found.outcomes) == {Counted("acked", 201), Counted("dead", 2), Counted("waiting", 1)}
    assert found.retried == (Counted("2", 1), Counted("10", 1))
    assert set(found.dead_reasons) == {Counted("no <b>stock</b>", 1), Counted("", 1)}
    assert found.keys == (Counted("tea", 10), Counted("键", 5))
    assert found.with_key == 15


def test_timer_delay_ignores_rescheduled_messages(spark: Any, frames: dict[str, Any], found: Report) -> None:
    delays = found.delays
    assert delays is not None
    assert (delays.to_ready.count, delays.to_ready.p50, delays.to_ready.max) == (2, 4, 6)
    assert (delays.to_leased.count, delays.to_leased.p50, delays.to_leased.max) == (2, 30, 70)
    without = report(spark, None, "jobs", lifecycles=frames["lifecycles"]).delays
    assert without is not None
    assert (without.to_ready.count, without.to_leased.count) == (0, 3)


def test_throughput_has_every_bucket_and_counts_older_messages(spark: Any) -> None:
    rows = [lifecycle(0, 0, wait=2500), lifecycle(1, 2100), lifecycle(2, 5900, wait=None, outcome="waiting")]
    found = report(spark, None, "jobs", lifecycles=spark.createDataFrame(rows, SCHEMA), since=at(2000), until=at(5950))
    start = int(at(0).timestamp() * 1000)
    assert found.messages == 2
    assert found.bucket_seconds == 1
    assert found.throughput == (
        Bucket(start + 2000, 1, 2), Bucket(start + 3000, 0, 0), Bucket(start + 4000, 0, 0), Bucket(start + 5000, 1, 0),
    )  # fmt: skip


def test_report_of_an_empty_topic(spark: Any) -> None:
    found = report(spark, None, "jobs", lifecycles=spark.createDataFrame([], SCHEMA))
    assert isinstance(found, Report)
    assert (found.messages, found.first_ms, found.throughput, found.delays) == (0, None, (), None)


def test_report_and_forecast_of_a_used_queue(spark: Any, tmp_path: Path) -> None:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", partitions=2, max_retries_default=1)
        bad = [i % 6 == 0 for i in range(30)]
        hl.enqueue_batch("jobs", [Outgoing(b"bad" if bad[i] else b"x", 1 + i % 2, key=f"k{i % 3}") for i in range(30)])
        hl.enqueue("jobs", b"later", delay=0.01)
        hl.enqueue("jobs", b"much later", delay=3600.0)
        done = failed = 0
        while done < 26 or failed < 10:
            for message in hl.pop("jobs", 10, wait=10.0):
                if message.payload == b"bad":
                    hl.nack(message, backoff=0.0, reason="no stock")
                    failed += 1
                else:
                    hl.ack(message)
                    done += 1
    where = {"path": str(tmp_path / "data")}
    found = report(spark, where, "jobs")
    assert found.messages == 32
    assert set(found.outcomes) == {Counted("acked", 26), Counted("dead", 5), Counted("delayed", 1)}
    assert found.dead_reasons == (Counted("no stock", 5),)
    assert (found.deliveries, found.retries) == (36, 5)
    assert sum(bucket.enqueued for bucket in found.throughput) == 32
    assert sum(bucket.done for bucket in found.throughput) == 31
    assert found.delays is not None
    assert found.delays.to_ready.count == 1
    assert {counted.what: counted.messages for counted in found.keys} == {"k0": 10, "k1": 10, "k2": 10}
    assert "k0" in report_page(found)
    ahead = forecast(spark, where, "jobs", workers=[1, 2])
    assert ahead.messages == 32
