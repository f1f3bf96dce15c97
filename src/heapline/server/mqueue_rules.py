"""How much of MQueue's API a namespace may have: requests a second, and topics made by the way.

A bucket of requests for each namespace; a request that finds its namespace's bucket empty is refused, takes nothing
from any other namespace, and is told when to come again. Which call it was, and what it carried, is not known here:
a request is a request. Whoever asks has been let in already, so strangers cannot use up anybody's share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from heapline.config import NAME
from heapline.core.rate import TokenBucket
from heapline.errors import BadName, BadRequest, RateLimited, ResourceExhausted

BUCKETS_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class MQueueRules:
    creates_topics: bool = True  # an enqueue makes the topics that it names and that are not there
    topics_per_namespace_max: int = 100  # topics of a namespace past which it makes no more there
    topics_max: int = 1000  # the same over all namespaces, for whoever invents those
    rate: float = 0.0  # requests a second of a namespace; 0 = no limit
    rates: Mapping[str, float] = field(default_factory=dict)  # for some namespaces another, by name
    burst: float = 1.0  # seconds' worth of requests that may come at once; always at least one request

    def validate(self) -> None:
        for namespace in self.rates:
            if not NAME.match(namespace):
                raise BadName("namespace", namespace)
        for rate in (self.rate, *self.rates.values()):
            if rate and not 0.001 <= rate <= 1e6:
                raise BadRequest(f"{rate} requests a second: a rate is 0 (no limit), or 0.001 to 1e6")
        if not 0 <= self.burst <= 3600:
            raise BadRequest(f"a burst of {self.burst} seconds' worth is out of range: it must be 0 to 3600")

    def check_room(self, new: Iterable[str], namespaces: Iterable[str]) -> None:
        """Whether topics may be made, given the namespace of each new one and of each that is there."""
        new, there = list(new), list(namespaces)
        if new and len(there) + len(new) > self.topics_max:
            raise ResourceExhausted("the number of topics that an enqueue may bring about", self.topics_max)
        for namespace in set(new):
            if there.count(namespace) + new.count(namespace) > self.topics_per_namespace_max:
                what = f"the number of topics that an enqueue may bring about in namespace {namespace!r}"
                raise ResourceExhausted(what, self.topics_per_namespace_max)


class NamespaceRates:
    """The buckets. Those of the namespaces that asked last are kept: one that has been quiet for longer than all the
    others is full again, as a new one is, unless its limit is far below what this server answers."""

    def __init__(self, rules: MQueueRules, now_ms: Callable[[], int]) -> None:
        self._rules, self._now_ms = rules, now_ms
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, namespaces: Iterable[str]) -> None:
        """One request in each of these namespaces, or in none: RateLimited."""
        now = self._now_ms()
        buckets = {name: bucket for name in namespaces if (bucket := self._bucket(name, now)) is not None}
        waits = [(bucket.next_in(now), name) for name, bucket in buckets.items()]
        wait, name = max(waits, default=(0, ""))
        if wait:
            rate = buckets[name].rate
            raise RateLimited(f"requests a second of namespace {name!r}", ceil(rate), ceil(wait / 1000))
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
