"""Metrics of query progress, and what Prometheus and OpenTelemetry receive."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from heapline.contract.errors import BadRequest
from heapline.spark.metrics import FAMILIES, PrometheusCollector, QueryMetrics, observe


def progress(query: str = "q1", name: str | None = "orders", rows: int = 10, **more: Any) -> dict[str, Any]:
    source = {
        "endOffset": '{"jobs": {"0": 5, "1": 7, "incarnation": 123}}',
        "latestOffset": '{"jobs": {"0": 8, "1": 7, "incarnation": 123}, "new": {"0": 4}}',
    }
    return {
        "id": query, "name": name, "numInputRows": rows, "inputRowsPerSecond": 5.0, "processedRowsPerSecond": 50.0,
        "batchDuration": 200, "sink": {"numOutputRows": -1}, "sources": [source], **more,
    }  # fmt: skip


def exposed(readings: QueryMetrics) -> dict[str, dict[str, float]]:
    return {family.name: dict(found) for family in FAMILIES if (found := readings.of(family.name))}


def test_metrics_sum_counters_and_keep_the_latest_gauges() -> None:
    readings = QueryMetrics()
    readings.started("q1", "orders")
    readings.progressed(progress())
    readings.progressed(progress(rows=7, batchDuration=100, processedRowsPerSecond=float("nan")))
    found = {name: of["orders"] for name, of in exposed(readings).items()}
    assert found.pop("pipeline_progress_timestamp_seconds") > 1e9
    assert found == {
        "pipeline_query_active": 1, "pipeline_query_failures_total": 0, "pipeline_batches_total": 2,
        "pipeline_rows_read_total": 17, "pipeline_read_rows_per_second": 5, "pipeline_done_rows_per_second": 50,
        "pipeline_batch_duration_ms": 100, "pipeline_batch_ms_total": 300, "pipeline_lag_rows": 3,
    }  # fmt: skip


def test_restarted_query_continues_its_counters() -> None:
    readings = QueryMetrics()
    for query in ("q1", "q2"):
        readings.started(query, "orders")
        readings.progressed(progress(query))
        readings.ended(query, failed=query == "q1")
    found = exposed(readings)
    assert found["pipeline_query_failures_total"] == {"orders": 1}
    assert found["pipeline_batches_total"] == {"orders": 2}
    assert found["pipeline_query_active"] == {"orders": 0}


def test_unnamed_query_is_removed_when_it_ends() -> None:
    readings = QueryMetrics()
    readings.started("q1", None)
    readings.progressed(progress("q1", None))
    assert exposed(readings)["pipeline_batches_total"] == {"q1": 1}
    readings.ended("q1", failed=True)
    assert exposed(readings) == {}


def test_job_with_rounds_has_metrics() -> None:
    readings = QueryMetrics()
    readings.round_done("archive", 100, 250)
    readings.round_done("archive", 250, 250)
    found = exposed(readings)
    assert found["pipeline_batches_total"] == {"archive": 2}
    assert found["pipeline_rows_read_total"] == {"archive": 250}
    assert found["pipeline_lag_rows"] == {"archive": 0}


def test_offsets_of_other_sources_are_ignored() -> None:
    readings = QueryMetrics()
    readings.progressed(progress(sources=[{"endOffset": "a", "latestOffset": None}, {}], sink=None, numInputRows=None))
    assert exposed(readings)["pipeline_lag_rows"] == {"orders": 0}
    assert "pipeline_rows_read_total" not in exposed(readings)


def test_prometheus_and_opentelemetry_expose_the_same_families() -> None:
    readings = QueryMetrics()
    readings.started("q1", 'a"b')
    readings.progressed(progress(name='a"b'))
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(readings))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert set(values) == {family.name for family in FAMILIES} - {"pipeline_rows_written_total"}
    assert 'pipeline_lag_rows{query="a\\"b"} 3.0' in lines
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    observe(readings, provider.get_meter("test"))
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    assert {m.name: m.data.data_points[0].value for m in metrics} == values  # type: ignore[union-attr]
    provider.shutdown()


class Streams:
    """The listeners of a session."""

    def __init__(self) -> None:
        self.streams = self
        self.listeners: list[Any] = []

    def addListener(self, listener: Any) -> None:
        self.listeners.append(listener)

    def removeListener(self, listener: Any) -> None:
        self.listeners.remove(listener)


def test_watch_serves_prometheus_until_closed() -> None:
    pytest.importorskip("pyspark")
    from heapline.spark.metrics import watch

    session = Streams()
    found = watch(session, 0)
    (listener,) = session.listeners
    found.readings.progressed(progress())
    assert found.port
    with urllib.request.urlopen(f"http://127.0.0.1:{found.port}/metrics", timeout=10) as answer:
        assert b'pipeline_rows_read_total{query="orders"} 10.0' in answer.read()
    with pytest.raises(BadRequest, match="cannot listen on port"):
        watch(session, found.port)
    assert session.listeners == [listener]
    found.close()
    assert session.listeners == []
