"""A clock that only tests move: wall and boot time in one object.

It satisfies `heapline.clock.Clock`. The simulator's event loop advances it; a plain test advances it manually.
"""

from __future__ import annotations

START_MS = 1_767_225_600_000  # 2026-01-01, so that ids and dates in tests look like real ones
_NS = 1_000_000_000


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
