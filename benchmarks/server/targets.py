"""The targets of the server, as data: the table shows for each figure whether it is met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Goal(NamedTuple):
    """For one load: messages per second, and CPU microseconds per message of each side."""

    rate: float
    server_us: float
    client_us: float


#: (load, messages per batch, calls in flight) through the SDK.
LOADS = {
    ("lifecycle", 100, 16): Goal(100_000, 5.5, 3.0),
    ("lifecycle", 1000, 4): Goal(180_000, 3.5, 2.0),
    ("lazy", 1000, 4): Goal(180_000, 3.5, 2.0),
    ("enqueue", 1000, 4): Goal(300_000, 2.0, 0.8),
}
#: At 100 per batch and 16 in flight: the minimum multiple of a peer's rate, and the maximum of its CPU (both sides).
PEERS: dict[str, tuple[float | None, float | None]] = {
    "beanstalkd": (None, 1 / 20),
    "redis": (None, 1 / 2.2),
    "postgres": (3.5, 1 / 5),
    "awa": (5.0, None),
    "procrastinate": (5.0, None),
    "rabbitmq": (None, None),
    "jetstream": (None, None),
}
PEER_BATCH, PEER_IN_FLIGHT = 100, 16

OPEN_LOOP_PER_S = 500
#: CPU of the server at that rate: the maximum multiple of the bare server's, and of our own gRPC interface's.
OF_BARE, OF_GRPC = 2.6, 0.45
ANSWERED_P50_MORE_MS = 0.6  # than the bare server
ANSWERED_P99_MS = 10.0
#: Connections with one call in flight each; calls per second, p95 and CPU of the server per call.
CONNECTIONS, CONNECTIONS_PER_S, CONNECTIONS_P95_MS, CONNECTIONS_SERVER_US = 50, 5_000, 20.0, 120.0
HTTP_CONNECTIONS, HTTP_PER_S = 64, 3_000
IDLE_STREAMS = 1000
IDLE_CORE_PERCENT = 3.0
BROWSERS_TOPICS, BROWSERS, BROWSERS_CORE_PERCENT = 1000, 100, 5.0
WAITING_MESSAGES = 2_000_000
WAITING_MB = 500


@dataclass(frozen=True)
class Bound:
    """A number to stay over or under, and its readable form."""

    way: Literal["≥", "≤", "<"]
    number: float
    unit: str
    formula: str = ""  # if the number depends on a measurement

    def holds(self, value: float) -> bool:
        return {"≥": value >= self.number, "≤": value <= self.number, "<": value < self.number}[self.way]

    def __str__(self) -> str:
        number = f"{self.number:,.0f}" if self.number >= 1000 else f"{self.number:.3g}"
        written = f"{self.way} {number}{'' if self.unit in '×%' else ' '}{self.unit}"
        return f"{self.way} {self.formula} = {number} {self.unit}" if self.formula else written


def judged(bound: Bound | None, value: float) -> tuple[str | None, bool | None]:
    """Return the target and whether it was met, as fields of a row."""
    return (None, None) if bound is None else (str(bound), bound.holds(value))


def answer_bounds(bare_p50_ms: float) -> dict[int, Bound]:
    """By percentile: the time until an enqueue at 500/s is answered."""
    formula = f"bare + {ANSWERED_P50_MORE_MS:g} ms"
    return {
        50: Bound("≤", bare_p50_ms + ANSWERED_P50_MORE_MS, "ms", formula),
        99: Bound("≤", ANSWERED_P99_MS, "ms"),
    }


def delivery_bounds(fsync_ms: float) -> dict[int, Bound]:
    """By percentile: the time until a message reaches a waiting consumer."""
    return {50: _fsyncs("≤", 3, fsync_ms, 3.0), 95: Bound("<", 50.0, "ms")}


def _fsyncs(way: Literal["≥", "≤", "<"], count: int, fsync_ms: float, more_ms: float) -> Bound:
    return Bound(way, count * fsync_ms + more_ms, "ms", f"{count} fsyncs + {more_ms:g} ms")
