"""The holders that lease messages of a topic, and at which rate. Lost with the process; never decides anything."""

from __future__ import annotations

from typing import NamedTuple

WORKERS_MAX = 1000
MINUTE = 60_000
IDLE_MS = 3600_000


class Activity(NamedTuple):
    rate: float  # messages per second
    last_at: int  # ms


class Workers:
    """At most WORKERS_MAX holders; a new one replaces the one that came first."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}  # holder -> minute, messages in it, messages in the one before, last time

    def took(self, holder: str, count: int, now: int) -> None:
        minute = now // MINUTE
        seen = self._seen.get(holder)
        if seen is None:
            if len(self._seen) >= WORKERS_MAX:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[holder] = [minute, 0, 0, now]
        elif seen[0] != minute:
            seen[0], seen[1], seen[2] = minute, 0, seen[1] if seen[0] == minute - 1 else 0
        seen[1] += count
        seen[3] = now

    def active(self, now: int) -> dict[str, Activity]:
        """Return the holders that leased something in the last hour."""
        return {
            holder: Activity(self._rate(seen, now), seen[3])
            for holder, seen in self._seen.items()
            if now - seen[3] < IDLE_MS
        }

    @staticmethod
    def _rate(seen: list[int], now: int) -> float:
        """Count this minute, and of the minute before the part that is less than a minute ago."""
        age, past = now // MINUTE - seen[0], 1 - now % MINUTE / MINUTE
        messages = seen[1] + seen[2] * past if age == 0 else seen[1] * past if age == 1 else 0
        return messages / 60
