"""What a manager tells about itself, and two that listen: one that drops it, and one on Prometheus' registry.

A collector only listens: it is called from the event loop, must not wait, and nothing is decided by it.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from heapline.assign.errors import BadConfig
from heapline.assign.model import State

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@runtime_checkable
class MetricsCollector(Protocol):
    """Durations are seconds."""

    def record_state_transition(self, before: State, after: State, duration: float) -> None:
        """A change of state; `duration` is how long the state before has lasted."""

    def record_state_duration(self, state: State, duration: float) -> None:
        """A state has ended after so long: told once for each, beside the transition."""

    def record_assignment_change(self, added: int, removed: int, version: int) -> None:
        """The worker holds so many more and so many fewer than before, by the document of that version."""

    def record_assignment_calculation_time(self, duration: float) -> None:
        """A leader has asked its strategy."""

    def record_affinity_score(self, score: float) -> None:
        """Of the partitions before and after a calculation, the share that stays; 0 to 1."""

    def record_heartbeat(self, worker_id: str, success: bool) -> None:
        """This worker has renewed its lease, or failed to."""

    def record_leadership_change(self, new_leader: str, duration: float) -> None:
        """Another worker leads ("" if none does); `duration` is how long the one before has led, or nobody has."""


class NoMetrics:
    """Drops everything."""

    def record_state_transition(self, before: State, after: State, duration: float) -> None: ...
    def record_state_duration(self, state: State, duration: float) -> None: ...
    def record_assignment_change(self, added: int, removed: int, version: int) -> None: ...
    def record_assignment_calculation_time(self, duration: float) -> None: ...
    def record_affinity_score(self, score: float) -> None: ...
    def record_heartbeat(self, worker_id: str, success: bool) -> None: ...
    def record_leadership_change(self, new_leader: str, duration: float) -> None: ...


class Family(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


WINDOWS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 300.0, 3600.0, 86400.0)
CALCULATIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
SCORES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)
#: The names are the specification's. Each also has the label `manager`, for processes that run more than one.
FAMILIES = {
    "parti_worker_state": Family("Gauge", (), "State of the worker, 0 (INIT) to 8 (SHUTDOWN): docs/assign-states.md."),
    "parti_is_leader": Family("Gauge", (), "1 if this worker leads."),
    "parti_assigned_partitions": Family("Gauge", (), "Partitions that the worker holds."),
    "parti_assignment_version": Family("Gauge", (), "Version of the assignment by which it holds them."),
    "parti_state_transitions_total": Family("Counter", ("from", "to"), "Changes of state."),
    "parti_assignment_changes_total": Family("Counter", (), "Times that the worker was given or lost partitions."),
    "parti_leadership_changes_total": Family("Counter", (), "Times that another worker began to lead."),
    "parti_heartbeat_failures_total": Family("Counter", (), "Heartbeats that failed: the lease was not renewed."),
    "parti_state_duration_seconds": Family("Histogram", ("state",), "How long states lasted.", WINDOWS),
    "parti_assignment_calculation_seconds": Family("Histogram", (), "Time that a strategy took.", CALCULATIONS),
    "parti_affinity_score": Family("Histogram", (), "Share of partitions that stay, for each calculation.", SCORES),
}

#: Instruments can be made once in a registry; all managers of the process share them.
_instruments: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_making = Lock()


class PrometheusMetrics:
    """Counts on a registry of prometheus_client: on the process's common one, unless another is given.

    `manager` tells several managers of one process apart.
    """

    def __init__(self, manager: str = "default", registry: CollectorRegistry | None = None) -> None:
        made = _instruments_of(registry)
        # What has no labels of its own is there from the start, as 0, so that a first failure shows as a change.
        self._one = {n: made[n].labels(manager=manager) for n, family in FAMILIES.items() if not family.labels}
        self._many = {n: made[n] for n, family in FAMILIES.items() if family.labels}
        self._manager = manager
        self._worker_id: str | None = None
        self._leader = ""

    def record_state_transition(self, before: State, after: State, duration: float) -> None:
        labels = {"manager": self._manager, "from": before.name, "to": after.name}
        self._many["parti_state_transitions_total"].labels(**labels).inc()
        self._one["parti_worker_state"].set(int(after))

    def record_state_duration(self, state: State, duration: float) -> None:
        self._many["parti_state_duration_seconds"].labels(manager=self._manager, state=state.name).observe(duration)

    def record_assignment_change(self, added: int, removed: int, version: int) -> None:
        self._one["parti_assignment_changes_total"].inc()
        self._one["parti_assigned_partitions"].inc(added - removed)
        self._one["parti_assignment_version"].set(version)

    def record_assignment_calculation_time(self, duration: float) -> None:
        self._one["parti_assignment_calculation_seconds"].observe(duration)

    def record_affinity_score(self, score: float) -> None:
        self._one["parti_affinity_score"].observe(score)

    def record_heartbeat(self, worker_id: str, success: bool) -> None:
        self._worker_id = worker_id
        self._tell_whether_leader()
        if not success:
            self._one["parti_heartbeat_failures_total"].inc()

    def record_leadership_change(self, new_leader: str, duration: float) -> None:
        self._leader = new_leader
        self._one["parti_leadership_changes_total"].inc()
        self._tell_whether_leader()

    def _tell_whether_leader(self) -> None:
        """Which worker this is only its heartbeats say."""
        self._one["parti_is_leader"].set(int(self._leader != "" and self._leader == self._worker_id))


def _instruments_of(registry: CollectorRegistry | None) -> dict[str, Any]:
    try:
        import prometheus_client
    except ImportError:
        raise BadConfig("PrometheusMetrics needs prometheus-client: install heapline[assign]") from None
    registry = prometheus_client.REGISTRY if registry is None else registry
    with _making:
        if registry not in _instruments:
            _instruments[registry] = {
                name: getattr(prometheus_client, family.kind)(
                    name, family.help, ("manager", *family.labels), registry=registry,
                    **({"buckets": family.buckets} if family.buckets else {}),
                )
                for name, family in FAMILIES.items()
            }  # fmt: skip
        return _instruments[registry]
