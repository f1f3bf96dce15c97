"""The names of all metrics, their meaning and their labels: one table for the exposition, the docs and the tests.

The first ten names come from the specification. Where it has the label `partition` alone, `topic` is added, because the
numbers of partitions mean nothing without it. This server has no Raft: `raft_apply_latency_ms` is how long a decision
takes to become durable, so that dashboards written to the specification work; `commit_latency_ms` is the same under its
own name. All partitions of a topic share one journal: `partition="all"`. The label `face` is the interface.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


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
    Family("calls_total", "counter", ("face", "call", "code"), "Calls that ended; code is OK, or gRPC's name of it."),
    Family("call_duration_ms", "histogram", ("face", "call"), "Duration of calls that neither stream nor wait."),
    Family("calls_open", "gauge", ("face", "call"), "Calls in flight."),
    Family("streams_open", "gauge", ("face", "call"), "Calls in flight that are streams."),
    Family("audit_lines_lost_total", "counter", (), "Lines of the audit log that could not be written."),
    Family("engine_memory_bytes", "gauge", T, "Memory of heaps, timers and dedup."),
    Family("build_info", "gauge", ("version",), "Always 1."),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
