"""Metrics have the specification's names, tell what was recorded, and cost nothing where they are not used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from heapline.assign.metrics import FAMILIES, MetricsCollector, NoMetrics, PrometheusMetrics
from heapline.assign.model import State

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


def told(registry: CollectorRegistry, name: str, manager: str = "default", **labels: str) -> float | None:
    return registry.get_sample_value(name, {"manager": manager, **labels})


def test_names_are_those_of_the_specification() -> None:
    for kind, names in (("Gauge", GAUGES), ("Counter", COUNTERS), ("Histogram", HISTOGRAMS)):
        assert {name for name, family in FAMILIES.items() if family.kind == kind} == names


def test_what_has_no_labels_is_there_from_the_start(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry=registry)
    for name in GAUGES | COUNTERS - {"parti_state_transitions_total"}:
        assert told(registry, name) == 0.0
    for name in HISTOGRAMS - {"parti_state_duration_seconds"}:
        assert told(registry, f"{name}_count") == 0.0


def test_state_is_told_with_its_transitions_and_durations(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_state_transition(State.INIT, State.CLAIMING_ID, 0.5)
    metrics.record_state_transition(State.CLAIMING_ID, State.ELECTION, 0.1)
    metrics.record_state_duration(State.CLAIMING_ID, 0.25)
    assert told(registry, "parti_worker_state") == 2
    assert told(registry, "parti_state_transitions_total", **{"from": "INIT", "to": "CLAIMING_ID"}) == 1
    assert told(registry, "parti_state_duration_seconds_sum", state="CLAIMING_ID") == 0.25


def test_partitions_held_follow_what_was_added_and_removed(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_assignment_change(added=10, removed=0, version=3)
    metrics.record_assignment_change(added=1, removed=4, version=5)
    assert told(registry, "parti_assigned_partitions") == 7
    assert told(registry, "parti_assignment_version") == 5
    assert told(registry, "parti_assignment_changes_total") == 2


def test_calculations_of_a_leader_are_told(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_assignment_calculation_time(0.007)
    metrics.record_affinity_score(0.97)
    assert told(registry, "parti_assignment_calculation_seconds_sum") == 0.007
    assert told(registry, "parti_affinity_score_bucket", le="0.95") == 0
    assert told(registry, "parti_affinity_score_bucket", le="0.98") == 1


def test_only_failed_heartbeats_are_counted(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    for success in (True, False, False, True):
        metrics.record_heartbeat("worker-1", success)
    assert told(registry, "parti_heartbeat_failures_total") == 2


def test_worker_is_leader_while_it_is_the_one_that_leads(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry=registry)
    metrics.record_leadership_change("worker-1", 0.0)
    assert told(registry, "parti_is_leader") == 0, "it has not said yet which worker it is"
    metrics.record_heartbeat("worker-1", True)
    assert told(registry, "parti_is_leader") == 1
    metrics.record_leadership_change("worker-2", 9.0)
    assert told(registry, "parti_is_leader") == 0
    metrics.record_leadership_change("", 9.0)
    assert told(registry, "parti_is_leader") == 0
    assert told(registry, "parti_leadership_changes_total") == 3


def test_managers_of_one_process_are_told_apart(registry: CollectorRegistry) -> None:
    one, other = PrometheusMetrics("one", registry), PrometheusMetrics("other", registry)
    one.record_assignment_change(5, 0, 1)
    other.record_assignment_change(3, 0, 1)
    assert told(registry, "parti_assigned_partitions", "one") == 5
    assert told(registry, "parti_assigned_partitions", "other") == 3


def test_without_a_registry_the_common_one_of_the_process_is_used() -> None:
    from prometheus_client import REGISTRY

    PrometheusMetrics("common").record_heartbeat("worker-1", False)
    assert told(REGISTRY, "parti_heartbeat_failures_total", "common") == 1


@pytest.mark.parametrize("made", [NoMetrics, lambda: PrometheusMetrics(registry=CollectorRegistry())])
def test_both_are_collectors(made: type[NoMetrics]) -> None:
    assert isinstance(made(), MetricsCollector)


def test_importing_assign_loads_neither_prometheus_nor_yaml_nor_nats() -> None:
    program = "import sys; from heapline import assign; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "heapline" in loaded
    assert not {"prometheus_client", "opentelemetry", "yaml", "nats"} & set(loaded)
