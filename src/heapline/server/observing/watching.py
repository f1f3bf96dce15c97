"""What a server is watched by: put together here, so that app.py need not know the parts."""

from __future__ import annotations

from heapline.clock import Clock, SystemClock
from heapline.engine.embedded import EmbeddedBroker
from heapline.server.front import Observer
from heapline.server.observing.current import Current
from heapline.server.observing.metrics import Metrics
from heapline.server.observing.timed_disk import TimedDisk
from heapline.server.observing.traces import TracedBroker, Traces, make_provider
from heapline.server.settings import ServerSettings


def make_broker(settings: ServerSettings, clock: Clock | None = None) -> EmbeddedBroker:
    """The broker of these settings, not opened yet; one that traces only if traces go anywhere."""
    path, config, disk, clock = str(settings.data), settings.broker_config(), TimedDisk(), clock or SystemClock()
    if settings.otlp_endpoint is None:
        return EmbeddedBroker(path, config=config, disk=disk, clock=clock)
    provider = make_provider(settings.otlp_endpoint, settings.trace_sample)
    return TracedBroker(path, provider=provider, config=config, disk=disk, clock=clock)


def observers(broker: EmbeddedBroker, metrics: Metrics) -> list[Observer]:
    found: list[Observer] = [Current()]
    if isinstance(broker, TracedBroker):
        found.append(Traces(broker.provider))
    return [*found, metrics.calls]
