"""Metrics have the specified names, report what was recorded, and cost nothing if unused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from heapline.assign.metrics import FAMILIES, MetricsCollector, NoMetrics, PrometheusMetrics
from heapline.assign.states import State

#: As the specification lists them.
GAUGES = {"parti_worker_state", "parti_is_leader", "parti_assigned_partitions", "parti_assignment_version"}
COUNTERS = {
    "parti_state_transitions_total", "parti_assignment_changes_total", "parti_leadership_changes_total",
    "parti_heartbeat_failures_total",
}  # fmt: skip
HISTOGRAMS = {"parti_state_duration_seconds", "parti_assignment_calculation_seconds", "parti_affinity_score"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def exported(registry: CollectorRegistry, name: str, manager: str = "default", **labels: str) -> float | None:
    return registry.get_sample_value(name, {"manager": manager, **labels})


def test_metric_names_are_those_of_the_specification() -> None:
    for kind, names in (("Gauge", GAUGES), ("Counter", COUNTERS), ("Histogram", HISTOGRAMS)):
        assert {name for name, family in FAMILIES.items() if family.kind == kind} == names


def test_metrics_without_labels_exist_from_the_start(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry=registry)
    for name in GAUGES | COUNTERS - {"parti_state_transitions_total"}:
        assert exported(registry, name) == 0.0
    for name in HISTOGRAMS - {"parti_state_duration_seconds"}:
        assert exported(registry, f"{name}_count") == 0.0


def test_states_transitions_and_durations_are_exported(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_state_transition(State.INIT, State.CLAIMING_ID, 0.5)
    metrics.record_state_transition(State.CLAIMING_ID, State.ELECTION, 0.1)
    metrics.record_state_duration(State.CLAIMING_ID, 0.25)
    assert exported(registry, "parti_worker_state") == 2
    assert exported(registry, "parti_state_transitions_total", **{"from": "INIT", "to": "CLAIMING_ID"}) == 1
    assert exported(registry, "parti_state_duration_seconds_sum", state="CLAIMING_ID") == 0.25


def test_assigned_partitions_follow_additions_and_removals(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_assignment_change(added=10, removed=0, version=3)
    metrics.record_assignment_change(added=1, removed=4, version=5)
    assert exported(registry, "parti_assigned_partitions") == 7
    assert exported(registry, "parti_assignment_version") == 5
    assert exported(registry, "parti_assignment_changes_total") == 2


def test_leaders_calculations_are_exported(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_assignment_calculation_time(0.007)
    metrics.record_affinity_score(0.97)
    assert exported(registry, "parti_assignment_calculation_seconds_sum") == 0.007
    assert exported(registry, "parti_affinity_score_bucket", le="0.95") == 0
    assert exported(registry, "parti_affinity_score_bucket", le="0.98") == 1


def test_only_failed_heartbeats_are_counted(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    for success in (True, False, False, True):
        metrics.record_heartbeat("worker-1", success)
    assert exported(registry, "parti_heartbeat_failures_total") == 2


def test_is_leader_is_1_while_this_worker_leads(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_leadership_change("worker-1", 0.0)
    assert exported(registry, "parti_is_leader") == 0, "no heartbeat has named the worker yet"
    metrics.record_heartbeat("worker-1", True)
    assert exported(registry, "parti_is_leader") == 1
    metrics.record_leadership_change("worker-2", 9.0)
    assert exported(registry, "parti_is_leader") == 0
    metrics.record_leadership_change("", 9.0)
    assert exported(registry, "parti_is_leader") == 0
    assert exported(registry, "parti_leadership_changes_total") == 3


def test_managers_of_one_process_have_their_own_labels(registry: CollectorRegistry) -> None:
    one, other = PrometheusMetrics("one", registry), PrometheusMetrics("other", registry)
    one.record_assignment_change(5, 0, 1)
    other.record_assignment_change(3, 0, 1)
    assert exported(registry, "parti_assigned_partitions", "one") == 5
    assert exported(registry, "parti_assigned_partitions", "other") == 3


def test_default_registry_is_used_if_none_is_given() -> None:
    from prometheus_client import REGISTRY

    PrometheusMetrics("common").record_heartbeat("worker-1", False)
    assert exported(REGISTRY, "parti_heartbeat_failures_total", "common") == 1


@pytest.mark.parametrize("made", [NoMetrics, lambda: PrometheusMetrics(registry=CollectorRegistry())])
def test_both_implementations_satisfy_the_protocol(made: type[NoMetrics]) -> None:
    assert isinstance(made(), MetricsCollector)


def test_importing_assign_loads_neither_prometheus_nor_yaml_nor_nats() -> None:
    program = "import sys; from heapline import assign; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "heapline" in loaded
    assert not {"prometheus_client", "opentelemetry", "yaml", "nats"} & set(loaded)
