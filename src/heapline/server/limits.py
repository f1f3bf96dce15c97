"""Limits of one caller: calls in flight and open streams per key, leases per consumer, bytes per payload and answer.

A call over a limit is rejected with the limit's name and changes nothing. Leases are counted by the broker, together
with the leases themselves (`Context.leases_max`), so acks, expiry, restarts and other interfaces cannot make the count
drift. A consumer is a holder on a topic; a pop that names no holder belongs to the caller's subject.
"""

from __future__ import annotations

from collections.abc import Callable
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
        for sizes in _payloads_of(type(command)):
            for size, topic in sizes(command):
                if size > self.payload_bytes_max:
                    raise PayloadTooLarge.over_server_limit(size, self.payload_bytes_max, topic)


class Counter:
    """Counts one kind of thing per name. A name without any costs nothing."""

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

    def __len__(self) -> int:
        return len(self._held)


# -- derived from the types of a command's fields ----------------------------------------------------------------------

Sizes = Callable[[Any], list[tuple[int, str]]]


@cache
def _payloads_of(kind: type[Call[Any]]) -> tuple[Sizes, ...]:
    """Return functions that list (largest payload, topic) of a command: of bytes, a batch, or a list of batches."""
    found: list[Sizes] = []
    for name, hint in get_type_hints(kind).items():
        inner = next((k for k in get_args(hint) if isinstance(k, type) and issubclass(k, msgspec.Struct)), None)
        if hint is bytes:
            found.append(lambda c, n=name: [(len(getattr(c, n)), c.topic)])  # type: ignore[misc]
        elif hint is NewMessages:
            found.append(lambda c, n=name: [(_largest(getattr(c, n)), c.topic)])  # type: ignore[misc]
        elif inner is not None and get_type_hints(inner).get("messages") is NewMessages:
            found.append(lambda c, n=name: [(_largest(s.messages), s.topic) for s in getattr(c, n)])  # type: ignore[misc]
    return tuple(found)


def _largest(messages: NewMessages) -> int:
    return max(map(len, messages.payloads), default=0)


def bounded(command: Any) -> Any:
    """Return the command with `max_bytes` and `max_messages` reduced to what this server puts into one answer."""
    changes: dict[str, int] = {}
    kind: Any = type(command)
    for name, limit in _bounds_of(kind):
        if getattr(command, name) > limit:
            changes[name] = limit
    return msgspec.structs.replace(command, **changes) if changes else command


@cache
def _bounds_of(kind: Any) -> tuple[tuple[str, int], ...]:
    limits = (("max_bytes", ANSWER_BYTES_MAX), ("max_messages", ANSWER_ROWS_MAX))
    return tuple((name, limit) for name, limit in limits if name in kind.__struct_fields__)
