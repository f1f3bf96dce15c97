"""A clock that tests move manually and that notifies its watchers: after `advance(60)`, due messages are served.

It starts at the real time, so that a `deliver_at` that the code under test takes from `datetime.now` means the same to
the broker. After that it does not move until a test advances it.
"""

from __future__ import annotations

import time
import weakref
from datetime import UTC, datetime, timedelta
from typing import Protocol

from heapline.testing.clock import FakeClock

#: Seconds that `advance` adds: a timer is never early and at most a tick (0.1 s by default) late, and a test that
#: advances a minute expects everything due within that minute.
LATE = 0.102


class Watcher(Protocol):
    def time_moved(self) -> None: ...


class HandClock(FakeClock):
    """
    >>> clock = HandClock()
    >>> before = clock.now()
    >>> clock.advance(90)
    >>> round((clock.now() - before).total_seconds())
    90
    """

    def __init__(self, wall_ms: int | None = None) -> None:
        super().__init__(time.time_ns() // 1_000_000 if wall_ms is None else wall_ms)
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()

    def watch(self, watcher: Watcher) -> None:
        """Notify the watcher of every move, for as long as it lives."""
        self._watchers.add(watcher)

    def now(self) -> datetime:
        """Return the wall time of this clock."""
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self.wall_ms())

    def advance(self, seconds: float | timedelta) -> None:
        """Advance the clock by `seconds` and one tick: delays, leases and backoffs that end by then have ended."""
        seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        super().advance(seconds + LATE if seconds > 0 else seconds)
        for watcher in list(self._watchers):
            watcher.time_moved()
