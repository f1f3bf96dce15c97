"""How much one caller may have at a time: streams and calls for each key, leases for each consumer, bytes a payload.

Counters of streams and calls, in memory; whoever takes gives back, also when it fails. What is over a limit is refused
with the limit's name, and changes nothing. Leases are counted where they are (server/limiting.py); what a limit means
for a topic as a whole is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from heapline.errors import BadRequest, PayloadTooLarge, ResourceExhausted


@dataclass(frozen=True, kw_only=True)
class Limits:
    streams_per_key: int = 4096  # open at a time; each costs a task and a buffer, and a fleet may share one key
    inflight_per_key: int = 4096  # calls under way at a time, waiting pops among them; more is a loop without a wait
    leases_per_consumer: int = 100_000  # messages of one topic that one holder may have out at a time
    payload_bytes_max: int = 16 << 20  # of one message, whatever its topic takes

    def validate(self) -> None:
        for name in ("streams_per_key", "inflight_per_key", "leases_per_consumer", "payload_bytes_max"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1")

    def check_payload(self, size: int, topic: str) -> None:
        if size > self.payload_bytes_max:
            raise PayloadTooLarge(size, self.payload_bytes_max, topic)


class Counter:
    """So many of one thing for each name; a name that has none costs nothing."""

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit = what, limit
        self._held: dict[str, int] = {}

    def take(self, name: str, n: int = 1) -> None:
        if self.room(name) < n:
            raise ResourceExhausted(f"{self.what} of {name}", self.limit)
        if n:
            self._held[name] = self._held.get(name, 0) + n

    def give_back(self, name: str, n: int = 1) -> None:
        left = self._held.get(name, 0) - n
        assert left >= 0, "more given back than taken"
        if left:
            self._held[name] = left
        else:
            self._held.pop(name, None)

    def room(self, name: str) -> int:
        return self.limit - self._held.get(name, 0)

    @contextmanager
    def hold(self, name: str, n: int = 1) -> Iterator[None]:
        self.take(name, n)
        try:
            yield
        finally:
            self.give_back(name, n)

    def __len__(self) -> int:
        return len(self._held)


class Limiter:
    def __init__(self, limits: Limits) -> None:
        limits.validate()
        self.streams = Counter("open streams", limits.streams_per_key)
        self.calls = Counter("calls under way", limits.inflight_per_key)
