"""Limits of a namespace on MQueue's API: requests per second, and topics that enqueues create.

Each namespace has a bucket of requests. A request that finds its bucket empty is rejected with the time of the next
try, and takes nothing from any other namespace. All requests count alike. Callers are authenticated before, so
unauthenticated clients cannot use up a namespace's share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from heapline.contract.config import NAME
from heapline.contract.errors import BadName, BadRequest, RateLimited, ResourceExhausted
from heapline.core.rate import TokenBucket

BUCKETS_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class MQueueRules:
    creates_topics: bool = True  # an enqueue creates the topics that it names and that do not exist
    topics_per_namespace_max: int = 100  # no more are created in a namespace that has this many
    topics_max: int = 1000  # the same over all namespaces, because callers can invent namespaces
    rate: float = 0.0  # requests per second of a namespace; 0: no limit
    rates: Mapping[str, float] = field(default_factory=dict)  # of single namespaces, by name
    burst: float = 1.0  # seconds' worth of requests allowed at once; always at least one request

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
