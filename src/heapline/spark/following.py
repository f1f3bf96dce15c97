"""Following logs as a stream: up to where the next micro-batch goes, and what of it tasks read.

Asked for the next end every few milliseconds while nothing happens, so that costs a look at each watermark. Time is
passed in. Knows nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.spark.log import DataLost, Source
from heapline.spark.marks import Place, share_out
from heapline.spark.options import EARLIEST, LATEST, Positions, ReadOptions
from heapline.spark.planning import Work, plan
from heapline.spark.positions import Offsets, Subscription, check_incarnations, pack_offsets, unpack_offsets

TOPICS_EVERY = 1.0  # seconds between looks for new topics


class Following:
    def __init__(self, source: Source, options: ReadOptions) -> None:
        self._options = options
        self._subscription = Subscription(source, options.which, options.fail_on_loss)
        self._subscription.find()
        self._goal: Offsets | None = None  # where to stop for good
        self._batch_at: float | None = None  # when the last micro-batch was given
        self._find_at = 0.0
        self._held: dict[str, Place | None] = {}  # by topic: from where; None: all of it

    def first(self) -> dict[str, Any]:
        options = self._options
        if options.start.word != LATEST:
            self._subscription.hold_all()
            self._held = dict.fromkeys(self._subscription.logs)
        return self._pack(self._subscription.resolve(options.start, "startingOffsets", late=options.start_late))

    def last(self) -> dict[str, Any]:
        return self._pack(self._subscription.ends())

    def stop_here(self) -> None:
        """From now on nothing counts that is written later."""
        self._subscription.look()
        self._goal = self._subscription.ends()

    def next_end(self, told: Mapping[str, Any], limit: int | None, may_wait: bool, now: float) -> dict[str, Any]:
        """The end of the batch that begins there, at most `limit` rows on. The same as the start: nothing yet."""
        self._look(now)
        starts, incarnations = unpack_offsets(told)
        check_incarnations(incarnations, self._subscription.logs)
        ends = self._subscription.ends() if self._goal is None else self._goal
        starts = self._with_new(starts, ends)
        places = [(topic, p) for topic, parts in ends.items() for p in parts]
        first = [starts[t][p] for t, p in places]
        last = [self._not_before(t, p, starts[t][p], ends[t][p]) for t, p in places]
        rows = sum(last) - sum(first)
        if self._batch_at is None:
            self._batch_at = now
        if may_wait and self._goal is None and self._is_early(rows, now):
            return dict(told)
        if rows:
            self._batch_at = now
        if limit is not None:
            last = share_out(limit, first, last)
        found = {topic: dict(parts) for topic, parts in starts.items()}  # what is no longer there stays where it was
        for (topic, partition), offset in zip(places, last, strict=True):
            found[topic][partition] = offset
        return self._pack(found, told)

    def _not_before(self, topic: str, partition: int, start: int, end: int) -> int:
        if end < start and self._goal is None and self._options.fail_on_loss:
            raise DataLost(
                f"partition {partition} of topic {topic!r} ends at {end}, but rows up to {start} were read of it: was "
                "it restored from a backup? Start a new query, or set failOnDataLoss=false to wait until it gets there"
            )
        return max(start, end)

    def _look(self, now: float) -> None:
        if self._subscription.may_grow and now >= self._find_at:
            self._subscription.find()
            self._find_at = now + TOPICS_EVERY
        if self._goal is None:
            self._subscription.look()
        for topic, place in self._held.items():
            if topic in self._subscription.logs:
                self._subscription.logs[topic].hold(place)

    def _is_early(self, rows: int, now: float) -> bool:
        least, since = self._options.min_rows, self._batch_at
        return least is not None and rows < least and since is not None and now - since < self._options.max_delay

    def _with_new(self, starts: Offsets, ends: Offsets) -> Offsets:
        """Topics and partitions that came since are read from their beginning, as Kafka's source does."""
        new = {t: [p for p in parts if p not in starts.get(t, {})] for t, parts in ends.items()}
        if not any(new.values()):
            return starts
        earliest = self._subscription.resolve(Positions(word=EARLIEST), "", late="latest")
        return {
            topic: {**{p: earliest[topic][p] for p in new.get(topic, ())}, **starts.get(topic, {})}
            for topic in {**starts, **ends}
        }

    def plan(self, told_start: Mapping[str, Any], told_end: Mapping[str, Any]) -> list[Work]:
        starts, incarnations = unpack_offsets(told_start)
        ends, _ = unpack_offsets(told_end)
        logs = self._subscription.logs
        check_incarnations(incarnations, logs)
        self._subscription.look()
        starts = self._with_new(starts, {t: parts for t, parts in ends.items() if t in logs})
        work: list[Work] = []
        for topic, parts in ends.items():
            ranges = {p: (starts[topic][p], end) for p, end in parts.items()}
            if any(start < end for start, end in ranges.values()) and topic in logs:
                found = plan(logs[topic], ranges, self._options)
                if found:
                    self._held[topic] = found[0].start
                work += found
        return work

    def _pack(self, offsets: Offsets, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        logs = self._subscription.logs
        packed = pack_offsets({t: parts for t, parts in offsets.items() if t in logs}, logs)
        return {**(before or {}), **packed}

    def close(self) -> None:
        self._subscription.close()
