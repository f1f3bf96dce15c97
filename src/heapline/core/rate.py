"""How many messages may go out by now: a token bucket in whole numbers, with time passed in.

The bucket fills by `rate` messages a second up to its size: `burst` seconds' worth, at least one message. What is
handed out empties it, so any second hands out at most rate + size. It starts full. What would overfill it is lost: the
limit is kept rather than the rate, so at a few messages a second whoever comes late for one gets the next one no
earlier.
A millionth of a message is the unit, and the rate is rounded down to whole units a millisecond.
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
        """From now on at another rate; what was saved up stays, as far as it fits."""
        self._fill(now)
        self._set(rate)
        self._level = min(self._level, self._size)

    def room(self, now: int) -> int:
        """How many messages may go out now."""
        self._fill(now)
        return max(0, self._level) // _MESSAGE

    def take(self, count: int) -> None:
        """So many went out; the caller has asked for room."""
        self._level -= count * _MESSAGE

    def next_in(self, now: int) -> int:
        """Milliseconds until there is room for one; 0 = there is."""
        self._fill(now)
        return max(0, -(-(_MESSAGE - self._level) // self._per_ms))

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._level = min(self._size, self._level + (now - self._at) * self._per_ms)
            self._at = now
