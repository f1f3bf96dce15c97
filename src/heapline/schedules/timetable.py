"""When one schedule fires next, and which firings are owed now. Time is passed in, in ms of wall time.

`after` is how far its firings are done: everything at or before it was fired, skipped, or was never meant to fire.
What is owed follows from that and from `now` alone, so it is the same whoever asks, before and after a crash.

Firings that are no older than the grace are in time. If all that are owed are in time, all fire. If an older one is
among them somebody was away (or the clock was set forward), and `misfire` says what then:

    skip   the latest, if that one is in time; else none
    once   the latest
    all    the latest `makeup_max`, oldest first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from heapline.schedules.cron import CronTimes, cron_times
from heapline.schedules.definition import Schedule


class Owed(NamedTuple):
    times: list[int]  # to be enqueued, oldest first
    until: int  # up to where firings are done when these are
    missed: bool = False  # some were not in time


class Timetable:
    """The firings of one schedule. `anchor_ms` is what `every` counts from where the schedule has no start."""

    def __init__(self, schedule: Schedule, anchor_ms: int) -> None:
        self._schedule = schedule
        self._cron: CronTimes | None = None
        if schedule.cron is not None:
            self._cron = cron_times(schedule.cron, schedule.tz)
        else:
            self._every = schedule.every_ms or 1
            self._first = anchor_ms + self._every if schedule.starts_ms is None else schedule.starts_ms

    def next_fire(self, after: int) -> int | None:
        """The first firing later than `after`; None if there is none any more."""
        starts, ends = self._schedule.starts_ms, self._schedule.ends_ms
        if starts is not None:
            after = max(after, starts - 1)
        at = self._next_of_cron(self._cron, after) if self._cron else self._next_of_every(after)
        return at if at is not None and (ends is None or at < ends) else None

    def owed(self, after: int, now: int) -> Owed:
        first = self.next_fire(after)
        if first is None or first > now:
            return Owed([], after)
        in_time = now - self._schedule.grace_ms
        if first >= in_time:
            times = [first, *self._between(first, now)]
            return Owed(times, times[-1])
        last = self._last(first, now)
        if self._schedule.misfire == "all":
            return Owed(self._latest(after, last, self._schedule.makeup_max), last, True)
        skipped = self._schedule.misfire == "skip" and last < in_time
        return Owed([] if skipped else [last], last, True)

    def due(self, after: int, now: int) -> list[int]:
        """The firings to be enqueued now, oldest first."""
        return self.owed(after, now).times

    def _next_of_cron(self, cron: CronTimes, after: int) -> int | None:
        at = cron.next(after // 1000)
        return None if at is None else at * 1000

    def _next_of_every(self, after: int) -> int:
        # Also before the first, in step with it: a schedule made by a clock that was ahead can be rewound.
        return self._first + ((after - self._first) // self._every + 1) * self._every

    def _between(self, after: int, until: int) -> Iterator[int]:
        at = self.next_fire(after)
        while at is not None and at <= until:
            yield at
            at = self.next_fire(at)

    def _last(self, first: int, now: int) -> int:
        """The latest firing up to `now`, by halving: a year's absence costs no more than a day's."""
        last, high = first, now
        while last < high:
            middle = (last + high) // 2
            at = self.next_fire(middle)
            if at is None or at > now:
                high = middle
            else:
                last = at
        return last

    def _latest(self, after: int, last: int, count: int) -> list[int]:
        """The latest `count` firings in (after, last]: looked for backwards, in windows that grow."""
        window = count * 60_000
        while True:
            start = max(after, last - window)
            times = list(self._between(start, last))
            if len(times) >= count or start == after:
                return times[-count:]
            window *= 4
