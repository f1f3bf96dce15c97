"""How a subscription helper is doing, as plain numbers, and those on a Prometheus registry. Counts, decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heapline.assign.errors import BadConfig

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@dataclass(slots=True)
class Health:
    wanted: int = 0  # partitions that there should be a subscription for
    active: int = 0  # of those, how many deliver
    failing: int = 0  # of those, how many were given up until the next reconciliation
    retries: int = 0  # tries to subscribe that failed
    repaired: int = 0  # subscriptions that a reconciliation found broken
    delivered: int = 0  # messages that a handler was called for
    handler_failures: int = 0  # of those, how often it raised
    given_back: int = 0  # messages that arrived when the partition was not held any more


GAUGES = {
    "wanted": "Partitions that there should be a subscription for.",
    "active": "Subscriptions that deliver.",
    "failing": "Subscriptions that were given up until the next reconciliation.",
}
COUNTERS = {
    "retries": "Tries to subscribe that failed.",
    "repaired": "Subscriptions that a reconciliation found broken.",
    "delivered": "Messages that a handler was called for.",
    "handler_failures": "Calls of a handler that raised.",
    "given_back": "Messages that arrived when their partition was not held any more.",
}


class HealthCollector:
    """Shows a helper's health as `parti_subscription…`; register it once in a registry of prometheus_client."""

    def __init__(self, health: Callable[[], Health], manager: str = "default") -> None:
        self._health, self._manager = health, manager

    def register(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise BadConfig("metrics need prometheus-client: install heapline[assign]") from None
        (prometheus_client.REGISTRY if registry is None else registry).register(self)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        health = self._health()
        for name, help in GAUGES.items():
            gauge = GaugeMetricFamily(f"parti_subscriptions_{name}", help, labels=["manager"])
            gauge.add_metric([self._manager], getattr(health, name))
            yield gauge
        for name, help in COUNTERS.items():
            counter = CounterMetricFamily(f"parti_subscription_{name}", help, labels=["manager"])
            counter.add_metric([self._manager], getattr(health, name))
            yield counter
