"""What `heapline top` knows of a server: looks at its topics, and what two or more of them say together.

Totals become rates by comparing two looks; a total that went down (the server was started again, or the topic made
anew) says nothing until the next one. Histories are kept for the little curves. Pure: it neither asks nor draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from heapline.cli.top.figures import percentile_ms
from heapline.model import TopicStats

HISTORY = 300  # values of a curve; no terminal is much wider
LATENCY_LOOKS = 30  # how many looks back latencies are told over

Sort = Literal["ready", "delayed", "leased", "dead", "in", "out", "oldest", "due", "name"]
SORTS: tuple[Sort, ...] = ("ready", "delayed", "leased", "dead", "in", "out", "oldest", "due", "name")


@dataclass(frozen=True, slots=True)
class Look:
    """All topics at one moment. One that could not be asked has, instead of figures, a few words why."""

    at: float  # seconds of a clock that never goes back
    topics: Mapping[str, TopicStats | str]


class Rates(NamedTuple):
    """Messages a second."""

    enqueued: float
    acked: float
    leased: float
    nacked: float
    timeouts: float
    dead: float


class Percentiles(NamedTuple):
    """Milliseconds; None where nothing happened."""

    p50: float | None
    p99: float | None


@dataclass(slots=True)
class TopicWatch:
    """One topic over time."""

    name: str
    stats: TopicStats | None = None
    trouble: str = ""  # why the figures are not of the last look
    rates: Rates | None = None
    served: dict[int, float] = field(default_factory=dict)  # partition -> messages leased a second
    entered: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY))  # a second, by look
    left: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _at: float = 0.0
    _earlier: deque[TopicStats] = field(default_factory=lambda: deque(maxlen=LATENCY_LOOKS))

    def add(self, at: float, told: TopicStats | str) -> None:
        if isinstance(told, str):
            self.trouble, self.rates, self.served = told, None, {}
        else:
            self._compare(told, at - self._at)
            self.stats, self.trouble, self._at = told, "", at
            self._earlier.append(told)
        self.entered.append(self.rates and self.rates.enqueued)
        self.left.append(self.rates and self.rates.acked)

    def _compare(self, new: TopicStats, seconds: float) -> None:
        old, self.rates, self.served = self.stats, None, {}
        if old is None or seconds <= 0:
            return
        gone = _totals(old)
        grown = [b - a for a, b in zip(gone, _totals(new), strict=True)]
        if min(grown) < 0:
            self._earlier.clear()
            return
        self.rates = Rates(*(number / seconds for number in grown))
        before = {p.partition: p.leased_total for p in old.partitions}
        self.served = {
            p.partition: max(0, p.leased_total - before.get(p.partition, 0)) / seconds for p in new.partitions
        }

    def latency(self, what: str) -> Percentiles:
        """Over the last looks, or since the topic was opened if there was but one."""
        if not self._earlier or what not in self._earlier[-1].latencies:
            return Percentiles(None, None)
        newest = self._earlier[-1].latencies[what]
        counts = newest.counts
        if len(self._earlier) > 1 and what in self._earlier[0].latencies:
            oldest = self._earlier[0].latencies[what]
            counts = [max(0, b - a) for a, b in zip(oldest.counts, newest.counts, strict=False)]
        return Percentiles(*(percentile_ms(newest.bounds_ms, counts, percent) for percent in (50, 99)))

    def due_within(self, seconds: float) -> int | None:
        """Delayed messages that fall due within so many seconds, or are about to."""
        if self.stats is None or not self.stats.due_histogram:
            return None
        return sum(b.count for b in self.stats.due_histogram if b.within is not None and b.within <= seconds)


class Totals(NamedTuple):
    """Of all topics that could be asked."""

    ready: int
    delayed: int
    leased: int
    dead: int
    enqueued: float | None  # a second
    acked: float | None
    journal_bytes: int
    memory_bytes: int


class Watch:
    """A server over time."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicWatch] = {}
        self.looks = 0
        self.entered: deque[float | None] = deque(maxlen=HISTORY)
        self.left: deque[float | None] = deque(maxlen=HISTORY)

    def add(self, look: Look) -> None:
        self.looks += 1
        self.topics = {name: self.topics.get(name) or TopicWatch(name) for name in look.topics}
        for name, told in look.topics.items():
            self.topics[name].add(look.at, told)
        totals = self.totals()
        self.entered.append(totals.enqueued)
        self.left.append(totals.acked)

    def miss(self) -> None:
        """A look that failed: curves have a gap there, and the figures stay."""
        for curve in (self.entered, self.left, *(c for t in self.topics.values() for c in (t.entered, t.left))):
            curve.append(None)

    def totals(self) -> Totals:
        known = [topic.stats for topic in self.topics.values() if topic.stats is not None]
        rates = [topic.rates for topic in self.topics.values() if topic.rates is not None]
        is_quiet = self.looks > 1 and not self.topics  # no topics at all: nothing goes in or out
        return Totals(
            sum(s.ready for s in known), sum(s.delayed for s in known), sum(s.leased for s in known),
            sum(s.dead for s in known),
            sum(r.enqueued for r in rates) if rates or is_quiet else None,
            sum(r.acked for r in rates) if rates or is_quiet else None,
            sum(s.journal_bytes for s in known), sum(s.memory_bytes for s in known),
        )  # fmt: skip

    def rows(self, sort: Sort = "ready", reverse: bool = False, only: str = "") -> list[TopicWatch]:
        """Topics whose names match, the greatest first (by name: A first); those of equal rank by name."""
        rows = sorted((t for t in self.topics.values() if matches(t.name, only)), key=lambda t: t.name)
        if sort != "name":
            rows.sort(key=lambda topic: _rank(topic, sort), reverse=True)
        return rows[::-1] if reverse else rows


def matches(name: str, only: str) -> bool:
    """Part of a name; several with spaces or commas between, of which one must be in it.

    >>> matches("mail/send", "END"), matches("jobs", "mail, jo"), matches("jobs", "x")
    (True, True, False)
    """
    parts = only.replace(",", " ").casefold().split()
    return not parts or any(part in name.casefold() for part in parts)


def _rank(topic: TopicWatch, sort: Sort) -> float:
    stats, rates = topic.stats, topic.rates
    if stats is None:
        return -1.0
    if sort == "in":
        return rates.enqueued if rates else -1.0
    if sort == "out":
        return rates.acked if rates else -1.0
    if sort == "oldest":
        return -1.0 if stats.oldest_ready_age is None else stats.oldest_ready_age
    if sort == "due":
        return float(topic.due_within(60) or 0)
    return float(getattr(stats, sort))


def _totals(stats: TopicStats) -> Iterable[int]:
    return (
        stats.enqueued_total, stats.acked_total, stats.leased_total, stats.nacked_total, stats.lease_timeouts_total,
        stats.dead_total,
    )  # fmt: skip
