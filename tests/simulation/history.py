"""The clients' calls and their results, in order: the only evidence that checkers use.

A call ends as *ok* (answered), *refused* (an error that promises no change) or *unknown* (a crash, a
reload, a caller that gave up: it may have happened or not). Each has three times: its position in the order of events,
true seconds, and the topic's own steady time if known. This module does not know how a broker works.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from heapline.contract.config import TopicConfig
from heapline.contract.errors import (
    CorruptionError,
    DeadlineExceeded,
    DeliveryLost,
    HeaplineError,
    LeaseLost,
    TopicReloading,
)
from heapline.testing.clock import FakeClock

T = TypeVar("T")
Outcome = Literal["open", "ok", "refused", "unknown"]
UNSURE = (TopicReloading, DeadlineExceeded, CorruptionError, OSError)


FAIRNESS_KEYS = ("a", "a", "a", "b", "c", None)


def fairness_key_of(name: str) -> str | None:
    """Return the fairness key of the message with this name, on topics that have such keys."""
    return FAIRNESS_KEYS[zlib.crc32(name.encode()) % len(FAIRNESS_KEYS)]


class Sent(NamedTuple):
    """A message that a client tried to enqueue. `name` identifies it: two sends of one name are one message."""

    name: str
    payload: bytes
    priority: int = 0
    delay: float | None = None
    deliver_at_ms: int | None = None
    ttl: float | None = None
    max_retries: int | None = None
    identified: bool = False  # sent with an idempotency key or a sequence


class Got(NamedTuple):
    """A message that a pop returned."""

    id: int
    token: int
    payload: bytes
    priority: int
    attempts: int
    enqueued_ms: int
    deadline_ms: int

    @property
    def name(self) -> str:
        return name_in(self.payload)


class Reply(NamedTuple):
    """One row of an enqueue's answer."""

    id: int
    duplicate: bool = False
    error: str = ""


class Dead(NamedTuple):
    """One row of a list of dead letters; no payload if its record is corrupt."""

    id: int
    payload: bytes | None
    reason: str


