"""Limit failed attempts: a bucket per name and one for all names together.

An attempt takes one from both buckets, and a successful one puts it back, so only failures count. Buckets refill over
time. Names come from outside, so only the most recent thousands are kept: a client that tries many names escapes the
limit per name and meets the limit for all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from heapline.clock import Clock

NAMES_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class Allowance:
    burst: int  # failures allowed at once
    refill_ms: int  # one more is allowed after each interval of this length


class Bucket:
    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: int) -> None:
        self.tokens, self.at = tokens, at

    def fill(self, allowance: Allowance, now: int) -> None:
        self.tokens = min(float(allowance.burst), self.tokens + max(0, now - self.at) / allowance.refill_ms)
        self.at = now


class Throttle:
    def __init__(self, clock: Clock, by_name: Allowance, overall: Allowance) -> None:
        self._clock = clock
        self._by_name, self._overall = by_name, overall
        self._all = Bucket(overall.burst, clock.boot_ms())
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    @property
    def burst(self) -> int:
        return self._by_name.burst

    def admit(self, name: str) -> bool:
        """Take an attempt and return True, or return False if none is left. A rejected attempt costs nothing."""
        now = self._clock.boot_ms()
        bucket = self._buckets.setdefault(name, Bucket(self._by_name.burst, now))
        self._buckets.move_to_end(name)
        if len(self._buckets) > NAMES_MAX:
            self._buckets.popitem(last=False)
        bucket.fill(self._by_name, now)
        self._all.fill(self._overall, now)
        if bucket.tokens < 1 or self._all.tokens < 1:
            return False
        bucket.tokens -= 1
        self._all.tokens -= 1
        return True

    def succeeded(self, name: str) -> None:
        if name in self._buckets:
            self._buckets[name].tokens += 1
        self._all.tokens += 1
