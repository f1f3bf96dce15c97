"""Statistics of topics, for made-up samples."""

from __future__ import annotations

from typing import Any

from heapline.contract.message import (
    DepthBucket,
    DueBucket,
    LatencyHistogram,
    LogStats,
    PartitionStats,
    SpineStats,
    TopicStats,
)

BOUNDS = [1.0, 10.0, 100.0]


def stats(topic: str = "jobs", width: int = 1, **given: Any) -> TopicStats:
    fields: dict[str, Any] = {
        "ready": 0, "delayed": 0, "leased": 0, "dead": 0, "paused": False, "durability": "", "enqueued_total": 0,
        "duplicates_total": 0, "leased_total": 0, "acked_total": 0, "nacked_total": 0, "lease_timeouts_total": 0,
        "dead_total": 0, "expired_total": 0,
    }  # fmt: skip
    spine = SpineStats(
        strategy="best_first", k=1, bound=1, partitions=width, available=width, candidates=0,
        updates_total=0, selections_total=0, refusals_total=0,
    )  # fmt: skip
    log = LogStats(
        commits_total=0, journal_bytes=1 << 20, journal_segments=1, journal_bytes_written_total=0, memory_bytes=4096,
        clock_jumps_total=0, reloads_total=0, corrupt_records_total=0,
    )  # fmt: skip
    parts = [PartitionStats(partition=n, ready=1000 + n, delayed=0, leased=0, dead=0, offset=0) for n in range(width)]
    return TopicStats(**{"topic": topic, "partitions": parts, "spine": spine, "log": log, **fields, **given})


def commits(quick: int) -> dict[str, LatencyHistogram]:
    return {"commit": LatencyHistogram(bounds_ms=BOUNDS, counts=[0, quick, 0, 0], sum_ms=5.0 * quick)}


def busy(topic: str, **given: Any) -> TopicStats:
    """Return statistics in which every field that is shown is set."""
    return stats(topic, **{
        "partitions": [
            PartitionStats(partition=0, ready=11, delayed=2, leased=3, dead=1, offset=9, oldest_ready_age=75.0),
            PartitionStats(partition=1, ready=0, delayed=0, leased=0, dead=0, offset=9, throttled="a bad disk"),
        ],
        "ready": 1_234_567, "delayed": 4321, "leased": 256, "dead": 3, "oldest_ready_age": 75.0, "lease_ends_in": 4.2,
        "depth_by_priority": [DepthBucket(n * 10, n * 10 + 9, n + 1) for n in range(12)],
        "due_histogram": [DueBucket(0, 1), DueBucket(1, 2), DueBucket(10, 4), DueBucket(60, 8), DueBucket(None, 16)],
        "latencies": commits(100),
        **given,
    })  # fmt: skip