def payload_of(name: str, size: int = 0) -> bytes:
    """Return bytes that name their message and cannot be mistaken for another's when cut or mixed."""
    head = f"{name};".encode()
    filler = (f"{name}." * (size // (len(name) + 1) + 1)).encode()
    return head + filler[: max(0, size - len(head))]


def name_in(payload: bytes) -> str:
    return payload.partition(b";")[0].decode(errors="replace")


@dataclass(slots=True)
class Call:
    number: int
    client: str
    verb: str
    topic: str
    args: dict[str, Any]
    started: int  # position in the order of all events
    started_at: float
    steady_start: int | None
    outcome: Outcome = "open"
    result: Any = None
    error: BaseException | None = None
    ended: int = 1 << 62
    ended_at: float = float("inf")
    steady_end: int | None = None
    wall_end: int = 0

    @property
    def may_have_happened(self) -> bool:
        return self.outcome in ("ok", "unknown", "open")

    @property
    def decided_after(self) -> int | None:
        """Steady time before which this was certainly not decided, even if a reload set steady time back meanwhile."""
        if self.steady_start is None or self.steady_end is None:
            return self.steady_start
        elapsed = round((self.ended_at - self.started_at) * 1000)
        return min(self.steady_start, self.steady_end - elapsed - 2)

    def line(self) -> str:
        shown = ", ".join(f"{k}={_short(v)}" for k, v in self.args.items() if v is not None)
        answer = {"ok": _short(self.result), "open": "…", "unknown": f"unknown ({_problem(self.error)})"}.get(
            self.outcome, f"refused ({_problem(self.error)})"
        )
        head = f"{self.started:6d} {self.started_at:9.3f}s {self.client:10}"
        return f"{head} {self.verb} {self.topic} {shown} -> {answer}"


class Note(NamedTuple):
    """Something that happened to the node or its clock."""

    order: int
    at: float
    wall_ms: int
    what: str

    def line(self) -> str:
        return f"{self.order:6d} {self.at:9.3f}s -- {self.what}"


@dataclass
class History:
    clock: FakeClock
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    sent: dict[str, Sent] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)  # topics with damaged sectors
    small_slices: bool = False  # so few timers fire per commit that they may fall behind
    reads_failed: int = 1 << 62  # from this event on reads failed, so a record may count as corrupt
    drained: set[str] = field(default_factory=set)  # topics that the client "drain" emptied at the end
    steady_of: Callable[[str], int | None] = lambda topic: None
    _order: int = 0

    # -- writing ---------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._order += 1
        return self._order

    def reads_will_fail(self) -> None:
        self.reads_failed = min(self.reads_failed, self._order)

    def note(self, what: str) -> None:
        self.notes.append(Note(self._next(), self.clock.elapsed_ns / 1e9, self.clock.wall_ms(), what))

    def start(self, client: str, verb: str, topic: str, **args: Any) -> Call:
        call = Call(
            len(self.calls), client, verb, topic, args, self._next(), self.clock.elapsed_ns / 1e9, self.steady_of(topic)
        )  # fmt: skip
        self.calls.append(call)
        for message in args.get("messages", ()):
            self.sent.setdefault(message.name, message)
        return call

    def end(self, call: Call, outcome: Outcome, result: Any = None, error: BaseException | None = None) -> None:
        if call.outcome != "open":
            return  # the crash came first: no client received this answer
        call.outcome, call.result, call.error = outcome, result, error
        call.ended, call.ended_at = self._next(), self.clock.elapsed_ns / 1e9
        call.steady_end, call.wall_end = self.steady_of(call.topic), self.clock.wall_ms()

    def crash(self, what: str) -> None:
        """Mark every call in progress as never answered."""
        for call in self.calls:
            self.end(call, "unknown", error=None)
        self.note(what)

    async def record(
        self, client: str, verb: str, topic: str, work: Awaitable[T], read: Callable[[T], Any], **args: Any
    ) -> Call:
        """Make a call and record its result. `read` converts the answer to plain data."""
        call = self.start(client, verb, topic, **args)
        try:
            answer = await work
        except LeaseLost as error:
            self.end(call, "ok", {"lost": sorted(error.lost)}, error)
        except DeliveryLost as error:
            lost = sorted(zip(error.partitions, error.offsets, strict=True))
            self.end(call, "ok", {"lost": lost}, error)
        except UNSURE as error:
            self.end(call, "unknown", error=error)
        except HeaplineError as error:
            self.end(call, "refused", error=error)
        except BaseException as error:
            self.end(call, "unknown", error=error)
            raise
        else:
            self.end(call, "ok", read(answer))
        return call

    # -- reading ---------------------------------------------------------------------------------------------------

    def of(self, topic: str, *verbs: str) -> Iterator[Call]:
        return (call for call in self.calls if call.topic == topic and call.verb in verbs)

    def lines(self) -> list[str]:
        entries: Iterable[Call | Note] = [*self.calls, *self.notes]
        return [e.line() for e in sorted(entries, key=lambda e: e.started if isinstance(e, Call) else e.order)]


def _short(value: Any) -> str:
    if isinstance(value, Sent):
        return f"{value.name}({value.priority})"
    if isinstance(value, Got):
        return f"{value.name}:{value.id}#{value.token} p{value.priority} a{value.attempts} until {value.deadline_ms}"
    if isinstance(value, Dead):
        return f"{value.id} {name_in(value.payload) if value.payload is not None else '?'} ({value.reason})"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple) and not isinstance(value, Reply):
        shown = ", ".join(_short(v) for v in value[:8])
        return f"[{shown}{f', … {len(value)}' if len(value) > 8 else ''}]"
    return str(value)[:200]


def _problem(error: BaseException | None) -> str:
    return "no answer" if error is None else f"{type(error).__name__}: {error}"[:160]
