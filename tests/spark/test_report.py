"""The report's figures, from lifecycles made by hand and from a queue that was worked on."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.spark.jobs.report import Bucket, Counted, Percentiles, Report, report
from tests.spark.conftest import MARKS
from tests.spark.lifecycle_rows import SCHEMA, at, lifecycle

pytestmark = MARKS


@pytest.fixture(scope="module")
def frames(spark: Any) -> dict[str, Any]:
    """200 messages, two a second: even ones of priority 1 wait 0 to 99 ms, odd ones of 9 ten times that."""
    rows = [lifecycle(i, 500 * i, priority=1 + i % 2 * 8, wait=(i // 2) * (1 + i % 2 * 9)) for i in range(200)]
    rows += [
        lifecycle(200, 100_000, wait=None, service=None, outcome="waiting"),
        lifecycle(201, 100_000, delay=1000, wait=30, retries=2, expiries=1, outcome="dead", reason="no <b>stock</b>"),
        lifecycle(202, 100_000, delay=1000, wait=70, retries=12, outcome="dead"),
        lifecycle(203, 100_000, delay=1000, wait=900_000),  # was moved to a later time
    ]
    fired = [("fired", 201, at(101_004)), ("fired", 202, at(101_006)), ("fired", 202, at(109_000))]
    events = spark.createDataFrame(
        [*fired, ("rescheduled", 203, at(100_500)), ("fired", 203, at(1_001_000)), ("fired_count", None, at(0))],
        "kind string, id bigint, timestamp timestamp",
    )
    keys = [b"tea", b"tea", "键".encode(), None] * 5
    messages = spark.createDataFrame([(key, at(0)) for key in keys], "key binary, enqueued_at timestamp")
    return {"lifecycles": spark.createDataFrame(rows, SCHEMA), "events": events, "messages": messages}


@pytest.fixture(scope="module")
def found(spark: Any, frames: dict[str, Any]) -> Report:
    return report(spark, None, "jobs", **frames)


def test_report_counts_what_the_lifecycles_say(found: Report) -> None:
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


def test_delay_of_the_scheduler_is_counted_once_and_not_for_those_that_were_moved(
    spark: Any, frames: dict[str, Any], found: Report
) -> None:
    delays = found.delays
    assert delays is not None
    assert (delays.to_ready.count, delays.to_ready.p50, delays.to_ready.max) == (2, 4, 6)
    assert (delays.to_leased.count, delays.to_leased.p50, delays.to_leased.max) == (2, 30, 70)
    without = report(spark, None, "jobs", lifecycles=frames["lifecycles"]).delays
    assert without is not None
    assert (without.to_ready.count, without.to_leased.count) == (0, 3)


def test_throughput_has_every_bucket_and_counts_what_was_enqueued_before(spark: Any) -> None:
    rows = [lifecycle(0, 0, wait=2500), lifecycle(1, 2100), lifecycle(2, 5900, wait=None, outcome="waiting")]
    found = report(spark, None, "jobs", lifecycles=spark.createDataFrame(rows, SCHEMA), since=at(2000), until=at(5950))
    start = int(at(0).timestamp() * 1000)
    assert found.messages == 2
    assert found.bucket_seconds == 1
    assert found.throughput == (
        Bucket(start + 2000, 1, 2), Bucket(start + 3000, 0, 0), Bucket(start + 4000, 0, 0), Bucket(start + 5000, 1, 0),
    )  # fmt: skip


def test_nothing_is_a_report_too(spark: Any) -> None:
    found = report(spark, None, "jobs", lifecycles=spark.createDataFrame([], SCHEMA))
    assert isinstance(found, Report)
    assert (found.messages, found.first_ms, found.throughput, found.delays) == (0, None, (), None)
