"""Limits of one caller and, on MQueue's API, of one namespace.

A caller is limited in calls in flight and open streams per key, leases per consumer, bytes per payload and answer.

Each key and user has a rate of calls and of enqueued messages, off by default. A call over it is rejected with the time
when to retry; a stream waits instead, so that it is slowed down.

A call over a limit is rejected with the limit's name and changes nothing. Leases are counted by the broker, together
with the leases themselves (`Context.leases_max`), so acks, expiry, restarts and other interfaces cannot make the count
drift. A consumer is a holder on a topic; a pop that names no holder belongs to the caller's subject.

On MQueue's API each namespace has a bucket of requests. A request that finds its bucket empty is rejected with the time
when to retry, and takes nothing from any other namespace. All requests count alike. Callers are authenticated before,
so unauthenticated clients cannot use up a namespace's share. If several servers share a broker that can count
(`RateStore`), they share the buckets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable

import msgspec

from heapline.contract.call import Call
from heapline.contract.config import NAME
from heapline.contract.errors import (
    BadName,
    BadRequest,
    PayloadTooLarge,
    RateLimited,
    ResourceExhausted,
    UnavailableError,
)
from heapline.contract.messages import NewMessages
from heapline.core.rate import TokenBucket

ANSWER_BYTES_MAX = 32 << 20  # of payloads in one answer: it is built in memory
ANSWER_ROWS_MAX = 100_000
BUCKETS_MAX = 10_000  # of namespaces


@dataclass(frozen=True, kw_only=True)
class Limits:
    streams_per_key: int = 4096  # open at a time; each costs a task and a buffer, and many workers may share a key
    inflight_per_key: int = 4096  # calls at a time, waiting pops included; more suggests a loop without a wait
    leases_per_consumer: int = 100_000  # messages of one topic that one holder may have leased at a time
    payload_bytes_max: int = 16 << 20  # of one message, whatever its topic allows
    calls_per_second: float = 0.0  # of one key or user, on this server; 0: no limit
    messages_per_second: float = 0.0  # that one key or user enqueues, on this server; 0: no limit

    def validate(self) -> None:
        for name in ("calls_per_second", "messages_per_second"):
            if (rate := getattr(self, name)) and not 0.001 <= rate <= 1e6:
                raise BadRequest(f"{name} must be 0 (no limit) or from 0.001 to 1e6, got {rate}")
        for name in ("streams_per_key", "inflight_per_key", "leases_per_consumer", "payload_bytes_max"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1, got {getattr(self, name)}")

    def check_payloads(self, command: Call[Any]) -> None:
        """Raise PayloadTooLarge if a message in the command is over the server's limit."""
        for batches in _payloads_of(type(command)):
            for payloads, topic in batches(command):
                size = max(map(len, payloads), default=0)
                if size > self.payload_bytes_max:
                    raise PayloadTooLarge.over_server_limit(size, self.payload_bytes_max, topic)


