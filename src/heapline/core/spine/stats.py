"""Statistics of a spine, for the topic and for each partition."""

from __future__ import annotations

from typing import NamedTuple


class PartitionStats(NamedTuple):
    candidates: int
    updates: int
    selections: int
    serving: bool
    throttled: str | None


class SpineStats(NamedTuple):
    """Spine counters. `refusals` are requests that leased nothing; `bound` is the K in force, or None."""

    partitions: int
    available: int
    candidates: int
    updates: int
    selections: int
    refusals: int
    bound: int | None
    per_partition: dict[int, PartitionStats]
