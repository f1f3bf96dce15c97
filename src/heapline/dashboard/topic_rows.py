"""Rows of topics: their statistics, sorted by what a person looks for, and how much is done now."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from heapline.contract.errors import TopicNotFound
from heapline.contract.inspection import StatsSeries
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


# -- sparklines --------------------------------------------------------------------------------------------------------

SPARK_SPAN, SPARK_STEP = 900, 10.0  # seconds that a line shows, and after which it is drawn again
SPARK_COLUMNS = 40  # 2 px each, of a line that is 20 px high


async def sparks_of(caller: Caller, topics: Sequence[TopicStats]) -> dict[str, str]:
    """Return the points of a line by topic: messages that were ready over the last minutes.

    Only for topics whose statistics the caller has just read: the lines are shared among callers.
    """
    known, now = caller.memory.sparks, time.monotonic()
    for name in [name for name, (at, _) in known.items() if now - at > FORGET]:
        del known[name]
    for topic in topics:
        if topic.topic not in known or now - known[topic.topic][0] >= SPARK_STEP:
            with contextlib.suppress(TopicNotFound):  # deleted meanwhile
                end = datetime.now(UTC)
                series = await caller.do(StatsSeries(topic.topic, end - timedelta(seconds=SPARK_SPAN)))
                known[topic.topic] = now, spark(series.times, series.ready, int(end.timestamp()), topic.ready)
    return {topic.topic: known[topic.topic][1] for topic in topics if topic.topic in known}


def spark(times: Sequence[int], values: Sequence[int], end: int, now: int) -> str:
    """Return the points of a polyline: the value at each of SPARK_COLUMNS times, from the first known one on.

    Without points nothing has changed, so it is level.

    >>> spark([950, 990], [8, 0], 1000, 0)
    '76,1.0 78,1.0 80,19.0'
    >>> spark([], [], 1000, 0)[:13]
    '0,19.0 2,19.0'
    """
    if not times:
        times, values = [end - SPARK_SPAN], [now]
    starts = [end - SPARK_SPAN + SPARK_SPAN * column // SPARK_COLUMNS for column in range(SPARK_COLUMNS + 1)]
    first = min(bisect_left(starts, times[0]), SPARK_COLUMNS - 1)
    shown = [values[max(0, bisect_right(times, start) - 1)] for start in starts[first:]]
    most = max(*shown, 1)
    return " ".join(f"{column * 2},{19 - value / most * 18:.1f}" for column, value in enumerate(shown, first))


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
