"""From ranges of offsets to pieces that tasks read: which units, and what is to be done about rows that are gone.

A piece is a run of units, for all partitions of a topic at once, because all of them share one journal: cut by
partition, every task would read the whole of it. Rows outside the ranges are left out when a piece is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from heapline.errors import BadRequest
from heapline.journal.unit import Unit
from heapline.logs import Log
from heapline.spark.decoding import Decoder
from heapline.spark.events import EventBatches
from heapline.spark.log import DataLost, Source, TopicLog, TopicRef
from heapline.spark.marks import Marks, Place
from heapline.spark.messages import MessageBatches
from heapline.spark.narrowing import Narrowing
from heapline.spark.options import ReadOptions
from heapline.spark.positions import Subscription

log_ = Log("heapline.spark")
Range = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Work:
    """What one task reads."""

    topic: TopicRef
    ranges: Range
    start: Place
    end: int  # number of the unit to stop before
    tolerant: frozenset[int]  # partitions of which messages are left out whose records are gone
    hold_from: float  # until then (as time.time() counts) whoever planned it holds the log for it


def plan(log: TopicLog, ranges: Range, options: ReadOptions) -> list[Work]:
    """The pieces of one topic. DataLost if rows that were asked for are gone, unless that is allowed."""
    while True:
        starts, ends, marks = log.starts(), log.ends(), log.marks()
        there = {p: _allowed(log, p, r, starts[p], ends[p], options.fail_on_loss) for p, r in ranges.items()}
        found = marks.span(there, log.last_unit())
        if found is None:
            return []
        start, end = found
        hold_from = log.hold(start)
        held = log.starts()
        if all(held[p] <= first for p, (first, last) in there.items() if first < last):
            break  # nothing of it went before it was held
    tolerant = frozenset(p for p, (first, _) in there.items() if first <= starts[p] or not options.fail_on_loss)
    pieces = marks.cut(start, end, options.piece_bytes, options.pieces_min)
    return [Work(log.ref, there, first, last, tolerant, hold_from) for first, last in pieces]


def _allowed(
    log: TopicLog, partition: int, asked: tuple[int, int], first: int, last: int, fail: bool
) -> tuple[int, int]:
    """The range as far as it is there."""
    start, end = asked
    if start >= end or (first <= start and end <= last):
        return asked
    lost = f"rows {start} to {min(first, end) - 1}" if start < first else f"rows {max(start, last)} to {end - 1}"
    where = f"partition {partition} of topic {log.ref.topic!r}, which has {first} to {last - 1}"
    if fail:
        raise DataLost(
            f"{lost} were asked for of {where}. What was reclaimed is gone: start at a later offset, or set "
            "failOnDataLoss=false to go on with what is there"
        )
    log_.warning("rows are gone", topic=log.ref.topic, partition=partition, start=start, end=end, log_start=first)
    return max(start, first), min(end, last)


def plan_batch(source: Source, options: ReadOptions, narrowing: Narrowing | None = None) -> list[Work]:
    """All that a batch reads, as it is now."""
    subscription = Subscription(source, options.which)
    work: list[Work] = []
    try:
        subscription.find()
        subscription.hold_all()
        starts = subscription.resolve(options.start, "startingOffsets", late=options.start_late)
        ends = subscription.resolve(options.end, "endingOffsets", late="latest")
        for topic, log in subscription.logs.items():
            ranges = {p: (start, ends[topic][p]) for p, start in starts[topic].items()}
            _check_forward(topic, ranges)
            if narrowing is not None:
                ranges = narrowing.narrowed(log, ranges)
            found = plan(log, ranges, options)
            work += found
            log.close(let_go=not found)  # tasks in other processes are to find what was planned
    except BaseException:
        subscription.close()
        raise
    return work


def _check_forward(topic: str, ranges: Range) -> None:
    for partition, (start, end) in ranges.items():
        if start > end:
            raise BadRequest(f"partition {partition} of topic {topic!r} would start at {start} and end at {end}")


class LogRecords:
    """Finds prepared records that lie before a piece (decoding.Recorded)."""

    def __init__(self, log: TopicLog) -> None:
        self._log = log
        self._marks: Marks | None = None

    def prepared_units(self, partition: int, first_id: int, before: int) -> Iterable[Unit]:
        if self._marks is None:
            self._log.look()
            self._marks = self._log.marks()
        return self._log.units(self._marks.before_id(partition, first_id), before)

    def all_units(self) -> Iterable[Unit]:
        self._log.look()
        return self._log.units(None, self._log.last_unit() + 1)


def read(source: Source, work: Work, options: ReadOptions) -> Iterator[Any]:
    """The Arrow batches of a piece."""
    log = source.open(work.topic)
    try:
        make = MessageBatches if options.view == "messages" else EventBatches
        decoder = Decoder(work.ranges, LogRecords(log), work.tolerant, make(work.topic.topic, options.columns))
        yield from decoder.batches(log.units(work.start, work.end, work.hold_from))
    finally:
        log.close()
