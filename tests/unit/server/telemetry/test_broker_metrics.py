"""Rows of metrics: the number of series is bounded, and no count is lost."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from heapline.core.latency import Latency
from heapline.engine.metrics_source import GroupMeasures, Measures, PartitionMeasures, TopicMeasures
from heapline.server.telemetry.broker_metrics import (
    _TOTALS,
    GROUPS_MAX,
    OTHER,
    PARTITIONS_MAX,
    Rows,
    Value,
    WalBytes,
    add_topics,
)
from heapline.server.telemetry.metrics import expose

TOTALS = [*_TOTALS.values(), "bytes_written"]


def topic(
    name: str, partitions: int = 1, *, ready: int = 1, age_ms: int = 0, written: int = 10, groups: int = 0
) -> TopicMeasures:
    latency = Latency()
    latency.add(0.0015)
    return TopicMeasures(
        name, True, False,
        [PartitionMeasures(n, ready, 0, 2, 0, 0, False, age_ms, 5) for n in range(partitions)],
        dict.fromkeys(TOTALS, written), dict.fromkeys(("enqueue", "pop", "commit", "late", "fired"), latency.tally()),
        100, 1000, 1 << 20, 1, 64, 0, [GroupMeasures(f"g{n}", 5, 2, 1, 0) for n in range(groups)],
    )  # fmt: skip


def rows_of(*topics: TopicMeasures, topics_max: int = 200) -> dict[str, dict[tuple[str, ...], Value]]:
    rows = Rows()
    add_topics(rows, Measures(list(topics), None, 0), topics_max)
    return rows.by_name


def test_topics_beyond_the_limit_are_summed_under_other() -> None:
    reported = rows_of(*(topic(f"t{i}", age_ms=1000 * i) for i in range(5)), topics_max=2)
    assert reported["inflight"] == {("t0",): 2, ("t1",): 2, (OTHER,): 6}
    assert reported["backlog"] == {("t0", "0"): 1, ("t1", "0"): 1, (OTHER, OTHER): 3}
    assert reported["enqueued_total"][OTHER,] == 30
    assert sum(reported["enqueue_latency_ms"][OTHER,].counts) == 3  # type: ignore[union-attr]
    assert reported["oldest_ready_age_seconds"][OTHER, OTHER] == 4  # the maximum, not the sum
    assert reported["topics"] == {(): 5}


def test_partitions_beyond_the_limit_share_one_series() -> None:
    reported = rows_of(topic("wide", PARTITIONS_MAX + 7, ready=3))["backlog"]
    assert len(reported) == PARTITIONS_MAX + 1
    assert reported["wide", OTHER] == 21


def test_groups_beyond_the_limit_share_one_series() -> None:
    reported = rows_of(topic("followed", groups=GROUPS_MAX + 3))["group_lag"]
    assert len(reported) == GROUPS_MAX + 1
    assert (reported["followed", "g0"], reported["followed", OTHER]) == (5, 15)


def test_written_bytes_never_decrease() -> None:
    wal = WalBytes()
    assert wal.total([topic("a", written=10), topic("b", written=5)]) == 15
    assert wal.total([topic("a", written=12)]) == 17  # b was deleted
    assert wal.total([topic("a", written=12), topic("b", written=1)]) == 18  # and created again
    assert wal.total([topic("a", written=3)]) == 21  # a too, between two reads


def test_exposition_exceeds_opentelemetrys_default_series_limit() -> None:
    rows = Rows()
    add_topics(rows, Measures([topic(f"t{i}", 26) for i in range(100)], None, 0))
    families = {f.name: f for f in text_string_to_metric_families(expose(rows).decode())}
    backlog = families["backlog"].samples
    assert len(backlog) == 2600
    assert len({tuple(sorted(s.labels.items())) for s in backlog}) == 2600
    assert {tuple(sorted(s.labels)) for s in backlog} == {("partition", "topic")}
    buckets = {s.labels["le"]: s.value for s in families["enqueue_latency_ms"].samples
               if s.name.endswith("_bucket") and s.labels["topic"] == "t7"}  # fmt: skip
    assert buckets["1.0"] == 0
    assert buckets["2.0"] == buckets["+Inf"] == 1
