"""Plan reads: divide ranges of offsets, narrowed by filters, into tasks of a batch or of a stream's next micro-batch.

A task reads a run of units for all partitions of a topic, because the partitions share one journal: if tasks were
divided by partition, each would read the whole journal. Rows outside the ranges are skipped when a task reads. Time is
passed in. Nothing here knows about Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from heapline.contract.errors import BadRequest
from heapline.contract.message import EPOCH
from heapline.journal.unit import Unit
from heapline.logs import Log
from heapline.spark.event_log import EventLog, no_payloads
from heapline.spark.offsets import Offsets, Subscription, check_incarnations, pack_offsets, unpack_offsets
from heapline.spark.options import EARLIEST, LATEST, Positions, ReadOptions
from heapline.spark.topic_log import DataLost, LogIndex, Ranges, Source, TopicLog, TopicRef, UnitPosition, share_out
from heapline.spark.views.decoder import Decoder
from heapline.spark.views.events import EventBatches, recorded_batches
from heapline.spark.views.messages import MessageBatches

log_ = Log("heapline.spark")
_MS = timedelta(milliseconds=1)
TOPICS_EVERY = 1.0  # seconds between checks for new topics


@dataclass(frozen=True)
class ReadTask:
    """The rows that one task reads."""

    topic: TopicRef
    ranges: Ranges
    start: UnitPosition
    end: int  # number of the unit to stop before
    tolerant: frozenset[int]  # partitions whose messages are skipped if their records are gone
    hold_from: float  # until this time (as time.time() counts) the planner holds the journal for the task


def check_view(log: TopicLog, options: ReadOptions) -> None:
    """Raise BadRequest for a view that the log does not have."""
    if options.view == "messages" and not log.ref.has_journal:
        raise no_payloads(log.ref.topic)


def plan(log: TopicLog, ranges: Ranges, options: ReadOptions) -> list[ReadTask]:
    """Return the tasks of one topic. Raises DataLost if requested rows are gone, unless loss is allowed."""
    check_view(log, options)
    while True:
        starts, ends, index = log.starts(), log.ends(), log.index()
        there = {p: _available(log, p, r, starts[p], ends[p], options.fail_on_loss) for p, r in ranges.items()}
        span = index.span(there, log.last_unit())
        if span is None:
            return []
        start, end = span
        hold_from = log.hold(start)
        held = log.starts()
        if all(held[p] <= first for p, (first, last) in there.items() if first < last):
            break  # nothing was reclaimed before the hold took effect
    tolerant = frozenset(p for p, (first, _) in there.items() if first <= starts[p] or not options.fail_on_loss)
    pieces = index.split(start, end, options.piece_bytes, options.pieces_min)
    return [ReadTask(log.ref, there, first, last, tolerant, hold_from) for first, last in pieces]


def _available(
    log: TopicLog, partition: int, wanted: tuple[int, int], first: int, last: int, fail: bool
) -> tuple[int, int]:
    """Return the part of the wanted range that the log has. Raises DataLost if that is not all and `fail` is set."""
    start, end = wanted
    if start >= end or (first <= start and end <= last):
        return wanted
    lost = f"rows {start} to {min(first, end) - 1}" if start < first else f"rows {max(start, last)} to {end - 1}"
    if fail:
        raise DataLost(
            f"{lost} of partition {partition} of topic {log.ref.topic!r} do not exist or were reclaimed; it has rows "
            f"{first} to {last - 1}. Start at a later offset, or set failOnDataLoss=false to read what is available"
        )
    log_.warning(
        "rows were reclaimed; reading what is available",
        topic=log.ref.topic,
        partition=partition,
        start=start,
        end=end,
        log_start=first,
    )
    return max(start, first), min(end, last)


def plan_batch(source: Source, options: ReadOptions, pushdown: Pushdown | None = None) -> list[ReadTask]:
    """Return the tasks of a batch read of the current log."""
    subscription = Subscription(source, options.selection)
    tasks: list[ReadTask] = []
    try:
        subscription.find()
        subscription.hold_all()
        starts = subscription.resolve(options.start, "startingOffsets", late=options.start_late)
        ends = subscription.resolve(options.end, "endingOffsets", late="latest")
        for topic, log in subscription.logs.items():
            ranges: Ranges = {p: (start, ends[topic][p]) for p, start in starts[topic].items()}
            _check_forward(topic, ranges)
            if pushdown is not None:
                ranges = pushdown.narrow(log, ranges)
            found = plan(log, ranges, options)
            tasks += found
            log.close(release=not found)  # tasks in other processes rely on the hold
    except BaseException:
        subscription.close()
        raise
    return tasks


def _check_forward(topic: str, ranges: Ranges) -> None:
    for partition, (start, end) in ranges.items():
        if start > end:
            raise BadRequest(
                f"partition {partition} of topic {topic!r}: start offset {start} is after end offset {end}"
            )


# -- filter pushdown ---------------------------------------------------------------------------------------------------


@dataclass
class Pushdown:
    """Conditions of Spark's filters: topics, partitions, and offsets and times in [low, high); None means any.

    Only comparisons of topic, partition, offset and timestamp with literals are used. Spark applies all filters again
    to the result, so an ignored filter costs only time. Pushdown is off unless `pushdown=true` is set, because Spark
    fails a reader that accepts filters while Spark's own setting for it is off.
    """

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


# -- reading -----------------------------------------------------------------------------------------------------------


class LogRecords:
    """Finds prepared records that were written before the units of a task (decoder.Recorded)."""

    def __init__(self, log: TopicLog) -> None:
        self._log = log
        self._index: LogIndex | None = None

    def prepared_units(self, partition: int, first_id: int, before: int) -> Iterable[Unit]:
        if self._index is None:
            self._log.refresh()
            self._index = self._log.index()
        return self._log.units(self._index.before_id(partition, first_id), before)

    def all_units(self) -> Iterable[Unit]:
        self._log.refresh()
        return self._log.units(None, self._log.last_unit() + 1)


def read(source: Source, task: ReadTask, options: ReadOptions) -> Iterator[Any]:
    """Yield the Arrow batches of a task."""
    log = source.open(task.topic)
    try:
        if isinstance(log, EventLog):
            batches = EventBatches(task.topic, options.columns)
            yield from recorded_batches(log.frames(task.start.unit, task.end), batches, task.start.unit, task.end)
            return
        make = MessageBatches if options.view == "messages" else EventBatches
        decoder = Decoder(task.ranges, LogRecords(log), task.tolerant, make(task.topic, options.columns))
        yield from decoder.batches(log.units(task.start, task.end, task.hold_from))
    finally:
        log.close()


# -- streams -----------------------------------------------------------------------------------------------------------


class StreamPlan:
    """Plans the next micro-batch of a stream: where it ends, and which tasks read it.

    Spark requests the next end every few milliseconds on an idle stream, so that costs only a check of each watermark.
    """

    def __init__(self, source: Source, options: ReadOptions) -> None:
        self._options = options
        self._subscription = Subscription(source, options.selection, options.fail_on_loss)
        self._subscription.find()
        for log in self._subscription.logs.values():
            check_view(log, options)
        self._goal: Offsets | None = None  # the end of the stream, if it has one
        self._batch_at: float | None = None  # when the last micro-batch was returned
        self._find_at = 0.0
        self._held: dict[str, UnitPosition | None] = {}  # by topic: the position held from; None: the whole log

    def first(self) -> dict[str, Any]:
        options = self._options
        if options.start.word != LATEST:
            self._subscription.hold_all()
            self._held = dict.fromkeys(self._subscription.logs)
        return self._pack(self._subscription.resolve(options.start, "startingOffsets", late=options.start_late))

    def last(self) -> dict[str, Any]:
        return self._pack(self._subscription.ends())

    def stop_here(self) -> None:
        """End the stream at the current end of the logs."""
        self._subscription.refresh()
        self._goal = self._subscription.ends()

    def next_end(self, packed: Mapping[str, Any], limit: int | None, may_wait: bool, now: float) -> dict[str, Any]:
        """Return the end of the batch that starts at `packed`, at most `limit` rows later; the start if it is empty."""
        self._refresh(now)
        starts, incarnations = unpack_offsets(packed)
        check_incarnations(incarnations, self._subscription.logs)
        ends = self._subscription.ends() if self._goal is None else self._goal
        starts = self._with_new(starts, ends)
        partitions = [(topic, p) for topic, parts in ends.items() for p in parts]
        first = [starts[t][p] for t, p in partitions]
        last = [self._not_before(t, p, starts[t][p], ends[t][p]) for t, p in partitions]
        rows = sum(last) - sum(first)
        if self._batch_at is None:
            self._batch_at = now
        if may_wait and self._goal is None and self._is_early(rows, now):
            return dict(packed)
        if rows:
            self._batch_at = now
        if limit is not None:
            last = share_out(limit, first, last)
        found = {topic: dict(parts) for topic, parts in starts.items()}  # a deleted topic keeps its offsets
        for (topic, partition), offset in zip(partitions, last, strict=True):
            found[topic][partition] = offset
        return self._pack(found, packed)

    def _not_before(self, topic: str, partition: int, start: int, end: int) -> int:
        if end < start and self._goal is None and self._options.fail_on_loss:
            raise DataLost(
                f"partition {partition} of topic {topic!r} ends at {end}, but rows up to {start} were already read; it "
                "may have been restored from a backup. Start a new query, or set failOnDataLoss=false to wait until "
                "the partition reaches this offset"
            )
        return max(start, end)

    def _refresh(self, now: float) -> None:
        if self._subscription.may_grow and now >= self._find_at:
            self._subscription.find()
            self._find_at = now + TOPICS_EVERY
        if self._goal is None:
            self._subscription.refresh()
        for topic, position in self._held.items():
            if topic in self._subscription.logs:
                self._subscription.logs[topic].hold(position)

    def _is_early(self, rows: int, now: float) -> bool:
        least, since = self._options.min_rows, self._batch_at
        return least is not None and rows < least and since is not None and now - since < self._options.max_delay

    def _with_new(self, starts: Offsets, ends: Offsets) -> Offsets:
        """Add topics and partitions that are new. They are read from their beginning, as by Kafka's source."""
        new = {t: [p for p in parts if p not in starts.get(t, {})] for t, parts in ends.items()}
        if not any(new.values()):
            return starts
        earliest = self._subscription.resolve(Positions(word=EARLIEST), "", late="latest")
        return {
            topic: {**{p: earliest[topic][p] for p in new.get(topic, ())}, **starts.get(topic, {})}
            for topic in {**starts, **ends}
        }

    def plan(self, packed_start: Mapping[str, Any], packed_end: Mapping[str, Any]) -> list[ReadTask]:
        starts, incarnations = unpack_offsets(packed_start)
        ends, _ = unpack_offsets(packed_end)
        logs = self._subscription.logs
        check_incarnations(incarnations, logs)
        self._subscription.refresh()
        starts = self._with_new(starts, {t: parts for t, parts in ends.items() if t in logs})
        tasks: list[ReadTask] = []
        for topic, parts in ends.items():
            ranges = {p: (starts[topic][p], end) for p, end in parts.items()}
            if any(start < end for start, end in ranges.values()) and topic in logs:
                found = plan(logs[topic], ranges, self._options)
                if found:
                    self._held[topic] = found[0].start
                tasks += found
        return tasks

    def _pack(self, offsets: Offsets, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        logs = self._subscription.logs
        packed = pack_offsets({t: parts for t, parts in offsets.items() if t in logs}, logs)
        return {**(before or {}), **packed}

    def close(self) -> None:
        self._subscription.close()
