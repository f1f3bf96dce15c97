"""Limits of one caller: calls in flight and open streams per key, leases per consumer, bytes per payload and answer.

A call over a limit is rejected with the limit's name and changes nothing. Leases are counted by the broker, together
with the leases themselves (`Context.leases_max`), so acks, expiry, restarts and other interfaces cannot make the count
drift. A consumer is a holder on a topic; a pop that names no holder belongs to the caller's subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from heapline.contract.call import Call
from heapline.contract.errors import BadRequest, PayloadTooLarge, ResourceExhausted
from heapline.contract.messages import NewMessages

ANSWER_BYTES_MAX = 32 << 20  # of payloads in one answer: it is built in memory
ANSWER_ROWS_MAX = 100_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    streams_per_key: int = 4096  # open at a time; each costs a task and a buffer, and many workers may share a key
    inflight_per_key: int = 4096  # calls at a time, waiting pops included; more suggests a loop without a wait
    leases_per_consumer: int = 100_000  # messages of one topic that one holder may have leased at a time
    payload_bytes_max: int = 16 << 20  # of one message, whatever its topic allows

    def validate(self) -> None:
        for name in ("streams_per_key", "inflight_per_key", "leases_per_consumer", "payload_bytes_max"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1, got {getattr(self, name)}")

    def check_payloads(self, command: Call[Any]) -> None:
        """Raise PayloadTooLarge if a message in the command is over the server's limit."""
        for batches in _payloads_of(type(command)):
            for payloads, topic in batches(command):
                size = max(map(len, payloads), default=0)
                if size > self.payload_bytes_max:
                    raise PayloadTooLarge(size, self.payload_bytes_max, topic)


class Counter:
    """Counts one kind of thing per name. A name without any costs nothing."""

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit = what, limit
        self.held: dict[str, int] = {}

    def take(self, name: str) -> None:
        held = self.held.get(name, 0)
        if held >= self.limit:
            raise ResourceExhausted(f"{self.what} of {name}", self.limit)
        self.held[name] = held + 1

    def give_back(self, name: str) -> None:
        left = self.held.get(name, 0) - 1
        assert left >= 0, "more given back than taken"
        if left:
            self.held[name] = left
        else:
            del self.held[name]


# -- derived from the types of a command's fields ----------------------------------------------------------------------

Batches = Callable[[Any], list[tuple[Sequence[bytes], str]]]


@cache
def _payloads_of(kind: type[Call[Any]]) -> tuple[Batches, ...]:
    """Return functions that list (payloads, topic) of a command: of bytes, a batch, or a list of batches."""
    found: list[Batches] = []
    for name, hint in get_type_hints(kind).items():
        inner = next((k for k in get_args(hint) if isinstance(k, type) and issubclass(k, msgspec.Struct)), None)
        if hint is bytes:
            found.append(lambda c, n=name: [((getattr(c, n),), c.topic)])  # type: ignore[arg-type,misc]
        elif hint is NewMessages:
            found.append(lambda c, n=name: [(getattr(c, n).payloads, c.topic)])  # type: ignore[misc]
        elif inner is not None and get_type_hints(inner).get("messages") is NewMessages:
            found.append(lambda c, n=name: [(s.messages.payloads, s.topic) for s in getattr(c, n)])  # type: ignore[misc]
    return tuple(found)


@cache
def bounds_of(kind: Any) -> tuple[tuple[str, int], ...]:
    """Return the fields of a command that bound its answer, with the most that this server puts into one."""
    limits = (("max_bytes", ANSWER_BYTES_MAX), ("max_messages", ANSWER_ROWS_MAX))
    return tuple((name, limit) for name, limit in limits if name in kind.__struct_fields__)
