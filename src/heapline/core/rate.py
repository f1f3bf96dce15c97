"""A token bucket in integers that limits how many messages may go out; time is passed in.

The bucket fills by `rate` messages per second up to its size: `burst` seconds' worth, at least one message. Messages
that go out empty it, so at most rate + size go out in any second. It starts full. Overflow is lost: the limit takes
precedence over the rate, so at a few messages per second a caller that is late for one message does not get the next
one earlier. The unit is a millionth of a message, and the rate is rounded down to full units per millisecond.
"""

from __future__ import annotations

_MESSAGE = 1_000_000


class TokenBucket:
    def __init__(self, rate: float, now: int, burst: float = 0.1) -> None:
        self._at = now
        self._burst_ms = round(burst * 1000)
        self._level = 0
        self._set(rate)
        self._level = self._size

    def _set(self, rate: float) -> None:
        self.rate = rate
        self._per_ms = max(1, int(rate * 1000))
        self._size = max(_MESSAGE, self._burst_ms * self._per_ms)

    def change(self, rate: float, now: int) -> None:
        """Change the rate from now on; saved tokens stay, up to the new size."""
        self._fill(now)
        self._set(rate)
        self._level = min(self._level, self._size)

    def room(self, now: int) -> int:
        """Return how many messages may go out now."""
        self._fill(now)
        return max(0, self._level) // _MESSAGE

    def take(self, count: int) -> None:
        """Remove tokens for `count` messages; the caller has checked `room`."""
        self._level -= count * _MESSAGE

    def next_in(self, now: int) -> int:
        """Return the milliseconds until one message may go out; 0 = now."""
        self._fill(now)
        return max(0, -(-(_MESSAGE - self._level) // self._per_ms))

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._level = min(self._size, self._level + (now - self._at) * self._per_ms)
            self._at = now
