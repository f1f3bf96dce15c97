"""Rows of topics: their statistics, sorted by what a person looks for, and how much is done now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from heapline.contract.message import TopicStats
from heapline.contract.topics import ListStats
from heapline.dashboard.caller import Caller, SharedStats

ROWS_MAX = 50  # of a page
FORGET = 60.0  # seconds after which a reading is not kept
READ_SHARE = 80.0  # so that reading a thousand topics takes an eightieth of a core, however many pages are open


async def read_stats(caller: Caller) -> tuple[list[TopicStats], bool]:
    """Return the statistics of the topics that the caller may see, and whether there are more.

    All pages of callers with the same rights share a reading, for READ_SHARE times as long as it took the processor.
    """
    known, now = caller.memory.stats, time.monotonic()
    for scopes in [scopes for scopes, each in known.items() if now - each.read_at > FORGET and not each.lock.locked()]:
        del known[scopes]
    shared = known.setdefault(caller.principal.scopes, SharedStats())
    async with shared.lock:
        if shared.found is None or time.monotonic() - shared.read_at >= READ_SHARE * shared.took:
            began = time.thread_time()
            shared.found = await caller.all(ListStats, limit=1000)
            shared.took, shared.read_at = time.thread_time() - began, time.monotonic()
            caller.memory.shared_seconds += shared.took
        return shared.found


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


# -- rates -------------------------------------------------------------------------------------------------------------

RATE_STEP, RATE_SPAN = 2.0, 10.0  # seconds between two samples of a topic, and over which its rates are taken
STALE = 30.0  # seconds after which a sample says nothing about now


class Rate(NamedTuple):
    """Messages per second over the last seconds; None: not known yet."""

    enqueued: float | None
    done: float | None


Samples = deque[tuple[float, int, int]]  # time, and both totals


def rates_now(caller: Caller, stats: Sequence[TopicStats]) -> dict[str, Rate]:
    """Return the rates of topics, from the totals that were read the last times."""
    totals, shared = caller.memory.totals, caller.memory.stats.get(caller.principal.scopes)
    now = time.monotonic() if shared is None else shared.read_at
    for name in [name for name, samples in totals.items() if now - samples[-1][0] > STALE]:
        del totals[name]
    return {topic.topic: _rate(totals, topic, now) for topic in stats}


def _rate(totals: dict[str, Samples], topic: TopicStats, now: float) -> Rate:
    samples = totals.setdefault(topic.topic, deque(maxlen=int(RATE_SPAN / RATE_STEP) + 1))
    if samples and topic.enqueued_total < samples[-1][1]:
        samples.clear()  # the topic was opened again
    if not samples or now - samples[-1][0] >= RATE_STEP:
        samples.append((now, topic.enqueued_total, topic.acked_total))
    at, enqueued, done = samples[0]
    seconds = samples[-1][0] - at
    if seconds < RATE_STEP:
        return Rate(None, None)
    return Rate((samples[-1][1] - enqueued) / seconds, (samples[-1][2] - done) / seconds)
