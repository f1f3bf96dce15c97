"""What the server is to reach, as data: the table says of each figure whether it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: (messages a batch, calls in flight) → messages a second for enqueue → pop → ack.
LIFECYCLE_PER_S = {(100, 16): 60_000, (1000, 4): 120_000}
ENQUEUE_PER_S = {(1000, 4): 200_000}
#: How many times as fast as each peer, at 100 a batch and 16 in flight.
PEERS = {"beanstalkd": 10.0, "redis": 3.0, "postgres": 2.5, "awa": 5.0, "procrastinate": 5.0}
PEER_BATCH, PEER_IN_FLIGHT = 100, 16

OPEN_LOOP_PER_S = 500
IDLE_STREAMS = 1000
IDLE_CORE_PERCENT = 3.0
WAITING_MESSAGES = 2_000_000
WAITING_MB = 500


@dataclass(frozen=True)
class Bound:
    """A number to stay over or under, and how people write it."""

    way: Literal["≥", "≤", "<"]
    number: float
    unit: str
    formula: str = ""  # where the number depends on something measured

    def holds(self, value: float) -> bool:
        return {"≥": value >= self.number, "≤": value <= self.number, "<": value < self.number}[self.way]

    def __str__(self) -> str:
        number = f"{self.number:,.0f}" if self.number >= 1000 else f"{self.number:.3g}"
        written = f"{self.way} {number}{'' if self.unit in '×%' else ' '}{self.unit}"
        return f"{self.way} {self.formula} = {number} {self.unit}" if self.formula else written


def answer_bounds(fsync_ms: float) -> dict[int, Bound]:
    """By percentile: how soon an enqueue at 500/s is answered."""
    return {50: _fsyncs("≤", 2, fsync_ms, 2.0), 99: _fsyncs("≤", 2, fsync_ms, 15.0)}


def delivery_bounds(fsync_ms: float) -> dict[int, Bound]:
    """By percentile: how soon a message reaches a consumer that waits."""
    return {50: _fsyncs("≤", 3, fsync_ms, 3.0), 95: Bound("<", 50.0, "ms")}


def _fsyncs(way: Literal["≥", "≤", "<"], count: int, fsync_ms: float, more_ms: float) -> Bound:
    return Bound(way, count * fsync_ms + more_ms, "ms", f"{count} fsyncs + {more_ms:g} ms")
