"""Metrics of a manager and of its subscriptions, and their export to Prometheus.

A collector is called from the event loop and must not wait. Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from heapline.assign.errors import BadConfig
from heapline.assign.states import State

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@runtime_checkable
class MetricsCollector(Protocol):
    """Receives a manager's metrics. Durations are in seconds."""

    def record_state_transition(self, before: State, after: State, duration: float) -> None:
        """Record a change of state. `duration` is how long the previous state lasted."""

    def record_state_duration(self, state: State, duration: float) -> None:
        """Record how long a state lasted. Called once per state, beside the transition."""

    def record_assignment_change(self, added: int, removed: int, version: int) -> None:
        """Record how many more and how many fewer partitions the worker holds, by the document of that version."""

    def record_assignment_calculation_time(self, duration: float) -> None:
        """Record how long a leader's strategy took."""

    def record_affinity_score(self, score: float) -> None:
        """Record the share of partitions that stay in place in a calculation; 0 to 1."""

    def record_heartbeat(self, worker_id: str, success: bool) -> None:
        """Record whether this worker renewed its lease."""

    def record_leadership_change(self, new_leader: str, duration: float) -> None:
        """Record that another worker leads ("" = none). `duration` is how long the previous one led, or none did."""


class NoMetrics:
    """Discards all metrics."""

    def record_state_transition(self, before: State, after: State, duration: float) -> None: ...
    def record_state_duration(self, state: State, duration: float) -> None: ...
    def record_assignment_change(self, added: int, removed: int, version: int) -> None: ...
    def record_assignment_calculation_time(self, duration: float) -> None: ...
    def record_affinity_score(self, score: float) -> None: ...
    def record_heartbeat(self, worker_id: str, success: bool) -> None: ...
    def record_leadership_change(self, new_leader: str, duration: float) -> None: ...


class Family(NamedTuple):
    """A metric of the Prometheus export."""

    kind: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


WINDOWS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 300.0, 3600.0, 86400.0)
CALCULATIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
SCORES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
#: The names are the specification's. Each also has the label `manager`, for processes with several managers.
FAMILIES = {
    "parti_worker_state": Family("Gauge", (), "State of the worker, 0 (INIT) to 8 (SHUTDOWN): docs/assign-states.md."),
    "parti_is_leader": Family("Gauge", (), "1 if this worker is the leader."),
    "parti_assigned_partitions": Family("Gauge", (), "Partitions that the worker holds."),
    "parti_assignment_version": Family("Gauge", (), "Version of the assignment that grants them."),
    "parti_state_transitions_total": Family("Counter", ("from", "to"), "State transitions."),
    "parti_assignment_changes_total": Family("Counter", (), "Times that the worker gained or lost partitions."),
    "parti_leadership_changes_total": Family("Counter", (), "Times that the leader changed."),
    "parti_heartbeat_failures_total": Family("Counter", (), "Failed heartbeats: the lease was not renewed."),
    "parti_state_duration_seconds": Family("Histogram", ("state",), "Duration of states.", WINDOWS),
    "parti_assignment_calculation_seconds": Family("Histogram", (), "Time spent in the strategy.", CALCULATIONS),
    "parti_affinity_score": Family("Histogram", (), "Share of partitions that stay in place, per calculation.", SCORES),
}

#: A registry accepts each instrument once; all managers of the process share them.
_instruments: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_creation_lock = Lock()


