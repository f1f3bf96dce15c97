"""What a spine tells about itself, for the topic as a whole and for each partition. It only holds figures."""

from __future__ import annotations

from typing import NamedTuple


class PartitionStats(NamedTuple):
    candidates: int
    updates: int
    selections: int
    serving: bool
    throttled: str | None


class SpineStats(NamedTuple):
    """`refusals` are requests that leased nothing; `bound` is the K in force, None where a strategy gives it up."""

    partitions: int
    available: int
    candidates: int
    updates: int
    selections: int
    refusals: int
    bound: int | None
    per_partition: dict[int, PartitionStats]
