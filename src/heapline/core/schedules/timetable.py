"""Compute when one schedule fires next, and which firings are owed now. Time is passed in, in ms of wall time.

`after` is the time up to which firings are done: everything at or before it was fired, skipped, or was never meant to
fire. The owed firings follow from `after` and `now` alone, so they are the same before and after a crash.

A firing no older than the grace period is on time. If all owed firings are on time, all fire. If one is older, the
scheduler was not running (or the clock was set forward), and `misfire` decides which ones fire:

    skip   the latest, if that one is in time; else none
    once   the latest
    all    the latest `makeup_max`, oldest first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from heapline.contract.schedules import Schedule

if TYPE_CHECKING:
    from heapline.contract.cron import CronTimes


class Owed(NamedTuple):
    times: list[int]  # to be enqueued, oldest first
    until: int  # firings up to here are done once these are enqueued
    missed: bool = False  # some firings were late


class Timetable:
    """The firings of one schedule. `anchor_ms` is the start of `every` if the schedule has no start."""

    def __init__(self, schedule: Schedule, anchor_ms: int) -> None:
        self._schedule = schedule
        self._cron: CronTimes | None = None
        if schedule.cron is not None:
            from heapline.contract.cron import cron_times  # loads time zones, which few processes need

            self._cron = cron_times(schedule.cron, schedule.tz)
        else:
            self._every = schedule.every_ms or 1
            self._first = anchor_ms + self._every if schedule.starts_ms is None else schedule.starts_ms

    def next_fire(self, after: int) -> int | None:
        """Return the first firing later than `after`, or None if there are no more."""
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
        """Return the firings to enqueue now, oldest first."""
        return self.owed(after, now).times

    def _next_of_cron(self, cron: CronTimes, after: int) -> int | None:
        at = cron.next(after // 1000)
        return None if at is None else at * 1000

    def _next_of_every(self, after: int) -> int:
        # Even before the first firing, in step with it: a schedule created by a clock that was ahead can be rewound.
        return self._first + ((after - self._first) // self._every + 1) * self._every

    def _between(self, after: int, until: int) -> Iterator[int]:
        at = self.next_fire(after)
        while at is not None and at <= until:
            yield at
            at = self.next_fire(at)

    def _last(self, first: int, now: int) -> int:
        """Return the latest firing up to `now`, by bisection: a year's absence costs no more than a day's."""
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
        """Return the latest `count` firings in (after, last], searched backwards in growing windows."""
        window = count * 60_000
        while True:
            start = max(after, last - window)
            times = list(self._between(start, last))
            if len(times) >= count or start == after:
                return times[-count:]
            window *= 4
