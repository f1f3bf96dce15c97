"""The newest figures of streaming queries, and how Prometheus and OpenTelemetry get them when they ask.

Names and labels are made as the server's (server/observing/families.py). A query is called by its name; one without is
called by its id, and forgotten when it ends, so that there are never more series than queries. What a source or a sink
says in words of its own is left out. Knows nothing of Spark but how it spells progress.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

QUERY = "query"


class Family(NamedTuple):
    name: str  # exactly as it is exposed
    kind: Literal["counter", "gauge"]
    help: str


FAMILIES = (
    Family("pipeline_query_active", "gauge", "1 while the query runs."),
    Family("pipeline_query_failures_total", "counter", "Times that the query ended with an error."),
    Family("pipeline_batches_total", "counter", "Micro-batches done."),
    Family("pipeline_rows_read_total", "counter", "Rows read by the query."),
    Family("pipeline_rows_written_total", "counter", "Rows written, where the sink tells."),
    Family("pipeline_read_rows_per_second", "gauge", "Rows that arrived a second, up to the last batch."),
    Family("pipeline_done_rows_per_second", "gauge", "Rows a second of the last batch."),
    Family("pipeline_batch_duration_ms", "gauge", "How long the last batch took."),
    Family("pipeline_batch_ms_total", "counter", "How long all batches took."),
    Family("pipeline_lag_rows", "gauge", "Rows of the log behind the last batch: how far the query is behind."),
    Family("pipeline_progress_timestamp_seconds", "gauge", "When the query last told of a batch, or of having none."),
)
BY_NAME = {family.name: family for family in FAMILIES}


class Readings:
    """The newest figures, by query. Told by one thread, asked by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}  # by query, by family
        self._names: dict[str, str | None] = {}  # of queries, by their id

    def started(self, query_id: str, name: str | None) -> None:
        with self._lock:
            self._names[query_id] = name
            self._of(query_id)["pipeline_query_active"] = 1

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """As Spark spells a StreamingQueryProgress."""
        with self._lock:
            query_id = str(progress["id"])
            self._names.setdefault(query_id, progress.get("name"))
            values = self._of(query_id)
            took = float(progress.get("batchDuration") or 0)
            self._add(values, "pipeline_batches_total", 1)
            self._add(values, "pipeline_rows_read_total", progress.get("numInputRows"))
            self._add(values, "pipeline_rows_written_total", (progress.get("sink") or {}).get("numOutputRows"))
            self._add(values, "pipeline_batch_ms_total", took)
            values["pipeline_batch_duration_ms"] = took
            self._set(values, "pipeline_read_rows_per_second", progress.get("inputRowsPerSecond"))
            self._set(values, "pipeline_done_rows_per_second", progress.get("processedRowsPerSecond"))
            lags = [lag_of(source) for source in progress.get("sources") or ()]
            self._set(values, "pipeline_lag_rows", sum(lag for lag in lags if lag is not None) if lags else None)
            values["pipeline_query_active"] = 1
            values["pipeline_progress_timestamp_seconds"] = time.time()

    def idle(self, query_id: str) -> None:
        with self._lock:
            values = self._of(query_id)
            values["pipeline_read_rows_per_second"] = values["pipeline_done_rows_per_second"] = 0.0
            values["pipeline_progress_timestamp_seconds"] = time.time()

    def ended(self, query_id: str, failed: bool) -> None:
        with self._lock:
            if self._names.get(query_id) is None:
                self._values.pop(query_id, None)  # it comes back under another id, if at all
            else:
                values = self._of(query_id)
                values["pipeline_query_active"] = 0
                values["pipeline_read_rows_per_second"] = values["pipeline_done_rows_per_second"] = 0.0
                self._add(values, "pipeline_query_failures_total", int(failed))
            self._names.pop(query_id, None)

    def round_done(self, name: str, done: int, total: int) -> None:
        """Of a job that goes in rounds of its own instead of micro-batches, such as the archive."""
        with self._lock:
            values = self._of(name)
            self._add(values, "pipeline_batches_total", 1)
            values["pipeline_query_active"] = 1
            values["pipeline_rows_read_total"], values["pipeline_lag_rows"] = float(done), float(total - done)
            values["pipeline_progress_timestamp_seconds"] = time.time()

    def _of(self, query_id: str) -> dict[str, float]:
        return self._values.setdefault(self._names.get(query_id) or query_id, {"pipeline_query_failures_total": 0.0})

    @staticmethod
    def _add(values: dict[str, float], name: str, more: Any) -> None:
        if isinstance(more, int | float) and more >= 0:  # a sink that cannot count says -1
            values[name] = values.get(name, 0.0) + more

    @staticmethod
    def _set(values: dict[str, float], name: str, value: Any) -> None:
        if isinstance(value, int | float) and value == value:  # Spark says NaN where there is no time between batches
            values[name] = float(value)

    def of(self, family: str) -> list[tuple[str, float]]:
        """(query, value)"""
        with self._lock:
            return [(query, values[family]) for query, values in self._values.items() if family in values]


def lag_of(source: Mapping[str, Any]) -> int | None:
    """Rows from the end of the last batch to the end of the log; None where offsets are not ours, nor numbers.

    >>> lag_of({"endOffset": '{"jobs": {"0": 4, "incarnation": 9}}', "latestOffset": '{"jobs": {"0": 6}}'})
    2
    >>> lag_of({"endOffset": "3", "latestOffset": "5"}), lag_of({"endOffset": "x", "latestOffset": None})
    (2, None)
    """
    end, latest = (_offsets(source.get(name)) for name in ("endOffset", "latestOffset"))
    if end is None or latest is None:
        return None
    return sum(max(offset - end.get(place, offset), 0) for place, offset in latest.items())


def _offsets(told: Any) -> dict[tuple[str, str], int] | None:
    try:
        found = json.loads(told) if isinstance(told, str) else told
    except ValueError:
        return None
    if isinstance(found, int):
        return {("", ""): found}
    if not isinstance(found, dict) or not all(isinstance(parts, dict) for parts in found.values()):
        return None
    return {
        (topic, partition): offset
        for topic, parts in found.items()
        for partition, offset in parts.items()
        if partition.isdigit() and isinstance(offset, int)
    }


class PrometheusReadings:
    """A collector of prometheus_client: asks for the figures when it is asked."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in FAMILIES:
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            made = make(family.name, family.help, labels=[QUERY])
            for query, value in self._readings.of(family.name):
                made.add_metric([query], value)
            yield made


def observe(readings: Readings, meter: Any) -> None:
    """The same as OpenTelemetry's observable instruments."""
    from opentelemetry.metrics import CallbackOptions, Observation

    def asked(name: str) -> Any:
        def tell(_: CallbackOptions) -> list[Observation]:
            return [Observation(value, {QUERY: query}) for query, value in readings.of(name)]

        return tell

    for family in FAMILIES:
        make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
        make(family.name, callbacks=[asked(family.name)], description=family.help)
