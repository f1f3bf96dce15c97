"""Rows of topics: their statistics, sorted by what a person looks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heapline.contract.message import TopicStats
from heapline.contract.topics import ListStats
from heapline.dashboard.caller import Caller

ROWS_MAX = 50  # of a page


async def read_stats(caller: Caller) -> tuple[list[TopicStats], bool]:
    """Return the statistics of the topics that the caller may see, and whether there are more."""
    return await caller.all(ListStats, limit=1000)


_KEYS: dict[str, Callable[[TopicStats], Any]] = {
    "oldest": lambda topic: -(topic.oldest_ready_age or 0.0),
    "ready": lambda topic: -topic.ready,
    "delayed": lambda topic: -topic.delayed,
    "leased": lambda topic: -topic.leased,
    "dead": lambda topic: -topic.dead,
    "topic": lambda topic: topic.topic,
}


class TopicRows:
    """Statistics in the order of one column."""

    def __init__(self, stats: Sequence[TopicStats], sort: str) -> None:
        self.sort = sort
        by = _KEYS[sort]
        self.rows = sorted(stats, key=lambda topic: (by(topic), topic.topic))