class PrometheusMetrics:
    """Exports metrics to a prometheus_client registry: the process's default one, unless another is given.

    `manager` distinguishes several managers of one process.
    """

    def __init__(self, manager: str = "default", registry: CollectorRegistry | None = None) -> None:
        self._instruments, self._manager = _instruments_of(registry), manager
        self._worker_id: str | None = None
        self._leader = ""
        for name, family in FAMILIES.items():
            if not family.labels:
                self._metric(name)  # it exists from the start, as 0, so that a first failure shows as a change

    def _metric(self, name: str, *labels: str) -> Any:
        return self._instruments[name].labels(self._manager, *labels)

    def record_state_transition(self, before: State, after: State, duration: float) -> None:
        self._metric("parti_state_transitions_total", before.name, after.name).inc()
        self._metric("parti_worker_state").set(int(after))

    def record_state_duration(self, state: State, duration: float) -> None:
        self._metric("parti_state_duration_seconds", state.name).observe(duration)

    def record_assignment_change(self, added: int, removed: int, version: int) -> None:
        self._metric("parti_assignment_changes_total").inc()
        self._metric("parti_assigned_partitions").inc(added - removed)
        self._metric("parti_assignment_version").set(version)

    def record_assignment_calculation_time(self, duration: float) -> None:
        self._metric("parti_assignment_calculation_seconds").observe(duration)

    def record_affinity_score(self, score: float) -> None:
        self._metric("parti_affinity_score").observe(score)

    def record_heartbeat(self, worker_id: str, success: bool) -> None:
        self._worker_id = worker_id
        self._update_is_leader()
        if not success:
            self._metric("parti_heartbeat_failures_total").inc()

    def record_leadership_change(self, new_leader: str, duration: float) -> None:
        self._leader = new_leader
        self._metric("parti_leadership_changes_total").inc()
        self._update_is_leader()

    def _update_is_leader(self) -> None:
        """Update parti_is_leader. Only heartbeats carry the id of this worker."""
        self._metric("parti_is_leader").set(int(self._leader != "" and self._leader == self._worker_id))


def _require_prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise BadConfig("metrics need prometheus-client; install heapline[assign]") from None
    return prometheus_client


def _instruments_of(registry: CollectorRegistry | None) -> dict[str, Any]:
    prometheus_client = _require_prometheus()
    registry = prometheus_client.REGISTRY if registry is None else registry
    with _creation_lock:
        if registry not in _instruments:
            _instruments[registry] = {
                name: getattr(prometheus_client, family.kind)(
                    name,
                    family.help,
                    ("manager", *family.labels),
                    registry=registry,
                    **({"buckets": family.buckets} if family.buckets else {}),
                )
                for name, family in FAMILIES.items()
            }
        return _instruments[registry]


def _number(prefix: str, help: str) -> Any:
    """Return a field of `Health`: it starts at 0 and is exported as <prefix>_<name>."""
    return field(default=0, metadata={"prefix": prefix, "help": help})


GAUGE, COUNTER = "parti_subscriptions", "parti_subscription"


@dataclass(slots=True)
class Health:
    """The state of a subscription helper in numbers."""

    wanted: int = _number(GAUGE, "Partitions that should have a subscription.")
    active: int = _number(GAUGE, "Subscriptions that deliver.")
    failing: int = _number(GAUGE, "Subscriptions suspended until the next reconciliation.")
    retries: int = _number(COUNTER, "Failed attempts to subscribe.")
    repaired: int = _number(COUNTER, "Subscriptions that a reconciliation restarted.")
    delivered: int = _number(COUNTER, "Messages passed to a handler.")
    handler_failures: int = _number(COUNTER, "Handler calls that raised.")
    returned: int = _number(COUNTER, "Messages returned because their partition was no longer held.")


class HealthCollector:
    """Exports a helper's health as `parti_subscription…`. Register it once per prometheus_client registry."""

    def __init__(self, health: Callable[[], Health], manager: str = "default") -> None:
        self._health, self._manager = health, manager

    def register(self, registry: CollectorRegistry | None = None) -> None:
        (_require_prometheus().REGISTRY if registry is None else registry).register(self)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        health = self._health()
        for each in fields(Health):
            prefix, help = each.metadata["prefix"], each.metadata["help"]
            kind = GaugeMetricFamily if prefix == GAUGE else CounterMetricFamily
            family = kind(f"{prefix}_{each.name}", help, labels=["manager"])
            family.add_metric([self._manager], getattr(health, each.name))
            yield family
