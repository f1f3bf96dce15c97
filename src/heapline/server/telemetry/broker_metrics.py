"""Turn a broker's measurements into rows of metrics: which number has which name, and how many series there are.

Labels are topics, their partitions and groups, and fixed names; nothing else that a caller could invent. A server may
have very many topics. Those beyond `TOPICS_MAX` (in the order of their creation) are summed under `OTHER`, which cannot
be the name of a topic. A topic with more than `PARTITIONS_MAX` partitions, or `GROUPS_MAX` groups, reports the rest
together. So counters of the rest may fall when one of its topics is deleted; Prometheus treats that as a restart.

A broker that has measurements implements `MeasuredBroker`; the server reports its own metrics for any broker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, Protocol, runtime_checkable

from heapline.core.latency import Tally

TOPICS_MAX = 100
PARTITIONS_MAX = 32
GROUPS_MAX = 32  # of a topic
OTHER = "(other)"
ALL = "all"  # partitions
Labels = tuple[str, ...]
Value = int | float | Tally

_TOTALS = {
    "retries_total": "retries", "dlq_total": "dead", "lease_timeouts_total": "timeouts", "enqueued_total": "enqueued",
    "duplicates_total": "duplicates", "leased_total": "leased", "acked_total": "acked", "nacked_total": "nacked",
    "expired_total": "expired", "commits_total": "commits", "segments_reclaimed_total": "segments_reclaimed",
    "records_moved_total": "records_moved", "snapshots_total": "snapshots", "corrupt_records_total": "corrupt",
    "reloads_total": "reloads", "clock_jumps_total": "clock_jumps", "group_redeliveries_total": "redeliveries",
    "group_timeouts_total": "group_timeouts", "group_dead_total": "group_dead",
    "group_rebalances_total": "rebalances", "groups_moved_on_total": "moved_on",
}  # fmt: skip
_LATENCIES = {
    "enqueue_latency_ms": "enqueue", "pop_latency_ms": "pop", "commit_latency_ms": "commit",
    "scheduler_delay_ms": "fired", "tick_delay_ms": "late",
}  # fmt: skip
_LARGEST = {"oldest_ready_age_seconds", "snapshot_age_seconds"}  # of several rows the largest counts, not the sum


@runtime_checkable
class MeasuredBroker(Protocol):
    """A broker that measures itself."""

    def metrics(self) -> Awaitable[Any]:
        """Return its numbers now, without waiting for a commit; engine/metrics_source.py says which."""


class Rows:
    """Values by name and labels. Values of the same labels are added up."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[Labels, Value]] = {}

    def add(self, name: str, labels: Labels, value: Value) -> None:
        rows = self.by_name.setdefault(name, {})
        before = rows.get(labels)
        if before is None:
            rows[labels] = value
        elif isinstance(value, Tally):
            assert isinstance(before, Tally)
            rows[labels] = before.plus(value)
        else:
            rows[labels] = max(before, value) if name in _LARGEST else before + value  # type: ignore[operator]


def add_topics(rows: Rows, measures: Any, topics_max: int = TOPICS_MAX) -> None:
    for index, topic in enumerate(measures.topics):
        _add_topic(rows, topic.name if index < topics_max else OTHER, topic)
    rows.add("topics", (), len(measures.topics))
    rows.add("topics_refused", (), measures.refused)


def add_schedules(rows: Rows, schedules: Any) -> None:
    rows.add("schedules", (), schedules.kept)
    rows.add("schedules_failing", (), schedules.failing)
    rows.add("schedule_fired_total", (), schedules.fired)
    rows.add("schedule_missed_total", (), schedules.missed)
    rows.add("schedule_failures_total", (), schedules.failed)
    rows.add("schedule_delay_ms", (), schedules.delay)


def _add_topic(rows: Rows, name: str, topic: Any) -> None:
    labels = (name,)
    for family, key in _TOTALS.items():
        rows.add(family, labels, topic.totals[key])
    for family, key in _LATENCIES.items():
        rows.add(family, labels, topic.latencies[key])
    rows.add("raft_apply_latency_ms", (name, ALL), topic.latencies["commit"])
    rows.add("inflight", labels, sum(p.leased for p in topic.partitions))
    rows.add("topic_serving", labels, int(topic.serving))
    rows.add("topic_paused", labels, int(topic.paused))
    rows.add("uncommitted_bytes", labels, topic.uncommitted_bytes)
    rows.add("journal_bytes", labels, topic.journal_bytes)
    rows.add("journal_segments", labels, topic.journal_segments)
    rows.add("engine_memory_bytes", labels, topic.memory_bytes)
    rows.add("snapshot_bytes", (name, ALL), topic.snapshot_bytes_shared)
    if topic.snapshot_age_ms is not None:
        rows.add("snapshot_age_seconds", labels, topic.snapshot_age_ms / 1000)
    for p in topic.partitions:
        place = (name, str(p.number) if p.number < PARTITIONS_MAX and name != OTHER else OTHER)
        rows.add("backlog", place, p.ready)
        rows.add("delayed", place, p.delayed)
        rows.add("dead_letters", place, p.dead)
        rows.add("prepared", place, p.prepared)
        rows.add("partition_throttled", place, int(p.throttled))
        rows.add("oldest_ready_age_seconds", place, p.oldest_ready_ms / 1000)
        rows.add("snapshot_bytes", place, p.snapshot_bytes)
    for index, group in enumerate(topic.groups):
        whose = (name, group.name if index < GROUPS_MAX and name != OTHER else OTHER)
        rows.add("group_lag", whose, group.lag)
        rows.add("group_outstanding", whose, group.outstanding)
        rows.add("group_members", whose, group.members)
        rows.add("group_dead_letters", whose, group.dead)


class WalBytes:
    """The bytes ever written to journals, including those of topics that have been deleted since."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._total = 0

    def total(self, topics: Iterable[Any]) -> int:
        now = {topic.name: topic.totals["bytes_written"] for topic in topics}
        for name, written in now.items():
            before = self._seen.get(name, 0)
            self._total += written - before if written >= before else written  # less: deleted and created again
        self._seen = now
        return self._total


def add_disk(rows: Rows, measures: Any) -> None:
    if measures.disk_bytes is not None:
        free, size = measures.disk_bytes
        rows.add("disk_free_bytes", (), free)
        rows.add("disk_size_bytes", (), size)
    if measures.fsync is not None:
        rows.add("fsync_latency_ms", (), measures.fsync)
