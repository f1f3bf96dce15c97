"""The pipeline's own progress as metrics: the listener that hears of every micro-batch, and how it is installed.

    from heapline.spark.listening import watch

    watch(spark, port=9464)       # http://127.0.0.1:9464/metrics

Runs in the driver, beside the queries; nothing is decided here. What is kept is in readings.py.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from heapline.errors import BadRequest
from heapline.spark.readings import PrometheusReadings, Readings, observe


class Progress(StreamingQueryListener):
    def __init__(self, readings: Readings | None = None) -> None:
        self.readings = readings or Readings()

    def onQueryStarted(self, event: Any) -> None:
        self.readings.started(str(event.id), event.name)

    def onQueryProgress(self, event: Any) -> None:
        self.readings.progressed(event.progress)

    def onQueryIdle(self, event: Any) -> None:
        self.readings.idle(str(event.id))

    def onQueryTerminated(self, event: Any) -> None:
        self.readings.ended(str(event.id), failed=event.exception is not None)


class Watch:
    """What `watch` has installed; `close` takes it out again."""

    def __init__(self, spark: Any, readings: Readings, listener: Any, server: Any) -> None:
        self.readings, self._spark, self._listener, self._server = readings, spark, listener, server

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
    """Every streaming query of the session is watched from now on. With a port (0: any free one) Prometheus can ask
    there; with a registry of prometheus_client the figures are on that too. OpenTelemetry's meter provider has them if
    one is set."""
    readings = Readings()
    _tell_opentelemetry(readings)
    server = None
    if registry is not None or port is not None:
        server = _tell_prometheus(readings, port, host, registry)
    listener = Progress(readings)
    spark.streams.addListener(listener)
    return Watch(spark, readings, listener, server)


def _tell_opentelemetry(readings: Readings) -> None:
    try:
        from opentelemetry import metrics
    except ImportError:
        return
    observe(readings, metrics.get_meter("heapline.pipeline"))


def _tell_prometheus(readings: Readings, port: int | None, host: str, registry: Any) -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise BadRequest("metrics for Prometheus need prometheus-client: install heapline[assign]") from None
    registry = prometheus_client.CollectorRegistry() if registry is None else registry
    registry.register(PrometheusReadings(readings))
    if port is None:
        return None
    try:
        server, _ = prometheus_client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadRequest(f"port {port} cannot be had for metrics: {error.strerror}") from None
    return server
