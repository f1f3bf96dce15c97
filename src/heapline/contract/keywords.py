"""The settings of a topic, a group and a schedule as keywords, for type checkers: `create_topic("jobs", tick=0.05)`.

A test compares them with TopicConfig, GroupConfig and CreateSchedule. Bounds and meanings are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal, TypedDict

from heapline.contract.config import Aging, Backoff


class TopicKeywords(TypedDict, total=False):
    """Settings of a topic."""

    mode: Literal["min", "max"]
    partitions: int
    k: int
    strategy: Literal["best_first", "round_robin", "weighted"]
    partition_weights: dict[int, float]
    max_staleness: float
    min_freshness: float
    ordering: Literal["strict"] | Aging
    streams: bool
    visibility_default: float
    lease_max: float
    max_retries_default: int
    backoff: Backoff
    dlq: bool
    dlq_retention: float
    dlq_max_letters: int
    dlq_max_bytes: int
    retention: float
    retention_bytes: int
    retention_margin: int
    retention_hard_bytes: int
    retention_hard_age: float
    dedup_window: float
    max_payload_bytes: int
    max_inflight: int
    max_backlog: int
    fairness: Literal["none", "keys"]
    max_inflight_per_key: int
    max_pops_per_second: float
    segment_bytes: int
    fsync: Literal["commit", "interval", "os"]
    fsync_interval: float
    tick: float
    compression: Literal["none", "zstd"]


class GroupKeywords(TypedDict, total=False):
    """Settings of a consumer group."""

    ack_timeout: float
    max_retries: int
    backoff: Backoff
    member_lease: float
    unused_after: float
    observer: bool


class ScheduleKeywords(TypedDict, total=False):
    """Settings of a schedule that `create_schedule` does not name."""

    starts: datetime | None
    ends: datetime | None
    misfire: Literal["skip", "once", "all"]
    grace: float | timedelta  # seconds
    makeup_max: int
    priority: int
    key: str | None
    headers: Mapping[str, str] | None
    ttl: float | None
    max_retries: int | None
    fairness_key: str | None
