"""Sample a server's topics, and derive rates, latencies and curves from several samples.

A rate is the difference of a total between two samples. If a total decreases, because the server was restarted or the
topic was created again, rates are unknown until the next sample. An error of a single topic (it reloads, is corrupt,
or the caller lacks the right) is shown in its row. An error of the server as a whole is raised.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, NamedTuple

from heapline.contract.broker import Broker
from heapline.contract.errors import (
    CorruptionError,
    DeadlineExceeded,
    HeaplineError,
    PermissionDenied,
    TopicNotFound,
    TopicReloading,
)
from heapline.contract.message import TopicStats

CONCURRENT_CALLS = 16
HISTORY = 300  # values of a curve; few terminals are wider
LATENCY_SAMPLES = 30  # latencies cover this many samples

Sort = Literal["ready", "delayed", "leased", "dead", "in", "out", "oldest", "due", "name"]
SORTS: tuple[Sort, ...] = ("ready", "delayed", "leased", "dead", "in", "out", "oldest", "due", "name")
_TROUBLES = (
    (PermissionDenied, "no permission"),
    (CorruptionError, "damaged: see heapline journal verify"),
    (TopicReloading, "reloading"),
    (DeadlineExceeded, "no answer"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """All topics at one time. A topic without statistics has a short reason instead."""

    at: float  # seconds of a monotonic clock
    topics: Mapping[str, TopicStats | str]


async def sample(broker: Broker, only: str | None = None) -> Sample:
    """Read the statistics of all topics, or of one. Raise TopicNotFound if that one does not exist."""
    if only is not None:
        return Sample(monotonic(), {only: await broker.stats(only)})
    names = [info.name for info in await broker.list_topics()]
    slots, unanswered = asyncio.Semaphore(CONCURRENT_CALLS), list[HeaplineError]()

    async def read(name: str) -> TopicStats | str | None:
        async with slots:
            if len(unanswered) >= min(CONCURRENT_CALLS, len(names)):
                raise unanswered[0]  # the server fails, not a topic
            try:
                return await broker.stats(name)
            except TopicNotFound:
                return None  # deleted meanwhile
            except HeaplineError as error:
                if isinstance(error, DeadlineExceeded):
                    unanswered.append(error)
                return next((text for kind, text in _TROUBLES if isinstance(error, kind)), type(error).__name__)

    stats = await asyncio.gather(*map(read, names))
    if names and len(unanswered) == len(names):
        raise unanswered[0]
    return Sample(monotonic(), {name: read for name, read in zip(names, stats, strict=True) if read is not None})


class Rates(NamedTuple):
    """Messages per second."""

    enqueued: float
    acked: float
    leased: float
    nacked: float
    timeouts: float
    dead: float


class Percentiles(NamedTuple):
    """Milliseconds, or None if there were no calls."""

    p50: float | None
    p99: float | None


@dataclass(slots=True)
class TopicWatch:
    """One topic over time."""

    name: str
    stats: TopicStats | None = None
    trouble: str = ""  # why `stats` is older than the last sample
    rates: Rates | None = None
    served: dict[int, float] = field(default_factory=dict)  # partition -> messages leased per second
    entered: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY))  # per second, by sample
    left: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _at: float = 0.0
    _earlier: deque[TopicStats] = field(default_factory=lambda: deque(maxlen=LATENCY_SAMPLES))

    def add(self, at: float, stats: TopicStats | str) -> None:
        if isinstance(stats, str):
            self.trouble, self.rates, self.served = stats, None, {}
        else:
            self._compare(stats, at - self._at)
            self.stats, self.trouble, self._at = stats, "", at
            self._earlier.append(stats)
        self.entered.append(self.rates and self.rates.enqueued)
        self.left.append(self.rates and self.rates.acked)

    def _compare(self, new: TopicStats, seconds: float) -> None:
        old, self.rates, self.served = self.stats, None, {}
        if old is None or seconds <= 0:
            return
        increases = [b - a for a, b in zip(_totals(old), _totals(new), strict=True)]
        if min(increases) < 0:
            self._earlier.clear()
            return
        self.rates = Rates(*(number / seconds for number in increases))
        before = {p.partition: p.leased_total for p in old.partitions}
        self.served = {
            p.partition: max(0, p.leased_total - before.get(p.partition, 0)) / seconds for p in new.partitions
        }

    def latency(self, call: str) -> Percentiles:
        """Return percentiles over the last samples, or since the topic was opened after the first one."""
        if not self._earlier or call not in self._earlier[-1].latencies:
            return Percentiles(None, None)
        newest = self._earlier[-1].latencies[call]
        counts = newest.counts
        if len(self._earlier) > 1 and call in self._earlier[0].latencies:
            oldest = self._earlier[0].latencies[call]
            counts = [max(0, b - a) for a, b in zip(oldest.counts, newest.counts, strict=False)]
        return Percentiles(*(percentile_ms(newest.bounds_ms, counts, percent) for percent in (50, 99)))

    def due_within(self, seconds: float) -> int | None:
        """Return the number of delayed messages that become due within this many seconds."""
        if self.stats is None or not self.stats.due_histogram:
            return None
        return sum(b.count for b in self.stats.due_histogram if b.within is not None and b.within <= seconds)


class Totals(NamedTuple):
    """Sums over all topics with statistics."""

    ready: int
    delayed: int
    leased: int
    dead: int
    enqueued: float | None  # per second
    acked: float | None
    journal_bytes: int | None = None  # None: the broker lacks the feature "log"
    memory_bytes: int | None = None


class Watch:
    """A server over time."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicWatch] = {}
        self.samples = 0
        self.entered: deque[float | None] = deque(maxlen=HISTORY)
        self.left: deque[float | None] = deque(maxlen=HISTORY)

    def add(self, new: Sample) -> None:
        self.samples += 1
        self.topics = {name: self.topics.get(name) or TopicWatch(name) for name in new.topics}
        for name, stats in new.topics.items():
            self.topics[name].add(new.at, stats)
        totals = self.totals()
        self.entered.append(totals.enqueued)
        self.left.append(totals.acked)

    def miss(self) -> None:
        """Record a failed sample: curves get a gap, and the numbers stay."""
        for curve in (self.entered, self.left, *(c for t in self.topics.values() for c in (t.entered, t.left))):
            curve.append(None)

    def totals(self) -> Totals:
        known = [topic.stats for topic in self.topics.values() if topic.stats is not None]
        rates = [topic.rates for topic in self.topics.values() if topic.rates is not None]
        are_rates_known = bool(rates) or (self.samples > 1 and not self.topics)
        sums = {name: sum(getattr(stats, name) for stats in known) for name in ("ready", "delayed", "leased", "dead")}
        logs = [stats.log for stats in known if stats.log is not None]
        if logs or not known:
            sums["journal_bytes"] = sum(log.journal_bytes for log in logs)
            sums["memory_bytes"] = sum(log.memory_bytes for log in logs)
        enqueued, acked = sum(r.enqueued for r in rates), sum(r.acked for r in rates)
        return Totals(**sums, enqueued=enqueued if are_rates_known else None, acked=acked if are_rates_known else None)

    def rows(self, sort: Sort = "ready", reverse: bool = False, only: str = "") -> list[TopicWatch]:
        """Return the matching topics, the largest first (or A first by name). Equal ones are sorted by name."""
        rows = sorted((t for t in self.topics.values() if matches(t.name, only)), key=lambda t: t.name)
        if sort != "name":
            rows.sort(key=lambda topic: _rank(topic, sort), reverse=True)
        return rows[::-1] if reverse else rows


