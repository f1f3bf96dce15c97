"""Metrics of streaming queries and jobs, for Prometheus and OpenTelemetry.

    from heapline.spark.metrics import watch

    watch(spark, port=9464)       # http://127.0.0.1:9464/metrics

Runs in the driver. Names and labels follow the server's metrics (server/telemetry/broker_metrics.py). The label is the
query's name. A query without a name is labeled by its id and removed when it ends, so there are never more series than
queries. Until `watch` is called, nothing here needs Spark.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from heapline.contract.errors import BadRequest

QUERY = "query"


class Family(NamedTuple):
    name: str  # exactly as it is exposed
    kind: Literal["counter", "gauge"]
    help: str


FAMILIES = (
    Family("pipeline_query_active", "gauge", "1 while the query runs."),
    Family("pipeline_query_failures_total", "counter", "Times that the query ended with an error."),
    Family("pipeline_batches_total", "counter", "Completed micro-batches."),
    Family("pipeline_rows_read_total", "counter", "Rows read by the query."),
    Family("pipeline_rows_written_total", "counter", "Rows written, if the sink reports them."),
    Family("pipeline_read_rows_per_second", "gauge", "Rows that arrived per second, up to the last batch."),
    Family("pipeline_done_rows_per_second", "gauge", "Rows processed per second in the last batch."),
    Family("pipeline_batch_duration_ms", "gauge", "Duration of the last batch."),
    Family("pipeline_batch_ms_total", "counter", "Duration of all batches."),
    Family("pipeline_lag_rows", "gauge", "Rows of the log after the last batch: how far the query is behind."),
    Family("pipeline_progress_timestamp_seconds", "gauge", "When the query last reported a batch, or that it is idle."),
)
_STILL = {"pipeline_read_rows_per_second": 0.0, "pipeline_done_rows_per_second": 0.0}


class QueryMetrics:
    """The latest metrics of each query. One thread writes them, others read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}  # by query, by family
        self._names: dict[str, str | None] = {}  # of queries, by their id

    def started(self, query_id: str, name: str | None) -> None:
        with self._lock:
            self._names[query_id] = name
            self._of(query_id)["pipeline_query_active"] = 1

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Record a StreamingQueryProgress, as Spark spells it."""
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
            values |= _STILL
            values["pipeline_progress_timestamp_seconds"] = time.time()

    def ended(self, query_id: str, failed: bool) -> None:
        with self._lock:
            if self._names.get(query_id) is None:
                self._values.pop(query_id, None)  # a restarted query has a different id
            else:
                values = self._of(query_id)
                values |= {"pipeline_query_active": 0.0, **_STILL}
                self._add(values, "pipeline_query_failures_total", int(failed))
            self._names.pop(query_id, None)

    def round_done(self, name: str, done: int, total: int) -> None:
        """Record the progress of a job with its own rounds instead of micro-batches, such as the archive."""
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
        if isinstance(more, int | float) and more >= 0:  # a sink that cannot count reports -1
            values[name] = values.get(name, 0.0) + more

    @staticmethod
    def _set(values: dict[str, float], name: str, value: Any) -> None:
        if isinstance(value, int | float) and value == value:  # Spark reports NaN if no time passed between batches
            values[name] = float(value)

    def of(self, family: str) -> list[tuple[str, float]]:
        """Return (query, value) pairs."""
        with self._lock:
            return [(query, values[family]) for query, values in self._values.items() if family in values]


def lag_of(source: Mapping[str, Any]) -> int | None:
    """Return the rows between the end of the last batch and the end of the log.

    Returns None if the offsets are neither Heapline's nor numbers.

    >>> lag_of({"endOffset": '{"jobs": {"0": 4, "incarnation": 9}}', "latestOffset": '{"jobs": {"0": 6}}'})
    2
    >>> lag_of({"endOffset": "3", "latestOffset": "5"}), lag_of({"endOffset": "x", "latestOffset": None})
    (2, None)
    """
    end, latest = (_parse_offsets(source.get(name)) for name in ("endOffset", "latestOffset"))
    if end is None or latest is None:
        return None
    return sum(max(offset - end.get(partition, offset), 0) for partition, offset in latest.items())


def _parse_offsets(text: Any) -> dict[tuple[str, str], int] | None:
    try:
        parsed = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None
    if isinstance(parsed, int):
        return {("", ""): parsed}
    if not isinstance(parsed, dict) or not all(isinstance(parts, dict) for parts in parsed.values()):
        return None
    return {
        (topic, partition): offset
        for topic, parts in parsed.items()
        for partition, offset in parts.items()
        if partition.isdigit() and isinstance(offset, int)
    }


class PrometheusCollector:
    """A collector for prometheus_client that reads the metrics on each scrape."""

    def __init__(self, metrics: QueryMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in FAMILIES:
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            samples = make(family.name, family.help, labels=[QUERY])
            for query, value in self._metrics.of(family.name):
                samples.add_metric([query], value)
            yield samples


def observe(metrics: QueryMetrics, meter: Any) -> None:
    """Expose the metrics as OpenTelemetry's observable instruments."""
    from opentelemetry.metrics import CallbackOptions, Observation

    def callback(name: str) -> Any:
        def observations(_: CallbackOptions) -> list[Observation]:
            return [Observation(value, {QUERY: query}) for query, value in metrics.of(name)]

        return observations

    for family in FAMILIES:
        make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
        make(family.name, callbacks=[callback(family.name)], description=family.help)


