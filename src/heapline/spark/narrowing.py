"""Filters that Spark hands over, as narrower ranges: rows that none of them could pass are not read at all.

Only what ranges can say is used: topic, partition, offset and timestamp, compared with one value or some. Spark applies
all filters once more to what comes, so leaving one out costs time and nothing else. Off unless `pushdown=true` is set,
because Spark fails a reader that takes filters while its own switch for that is off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from heapline.model import EPOCH
from heapline.spark.log import TopicLog

Range = dict[int, tuple[int, int]]
_MS = timedelta(milliseconds=1)


@dataclass
class Narrowing:
    """What rows must be like: among these topics and partitions, at offsets and times in [low, high)."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offset_low: int | None = None
    offset_high: int | None = None
    time_low: int | None = None  # ms
    time_high: int | None = None

    def narrowed(self, log: TopicLog, ranges: Range) -> Range:
        if self.topics is not None and log.ref.topic not in self.topics:
            return {}
        kept = {p: r for p, r in ranges.items() if self.partitions is None or p in self.partitions}
        return {p: self._cut(log, p, *r) for p, r in kept.items()}

    def _cut(self, log: TopicLog, partition: int, start: int, end: int) -> tuple[int, int]:
        lows, highs = [start], [end]
        if self.offset_low is not None:
            lows.append(self.offset_low)
        if self.offset_high is not None:
            highs.append(self.offset_high)
        if self.time_low is not None:
            at = log.offset_at(partition, self.time_low)
            lows.append(end if at is None else at)
        if self.time_high is not None and (at := log.offset_at(partition, self.time_high)) is not None:
            highs.append(at)
        low, high = max(lows), min(highs)
        return (low, high) if low < high else (start, start)

    # -- from Spark's filters --------------------------------------------------------------------------------------

    def take(self, column: str, comparison: str, value: Any) -> None:
        """One more thing that rows must be like; what is not understood is passed over."""
        if comparison == "In":
            values = [v for v in value if v is not None]
        elif comparison == "EqualTo":
            values = [value]
        else:
            self._take_bound(column, comparison, value)
            return
        if column == "topic" and all(isinstance(v, str) for v in values):
            self.topics = _both(self.topics, values)
        elif column == "partition" and _are_ints(values):
            self.partitions = _both(self.partitions, values)
        elif column in ("offset", "timestamp") and values:
            self._take_bound(column, "GreaterThanOrEqual", min(values))
            self._take_bound(column, "LessThanOrEqual", max(values))

    def _take_bound(self, column: str, comparison: str, value: Any) -> None:
        if column == "offset" and _are_ints([value]):
            name, number = "offset", value
        elif column == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            # Rows have whole milliseconds: a bound between two of them leaves the later one out, or in.
            number, rest = divmod(value - EPOCH, _MS)
            name, number = "time", number + (bool(rest) and comparison in ("GreaterThanOrEqual", "LessThan"))
        else:
            return
        if comparison in ("GreaterThan", "GreaterThanOrEqual"):
            low = number + (comparison == "GreaterThan")
            before = getattr(self, f"{name}_low")
            setattr(self, f"{name}_low", low if before is None else max(before, low))
        elif comparison in ("LessThan", "LessThanOrEqual"):
            high = number + (comparison == "LessThanOrEqual")
            before = getattr(self, f"{name}_high")
            setattr(self, f"{name}_high", high if before is None else min(before, high))


def _both(known: frozenset[Any] | None, values: Iterable[Any]) -> frozenset[Any]:
    return frozenset(values) if known is None else known & frozenset(values)


def _are_ints(values: Iterable[Any]) -> bool:
    return all(type(v) is int for v in values)