def matches(name: str, only: str) -> bool:
    """Return whether a name contains one of several texts, which are separated by spaces or commas.

    >>> matches("mail/send", "END"), matches("jobs", "mail, jo"), matches("jobs", "x")
    (True, True, False)
    """
    parts = only.replace(",", " ").casefold().split()
    return not parts or any(part in name.casefold() for part in parts)


def _rank(topic: TopicWatch, sort: Sort) -> float:
    stats, rates = topic.stats, topic.rates
    if stats is None:
        return -1.0
    if sort in ("in", "out"):
        return -1.0 if rates is None else rates.enqueued if sort == "in" else rates.acked
    if sort == "oldest":
        return -1.0 if stats.oldest_ready_age is None else stats.oldest_ready_age
    return float(topic.due_within(60) or 0) if sort == "due" else float(getattr(stats, sort))


def _totals(stats: TopicStats) -> Iterable[int]:
    names = ("enqueued", "acked", "leased", "nacked", "lease_timeouts", "dead")
    return [getattr(stats, f"{name}_total") for name in names]


def percentile_ms(bounds_ms: Sequence[float], counts: Sequence[int], percent: float) -> float | None:
    """Interpolate a percentile in a histogram. Values above the last bound count as that bound.

    >>> percentile_ms([1.0, 2.0], [50, 50, 0], 75)
    1.5
    """
    wanted, passed = sum(counts) * percent / 100, 0.0
    if not wanted:
        return None
    low = 0.0
    for high, count in zip(bounds_ms, counts, strict=False):
        if count and passed + count >= wanted:
            return low + (high - low) * (wanted - passed) / count
        passed, low = passed + count, high
    return low
