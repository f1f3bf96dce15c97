"""Time as a parameter: who may read a clock, and what the engine makes of it.

Two times run side by side, both in ms since the Unix epoch. *Wall* is what the system says and may jump.
*Steady* starts at the wall's value (or at the journal's last, if that is later) and then follows boot time, so it
never jumps: leases, delays, back-off, ids and the journal's own time run on it. Only `deliver_at` looks at the wall.
"""

from __future__ import annotations

import time
from typing import Protocol

from heapline.core.now import Now


class Clock(Protocol):
    def wall_ms(self) -> int: ...

    def boot_ms(self) -> int: ...


class SystemClock:
    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


JUMP_MS = 1000  # a wall clock that departs from steady time by more than this between two reads has jumped


class SteadyClock:
    """Steady time for one journal: it continues from the journal's last time and never runs backwards.

    `time` and `wall` are those of the last unit. The wall clock shows how long the journal was closed. If it is behind
    steady time (it was ahead once and was corrected), steady time stays ahead of it and continues to run.
    """

    def __init__(self, clock: Clock, time: int = 0, wall: int | None = None) -> None:
        self._clock = clock
        self._boot = clock.boot_ms()
        then, wall = wall, clock.wall_ms()
        away = max(0, wall - then) if then is not None else 0
        self._base = max(time + away, wall)
        self._steady = self._base
        self._drift = wall - self._base
        self.jumps = 0
        self.last_jump_ms = 0

    def now(self) -> Now:
        wall = self._clock.wall_ms()
        self._steady = max(self._steady, self._base + self._clock.boot_ms() - self._boot)
        drift = wall - self._steady
        if abs(drift - self._drift) > JUMP_MS:
            self.jumps += 1
            self.last_jump_ms = drift - self._drift
            self._drift = drift
        return Now(self._steady, wall)
