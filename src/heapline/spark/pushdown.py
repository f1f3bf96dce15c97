"""Filter pushdown: turn Spark's filters into narrower ranges, so that rows which cannot match are not read.

Only comparisons of topic, partition, offset and timestamp with literals are used. Spark applies all filters again to
the result, so an ignored filter costs only time. Pushdown is off unless `pushdown=true` is set, because Spark fails a
reader that accepts filters while Spark's own setting for it is off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from heapline.contract.message import EPOCH
from heapline.spark.topic_log import TopicLog

Ranges = dict[int, tuple[int, int]]  # partition -> [start, end)
_MS = timedelta(milliseconds=1)


@dataclass
class Pushdown:
    """Conditions on rows: these topics and partitions, offsets and times in [low, high). None means no condition."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offset_low: int | None = None
    offset_high: int | None = None
    time_low: int | None = None  # ms
    time_high: int | None = None  # ms

    def narrow(self, log: TopicLog, ranges: Ranges) -> Ranges:
        """Return the parts of the ranges that can contain matching rows."""
        if self.topics is not None and log.ref.topic not in self.topics:
            return {}
        kept = {p: r for p, r in ranges.items() if self.partitions is None or p in self.partitions}
        return {p: self._narrow_range(log, p, *r) for p, r in kept.items()}

    def _narrow_range(self, log: TopicLog, partition: int, start: int, end: int) -> tuple[int, int]:
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

    def add(self, column: str, comparison: str, value: Any) -> None:
        """Add one of Spark's filters. A filter that cannot be used is ignored."""
        if comparison == "In":
            values = [v for v in value if v is not None]
        elif comparison == "EqualTo":
            values = [value]
        else:
            self._add_bound(column, comparison, value)
            return
        if column == "topic" and all(isinstance(v, str) for v in values):
            self.topics = _intersection(self.topics, values)
        elif column == "partition" and _are_ints(values):
            self.partitions = _intersection(self.partitions, values)
        elif column in ("offset", "timestamp") and values:
            self._add_bound(column, "GreaterThanOrEqual", min(values))
            self._add_bound(column, "LessThanOrEqual", max(values))

    def _add_bound(self, column: str, comparison: str, value: Any) -> None:
        if column == "offset" and _are_ints([value]):
            name, number = "offset", value
        elif column == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            # Rows have whole milliseconds, so a bound between two of them is rounded to the correct side.
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


def _intersection(known: frozenset[Any] | None, values: Iterable[Any]) -> frozenset[Any]:
    return frozenset(values) if known is None else known & frozenset(values)


def _are_ints(values: Iterable[Any]) -> bool:
    return all(type(v) is int for v in values)
