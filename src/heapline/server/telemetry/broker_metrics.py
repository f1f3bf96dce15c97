"""The names of all metrics, and how a broker's measurements become rows of them.

FAMILIES is the one table for the exposition, the docs and the tests. The first ten names come from the specification.
Where it has the label `partition` alone, `topic` is added, because the numbers of partitions mean nothing without it.
This server has no Raft: `raft_apply_latency_ms` is how long a decision takes to become durable, so that dashboards
written to the specification work; `commit_latency_ms` is the same under its own name. All partitions of a topic share
one journal: `partition="all"`.

Labels are topics, their partitions and groups, and fixed names; nothing else that a caller could invent. A server may
have very many topics. Those beyond `TOPICS_MAX` (in the order of their creation) are summed under `OTHER`, which cannot
be the name of a topic. A topic with more than `PARTITIONS_MAX` partitions, or `GROUPS_MAX` groups, reports the rest
together. So counters of the rest may fall when one of its topics is deleted; Prometheus treats that as a restart.

A broker that has measurements implements `MeasuredBroker`; the server reports its own metrics for any broker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from heapline.core.latency import Tally

TOPICS_MAX = 100
PARTITIONS_MAX = 32
GROUPS_MAX = 32  # of a topic
OTHER = "(other)"
ALL = "all"  # partitions
Labels = tuple[str, ...]
Value = int | float | Tally


class Family(NamedTuple):
    name: str  # exactly as it is exposed
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


T, TP, TG = ("topic",), ("topic", "partition"), ("topic", "group")
FAMILIES = (
    Family("enqueue_latency_ms", "histogram", T, "Enqueue calls, from arrival to durable; one may hold many messages."),
    Family("pop_latency_ms", "histogram", T, "Pops that leased something, without the time they waited for a message."),
    Family("inflight", "gauge", T, "Messages that are leased."),
    Family("backlog", "gauge", TP, "Messages that are due and wait for a consumer."),
    Family("retries_total", "counter", T, "Messages redelivered: nacked, or their lease expired."),
    Family("dlq_total", "counter", T, "Messages that became dead letters."),
    Family("lease_timeouts_total", "counter", T, "Leases that expired."),
    Family("raft_apply_latency_ms", "histogram", TP, "The same as commit_latency_ms, under the specification's name."),
    Family("snapshot_bytes", "gauge", TP, "Size of the newest snapshot; 'all' holds the part shared by partitions."),
    Family("wal_bytes_written_total", "counter", (), "Bytes written to all journals."),
    # -- throughput
    Family("enqueued_total", "counter", T, "Messages enqueued."),
    Family("duplicates_total", "counter", T, "Messages recognized as duplicates and not enqueued again."),
    Family("leased_total", "counter", T, "Messages leased."),
    Family("acked_total", "counter", T, "Messages acked."),
    Family("nacked_total", "counter", T, "Messages nacked that had retries left."),
    Family("expired_total", "counter", T, "Messages that were not leased within their ttl."),
    Family("dead_letters_expired_total", "counter", T, "Dead letters deleted because of their age, number or size."),
    # -- waiting messages
    Family("delayed", "gauge", TP, "Messages that wait for their time."),
    Family("dead_letters", "gauge", TP, "Dead letters that are kept."),
    Family("prepared", "gauge", TP, "Messages in parts of batches that are not decided."),
    Family("oldest_ready_age_seconds", "gauge", TP, "Age of the oldest waiting message: the lag in time."),
    Family("partition_throttled", "gauge", TP, "1 if the partition is left out of pops."),
    Family("scheduler_delay_ms", "histogram", T, "Delayed messages and retries, from being due to being ready."),
    Family("tick_delay_ms", "histogram", T, "How late the engine handled timers and leases that became due."),
    Family("topic_serving", "gauge", T, "1 if the topic accepts calls, 0 while it is being reloaded."),
    Family("topic_paused", "gauge", T, "1 if the topic delivers nothing."),
    Family("topics", "gauge", (), "Topics that are open."),
    Family("topics_refused", "gauge", (), "Topics that are not served because their files are damaged."),
    # -- consumer groups
    Family("group_lag", "gauge", TG, "Rows of the stream that the group has not settled."),
    Family("group_outstanding", "gauge", TG, "Rows that its members hold."),
    Family("group_members", "gauge", TG, "Members of the group."),
    Family("group_dead_letters", "gauge", TG, "Rows that the group gave up, and that are kept."),
    Family("group_redeliveries_total", "counter", T, "Rows delivered to a group again, over all groups of the topic."),
    Family("group_timeouts_total", "counter", T, "Deliveries that were not acked in time."),
    Family("group_dead_total", "counter", T, "Rows that groups gave up."),
    Family("group_rebalances_total", "counter", T, "Times that partitions were reassigned to members."),
    Family("groups_moved_on_total", "counter", T, "Group offsets that the log's start passed: rows were not read."),
    # -- schedules
    Family("schedules", "gauge", (), "Schedules that are kept."),
    Family("schedules_failing", "gauge", (), "Schedules whose last firing could not be enqueued."),
    Family("schedule_fired_total", "counter", (), "Messages enqueued by schedules."),
    Family("schedule_missed_total", "counter", (), "Times that a schedule was late and its misfire policy applied."),
    Family("schedule_failures_total", "counter", (), "Firings that could not be enqueued."),
    Family("schedule_delay_ms", "histogram", (), "From a firing's scheduled time until it was durable."),
    # -- storage
    Family("commit_latency_ms", "histogram", T, "A unit, from being handed to the disk until it is durable."),
    Family("fsync_latency_ms", "histogram", (), "The disk's part of that: fdatasync, all files of the directory."),
    Family("commits_total", "counter", T, "Units written: many calls share one."),
    Family("uncommitted_bytes", "gauge", T, "Bytes that wait for the disk."),
    Family("journal_bytes", "gauge", T, "Size of the topic's segments."),
    Family("journal_segments", "gauge", T, "Number of the topic's segments."),
    Family("segments_reclaimed_total", "counter", T, "Segments deleted."),
    Family("records_moved_total", "counter", T, "Messages rewritten so that their segment could be deleted."),
    Family("snapshots_total", "counter", T, "Snapshots written."),
    Family("snapshot_age_seconds", "gauge", T, "Since the last snapshot, or since the topic was opened."),
    Family("corrupt_records_total", "counter", T, "Messages whose record is corrupt: set aside, never delivered."),
    Family("reloads_total", "counter", T, "Times that the topic was reloaded from disk after a failed write."),
    Family("clock_jumps_total", "counter", T, "Times that the wall clock jumped by more than a second."),
    Family("disk_free_bytes", "gauge", (), "Free on the file system of the data directory, for this user."),
    Family("disk_size_bytes", "gauge", (), "Size of that file system."),
    # -- the interfaces
    Family("calls_total", "counter", ("interface", "call", "code"), "Calls that ended; code is OK or a gRPC code."),
    Family("call_duration_ms", "histogram", ("interface", "call"), "Duration of calls that neither stream nor wait."),
    Family("calls_open", "gauge", ("interface", "call"), "Calls in flight."),
    Family("streams_open", "gauge", ("interface", "call"), "Calls in flight that are streams."),
    Family("audit_lines_lost_total", "counter", (), "Lines of the audit log that could not be written."),
    Family("engine_memory_bytes", "gauge", T, "Memory of heaps, timers and dedup."),
    Family("build_info", "gauge", ("version",), "Always 1."),
)  # fmt: skip
#: Only the sql broker has these.
SQL_FAMILIES = (
    Family("shard_up", "gauge", ("shard",), "1 if the last statement reached the shard's database."),
    Family("shard_connections", "gauge", ("shard", "state"), "Connections of this node to the shard: used or idle."),
    Family("shard_commits_total", "counter", ("shard",), "Transactions of this node that the shard committed."),
    Family("redis_up", "gauge", (), "1 if Redis answers; 0 while this node continues without it."),
    Family("prefetched", "gauge", ("topic",), "Messages in the ready queue, for topics that this node has popped."),
    Family("prefetched_total", "counter", ("topic",), "Messages that this node leased through the ready queue."),
    Family("buffered_units", "gauge", ("shard",), "Writes to the log, or to the buffer in Redis, not yet in Postgres."),
    Family("flush_lag_ms", "gauge", ("shard",), "How long the oldest of these has waited; 0 without any."),
    Family("flush_failures_total", "counter", ("shard",), "Flushes of the log or of the buffer in Redis that failed."),
    Family("slow_mode", "gauge", ("shard",), "1 while enqueues wait for Postgres because log or Redis does not work."),
    Family("redis_failures_total", "counter", (), "Times that Redis went down."),
    Family("shard_commit_latency_ms", "histogram", ("shard",), "Transactions of this node, from begin to commit."),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES + SQL_FAMILIES}

# Which field of the broker's measurements each metric is.
_TOTALS = {
    "retries_total": "retries", "dlq_total": "dead", "lease_timeouts_total": "timeouts", "enqueued_total": "enqueued",
    "duplicates_total": "duplicates", "leased_total": "leased", "acked_total": "acked", "nacked_total": "nacked",
    "expired_total": "expired", "dead_letters_expired_total": "dead_expired", "commits_total": "commits",
    "segments_reclaimed_total": "segments_reclaimed",
    "records_moved_total": "records_moved", "snapshots_total": "snapshots", "corrupt_records_total": "corrupt",
    "reloads_total": "reloads", "clock_jumps_total": "clock_jumps", "group_redeliveries_total": "redeliveries",
    "group_timeouts_total": "group_timeouts", "group_dead_total": "group_dead",
    "group_rebalances_total": "rebalances", "groups_moved_on_total": "moved_on",
}  # fmt: skip
_LATENCIES = {
    "enqueue_latency_ms": "enqueue", "pop_latency_ms": "pop", "commit_latency_ms": "commit",
    "scheduler_delay_ms": "fired", "tick_delay_ms": "late",
}  # fmt: skip
_TOPIC = {
    "topic_serving": "serving", "topic_paused": "paused", "uncommitted_bytes": "uncommitted_bytes",
    "journal_bytes": "journal_bytes", "journal_segments": "journal_segments", "engine_memory_bytes": "memory_bytes",
}  # fmt: skip
_PARTITION = {
    "backlog": "ready", "delayed": "delayed", "dead_letters": "dead", "prepared": "prepared",
    "partition_throttled": "throttled", "snapshot_bytes": "snapshot_bytes",
}  # fmt: skip
_GROUP = {
    "group_lag": "lag", "group_outstanding": "outstanding", "group_members": "members", "group_dead_letters": "dead",
}  # fmt: skip
_SCHEDULES = {
    "schedules": "kept", "schedules_failing": "failing", "schedule_fired_total": "fired",
    "schedule_missed_total": "missed", "schedule_failures_total": "failed", "schedule_delay_ms": "delay",
}  # fmt: skip
_LARGEST = {"oldest_ready_age_seconds", "snapshot_age_seconds"}  # of several rows the largest counts, not the sum


@runtime_checkable
class MeasuredBroker(Protocol):
    """A broker that measures itself."""

    def metrics(self) -> Awaitable[Any]:
        """Return its numbers now, without waiting for a commit; engine/metrics_source.py says which."""


@runtime_checkable
class RowsBroker(Protocol):
    """A broker that measures itself in the names of FAMILIES."""

    def metric_rows(self) -> Awaitable[Iterable[tuple[str, Labels, Value]]]:
        """Return its rows: name, labels, value."""


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

    def add_fields(self, labels: Labels, measures: Any, fields: dict[str, str]) -> None:
        """Add the fields of an object under the names of metrics. A flag becomes 0 or 1."""
        for name, field in fields.items():
            value = getattr(measures, field)
            self.add(name, labels, int(value) if isinstance(value, bool) else value)


def add_topics(rows: Rows, measures: Any, topics_max: int = TOPICS_MAX) -> None:
    for index, topic in enumerate(measures.topics):
        _add_topic(rows, topic.name if index < topics_max else OTHER, topic)
    rows.add("topics", (), len(measures.topics))
    rows.add("topics_refused", (), measures.refused)


def add_rows(rows: Rows, measured: Iterable[tuple[str, Labels, Value]], topics_max: int = TOPICS_MAX) -> None:
    """Add the rows of a broker. Topics beyond the first `topics_max` are summed under OTHER."""
    shown: set[str] = set()
    for name, labels, value in measured:
        if BY_NAME[name].labels[:1] == T and labels[0] not in shown:
            if len(shown) < topics_max:
                shown.add(labels[0])
            else:
                labels = (OTHER,) * len(labels)
        rows.add(name, labels, value)


def add_schedules(rows: Rows, schedules: Any) -> None:
    rows.add_fields((), schedules, _SCHEDULES)


def _add_topic(rows: Rows, name: str, topic: Any) -> None:
    labels: Labels = (name,)
    for family, key in _TOTALS.items():
        rows.add(family, labels, topic.totals[key])
    for family, key in _LATENCIES.items():
        rows.add(family, labels, topic.latencies[key])
    rows.add_fields(labels, topic, _TOPIC)
    rows.add("raft_apply_latency_ms", (name, ALL), topic.latencies["commit"])
    rows.add("inflight", labels, sum(p.leased for p in topic.partitions))
    rows.add("snapshot_bytes", (name, ALL), topic.snapshot_bytes_shared)
    if topic.snapshot_age_ms is not None:
        rows.add("snapshot_age_seconds", labels, topic.snapshot_age_ms / 1000)
    for p in topic.partitions:
        labels = (name, str(p.number) if p.number < PARTITIONS_MAX and name != OTHER else OTHER)
        rows.add_fields(labels, p, _PARTITION)
        rows.add("oldest_ready_age_seconds", labels, p.oldest_ready_ms / 1000)
    for index, group in enumerate(topic.groups):
        labels = (name, group.name if index < GROUPS_MAX and name != OTHER else OTHER)
        rows.add_fields(labels, group, _GROUP)


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