class PrincipalRates:
    """The calls and the enqueued messages of each principal, counted on all interfaces together.

    A call is accepted while its principal has a token for a call and, if it enqueues, one for a message. A batch may
    take more than there are. Then the next enqueue is rejected until they are refilled, so the average is kept.
    """

    def __init__(self, limits: Limits, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._calls = _Buckets("calls per second of", limits.calls_per_second)
        self._messages = _Buckets("enqueued messages per second of", limits.messages_per_second)
        self._is_on = bool(self._calls.rate or self._messages.rate)

    def take(self, subject: str, *commands: Call[Any]) -> None:
        """Count one call that carries these commands, or raise RateLimited and count nothing."""
        if not self._is_on:
            return
        now = self._now_ms()
        messages = sum(map(_count_messages, commands)) if self._messages.rate else 0
        calls = self._calls.checked(subject, now)
        enqueued = self._messages.checked(subject, now) if messages else None
        if calls is not None:
            calls.take(1)
        if enqueued is not None:
            enqueued.take(messages)


class _Buckets:
    """A bucket for each principal that was seen last; one second's worth may arrive together."""

    def __init__(self, what: str, rate: float) -> None:
        self.rate, self._what = rate, what
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def checked(self, subject: str, now: int) -> TokenBucket | None:
        """Return the principal's bucket if it is not empty, or None without a limit. Raise RateLimited otherwise."""
        if not self.rate:
            return None
        bucket = self._buckets.get(subject)
        if bucket is None:
            bucket = self._buckets[subject] = TokenBucket(self.rate, now, 1.0)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(subject)
        if wait := bucket.next_in(now):
            raise RateLimited(f"{self._what} {subject}", ceil(self.rate), ceil(wait / 1000))
        return bucket


def _count_messages(command: Call[Any]) -> int:
    return sum(len(payloads) for batches in _payloads_of(type(command)) for payloads, _ in batches(command))


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
        assert left >= 0, "more returned than taken"
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


# -- namespaces of MQueue's API --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MQueueRules:
    creates_topics: bool = True  # an enqueue creates the topics that it names and that do not exist
    topics_per_namespace_max: int = 100  # no more are created in a namespace that has this many
    topics_max: int = 1000  # the same over all namespaces, because callers can invent namespaces
    rate: float = 0.0  # requests per second of a namespace; 0: no limit
    rates: Mapping[str, float] = field(default_factory=dict)  # of single namespaces, by name
    burst: float = 1.0  # seconds' worth of requests allowed in a burst; always at least one request

    def validate(self) -> None:
        for namespace in self.rates:
            if not NAME.match(namespace):
                raise BadName("namespace", namespace)
        for rate in (self.rate, *self.rates.values()):
            if rate and not 0.001 <= rate <= 1e6:
                raise BadRequest(f"a rate must be 0 (no limit) or from 0.001 to 1e6 requests per second, got {rate}")
        if not 0 <= self.burst <= 3600:
            raise BadRequest(f"burst must be from 0 to 3600 seconds, got {self.burst}")

    def check_room(self, new: Iterable[str], namespaces: Iterable[str]) -> None:
        """Raise ResourceExhausted if new topics may not be created, given the namespaces of new and existing ones."""
        new, existing = list(new), list(namespaces)
        if new and len(existing) + len(new) > self.topics_max:
            raise ResourceExhausted("the number of topics that an enqueue may create", self.topics_max)
        for namespace in set(new):
            if existing.count(namespace) + new.count(namespace) > self.topics_per_namespace_max:
                what = f"the number of topics that an enqueue may create in namespace {namespace!r}"
                raise ResourceExhausted(what, self.topics_per_namespace_max)


@runtime_checkable
class RateStore(Protocol):
    """A broker that counts requests over all servers that share it."""

    async def take_rates(self, limits: Mapping[str, tuple[float, float]]) -> tuple[str, float] | None:
        """Count a request in namespaces, given their rates and bursts in requests.

        Return the one that is over its rate and the seconds to wait, or None if it was counted. Raise UnavailableError
        if that is not possible now.
        """


class SharedRates:
    """Rates over all servers that share a broker; over this one alone while the broker cannot count them."""

    def __init__(self, rules: MQueueRules, now_ms: Callable[[], int], store: RateStore | None) -> None:
        self._rules, self._store = rules, store
        self._own = NamespaceRates(rules, now_ms)

    async def take(self, namespaces: Iterable[str]) -> None:
        """Count one request in each of these namespaces, or raise RateLimited and count none."""
        names = set(namespaces)
        rates = {name: rate for name in names if (rate := self._rules.rates.get(name, self._rules.rate))}
        if not rates:
            return
        if self._store is not None:
            limits = {name: (rate, max(1.0, rate * self._rules.burst)) for name, rate in rates.items()}
            try:
                over = await self._store.take_rates(limits)
            except UnavailableError:
                pass  # limited by this server alone
            else:
                if over is not None:
                    name, wait = over
                    raise RateLimited(f"requests per second of namespace {name!r}", ceil(rates[name]), ceil(wait))
                return
        self._own.take(names)


class NamespaceRates:
    """The buckets of the namespaces that were used last.

    One that has been idle for longer than all others is full again, as a new one is, unless its limit is far below what
    this server can answer.
    """

    def __init__(self, rules: MQueueRules, now_ms: Callable[[], int]) -> None:
        self._rules, self._now_ms = rules, now_ms
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, namespaces: Iterable[str]) -> None:
        """Count one request in each of these namespaces, or raise RateLimited and count none."""
        now = self._now_ms()
        buckets = {name: bucket for name in namespaces if (bucket := self._bucket(name, now)) is not None}
        waits = [(bucket.next_in(now), name) for name, bucket in buckets.items()]
        wait, name = max(waits, default=(0, ""))
        if wait:
            rate = buckets[name].rate
            raise RateLimited(f"requests per second of namespace {name!r}", ceil(rate), ceil(wait / 1000))
        for bucket in buckets.values():
            bucket.take(1)

    def _bucket(self, namespace: str, now: int) -> TokenBucket | None:
        rate = self._rules.rates.get(namespace, self._rules.rate)
        if not rate:
            return None
        bucket = self._buckets.get(namespace)
        if bucket is None:
            bucket = self._buckets[namespace] = TokenBucket(rate, now, self._rules.burst)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(namespace)
        return bucket
