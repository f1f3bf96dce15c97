"""The names of all metrics, what they mean, and their labels: one table for the exposition, the docs and the tests.

The first ten are named by the specification. Where it gives a label `partition` alone, `topic` stands beside it, since
the numbers of partitions mean nothing without it. There is no Raft in this server: `raft_apply_latency_ms` tells what
it stands for, how long a decision takes to become durable, so that dashboards written to the specification
work; `commit_latency_ms` is the same by its own name. All partitions of a topic share one journal: `partition="all"`.
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
    Family("enqueue_latency_ms", "histogram", T, "Enqueue calls, from asked to durable; one call may bring many."),
    Family("pop_latency_ms", "histogram", T, "Pops that got something; waiting until something was there is left out."),
    Family("inflight", "gauge", T, "Messages that are leased."),
    Family("backlog", "gauge", TP, "Messages that are due and wait for a consumer."),
    Family("retries_total", "counter", T, "Messages that came back for another attempt: nacked, or their lease ended."),
    Family("dlq_total", "counter", T, "Messages that became dead letters."),
    Family("lease_timeouts_total", "counter", T, "Leases that ran out."),
    Family("raft_apply_latency_ms", "histogram", TP, "The same as commit_latency_ms, by the specification's name."),
    Family("snapshot_bytes", "gauge", TP, "Size of the newest snapshot; what is no single partition's is under 'all'."),
    Family("wal_bytes_written_total", "counter", (), "Bytes written to all journals."),
    # -- what goes through
    Family("enqueued_total", "counter", T, "Messages taken in."),
    Family("duplicates_total", "counter", T, "Messages recognised as sent before, and not taken in again."),
    Family("leased_total", "counter", T, "Messages handed out."),
    Family("acked_total", "counter", T, "Messages acked."),
    Family("nacked_total", "counter", T, "Messages nacked that had retries left."),
    Family("expired_total", "counter", T, "Messages that nobody took within their ttl."),
    # -- what waits
    Family("delayed", "gauge", TP, "Messages that wait for their time: timers."),
    Family("dead_letters", "gauge", TP, "Dead letters that are kept."),
    Family("prepared", "gauge", TP, "Messages in parts of batches that are not decided yet."),
    Family("oldest_ready_age_seconds", "gauge", TP, "Since the oldest waiting message was enqueued: the lag in time."),
    Family("partition_throttled", "gauge", TP, "1 if the partition is left out of pops."),
    Family("scheduler_delay_ms", "histogram", T, "Delayed messages and retries, from being due to being ready."),
    Family("tick_delay_ms", "histogram", T, "How late the engine looked at timers and leases that fell due."),
    Family("topic_serving", "gauge", T, "1 if the topic takes calls, 0 while it is loaded again."),
    Family("topic_paused", "gauge", T, "1 if the topic hands out nothing."),
    Family("topics", "gauge", (), "Topics that are open."),
    Family("topics_refused", "gauge", (), "Topics that are not served because their files are damaged."),
    # -- consumer groups
    Family("group_lag", "gauge", TG, "Rows of the stream that the group is not done with."),
    Family("group_outstanding", "gauge", TG, "Rows that its members hold."),
    Family("group_members", "gauge", TG, "Its members."),
    Family("group_dead_letters", "gauge", TG, "Rows that it gave up, and that are kept."),
    Family("group_redeliveries_total", "counter", T, "Rows delivered to a group once more, all groups of the topic."),
    Family("group_timeouts_total", "counter", T, "Deliveries that were not acked in time."),
    Family("group_dead_total", "counter", T, "Rows that groups gave up."),
    Family("group_rebalances_total", "counter", T, "Times that partitions were spread anew over members."),
    Family("groups_moved_on_total", "counter", T, "Places of groups that the log's start overtook: rows went unread."),
    # -- schedules
    Family("schedules", "gauge", (), "Schedules that are kept."),
    Family("schedules_failing", "gauge", (), "Schedules whose last firing could not be enqueued."),
    Family("schedule_fired_total", "counter", (), "Messages enqueued by schedules."),
    Family("schedule_missed_total", "counter", (), "Times that a schedule was late, and its misfire policy decided."),
    Family("schedule_failures_total", "counter", (), "Tries of firings that did not get in."),
    Family("schedule_delay_ms", "histogram", (), "From the moment that a firing was meant for until it was durable."),
    # -- storage
    Family("commit_latency_ms", "histogram", T, "A unit, from being handed to the disk until it is durable."),
    Family("fsync_latency_ms", "histogram", (), "The disk's own part of that: fdatasync, all files of the directory."),
    Family("commits_total", "counter", T, "Units written: many calls share one."),
    Family("uncommitted_bytes", "gauge", T, "Bytes that wait for the disk."),
    Family("journal_bytes", "gauge", T, "Size of the topic's segments."),
    Family("journal_segments", "gauge", T, "Number of the topic's segments."),
    Family("segments_reclaimed_total", "counter", T, "Segments given back."),
    Family("records_moved_total", "counter", T, "Messages rewritten so that their segment could go."),
    Family("snapshots_total", "counter", T, "Snapshots written."),
    Family("snapshot_age_seconds", "gauge", T, "Since the last snapshot, or since the topic was opened."),
    Family("corrupt_records_total", "counter", T, "Messages whose record did not check: set aside, never delivered."),
    Family("reloads_total", "counter", T, "Times that a failed write made the topic be loaded again from the disk."),
    Family("clock_jumps_total", "counter", T, "Times that the wall clock was seen to jump by more than a second."),
    Family("disk_free_bytes", "gauge", (), "Free on the file system of the data directory, for this user."),
    Family("disk_size_bytes", "gauge", (), "Size of that file system."),
    # -- the faces
    Family("calls_total", "counter", ("face", "call", "code"), "Calls that ended; OK, or gRPC's name of the code."),
    Family("call_duration_ms", "histogram", ("face", "call"), "The whole of a call in this process; not of streams."),
    Family("calls_open", "gauge", ("face", "call"), "Calls under way."),
    Family("streams_open", "gauge", ("face", "call"), "Those of them that are streams."),
    Family("audit_lines_lost_total", "counter", (), "Lines of the audit log that could not be written."),
    Family("engine_memory_bytes", "gauge", T, "Memory of heaps, timers and dedup."),
    Family("build_info", "gauge", ("version",), "Always 1."),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