class Watch:
    """The result of `watch`; `close` removes the listener and stops the server."""

    def __init__(self, spark: Any, metrics: QueryMetrics, listener: Any, server: Any) -> None:
        self.readings, self._spark, self._listener, self._server = metrics, spark, listener, server

    @property
    def port(self) -> int | None:
        return None if self._server is None else int(self._server.server_port)

    def close(self) -> None:
        self._spark.streams.removeListener(self._listener)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def watch(spark: Any, port: int | None = None, *, host: str = "127.0.0.1", registry: Any = None) -> Watch:
    """Collect the metrics of every streaming query of the session from now on.

    With a port (0 for any free one) Prometheus can scrape it. With a registry of prometheus_client the metrics are
    added to it. If an OpenTelemetry meter provider is set, it receives them too.
    """
    metrics = QueryMetrics()
    _add_to_opentelemetry(metrics)
    server = None
    if registry is not None or port is not None:
        server = _add_to_prometheus(metrics, port, host, registry)
    listener = _listener(metrics)
    spark.streams.addListener(listener)
    return Watch(spark, metrics, listener, server)


def _listener(metrics: QueryMetrics) -> Any:
    """Return a listener that records what Spark reports. The base class is only available with Spark."""
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class QueryListener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            metrics.started(str(event.id), event.name)

        def onQueryProgress(self, event: Any) -> None:
            metrics.progressed(event.progress)

        def onQueryIdle(self, event: Any) -> None:
            metrics.idle(str(event.id))

        def onQueryTerminated(self, event: Any) -> None:
            metrics.ended(str(event.id), failed=event.exception is not None)

    return QueryListener()


def _add_to_opentelemetry(metrics: QueryMetrics) -> None:
    try:
        from opentelemetry import metrics as api
    except ImportError:
        return
    observe(metrics, api.get_meter("heapline.pipeline"))


def _add_to_prometheus(metrics: QueryMetrics, port: int | None, host: str, registry: Any) -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise BadRequest("metrics for Prometheus need prometheus-client; install heapline[assign]") from None
    registry = prometheus_client.CollectorRegistry() if registry is None else registry
    registry.register(PrometheusCollector(metrics))
    if port is None:
        return None
    try:
        server, _ = prometheus_client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadRequest(f"cannot listen on port {port} for metrics: {error.strerror}; choose another port") from None
    return server
