"""Clocks that only tests move: wall and boot time in one object.

They satisfy `heapline.clock.Clock`. The simulator's event loop advances a `FakeClock`. A plain test advances a
`HandClock`, which notifies its watchers: after `advance(60)`, the messages that became due are served.
"""

from __future__ import annotations

import time
import weakref
from datetime import UTC, datetime, timedelta
from typing import Protocol

START_MS = 1_767_225_600_000  # 2026-01-01, so that ids and dates in tests look like real ones
_NS = 1_000_000_000
#: Seconds that `advance` adds: a timer is never early and at most a tick (0.1 s by default) late, and a test that
#: advances a minute expects everything due within that minute.
LATE = 0.102


class FakeClock:
    """Wall and boot time under the control of a test.

    >>> clock = FakeClock()
    >>> before = clock.boot_ms()
    >>> clock.advance(1.5)
    >>> clock.boot_ms() - before
    1500
    """

    def __init__(self, wall_ms: int = START_MS, boot_ms: int = 1_000_000) -> None:
        self.elapsed_ns = 0  # true time since the clock was created; neither jumps nor reboots
        self._boot_ns = boot_ms * 1_000_000
        self._wall_ns = wall_ms * 1_000_000

    def wall_ms(self) -> int:
        return (self._wall_ns + self.elapsed_ns) // 1_000_000

    def boot_ms(self) -> int:
        return (self._boot_ns + self.elapsed_ns) // 1_000_000

    def advance(self, seconds: float) -> None:
        """Advance both clocks."""
        self.advance_ns(round(seconds * _NS))

    def advance_ns(self, ns: int) -> None:
        if ns < 0:
            raise ValueError("time does not run backwards; to set the wall clock back use jump_wall")
        self.elapsed_ns += ns

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back. Boot time does not change."""
        self._wall_ns += round(seconds * _NS)

    def reboot(self) -> None:
        """Simulate a reboot: boot time restarts at zero, and wall time continues."""
        self._boot_ns = -self.elapsed_ns


class Watcher(Protocol):
    def time_moved(self) -> None: ...


class HandClock(FakeClock):
    """A clock that starts at the real time and then moves only when a test advances it.

    So a `deliver_at` that the code under test takes from `datetime.now` means the same to the broker.

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
