"""`KeyLimit`: a fairness key never has more leases at the same time than the topic allows, as far as clients can see.

Judged at every answered pop: a lease is *certainly held* then if its own pop was answered before this
one began, no call that may have ended it began before this one was answered, and its first deadline is later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.simulation.evidence import Delivery, Evidence, Life, is_on
from tests.simulation.history import Call, fairness_key_of


class KeyLimit:
    def complaints(self, seen: Evidence) -> Iterator[str]:
        limit = seen.config.max_inflight_per_key
        if not limit:
            return
        by_key: dict[str, list[tuple[Life, Delivery]]] = defaultdict(list)
        for life in seen.lives.values():
            for delivery in life.deliveries:
                key = fairness_key_of(delivery.got.name)
                if key is not None:
                    by_key[key].append((life, delivery))
        for key, deliveries in by_key.items():
            for call in {id(d.call): d.call for _, d in deliveries}.values():
                out = sum(d.call is call or self._is_out(life, d, call) for life, d in deliveries)
                if out > limit:
                    yield f"after call {call.number} key {key!r} has {out} leases, of at most {limit}"

    @staticmethod
    def _is_out(life: Life, delivery: Delivery, call: Call) -> bool:
        got = delivery.got
        if delivery.call.ended >= call.started or call.steady_end is None or got.deadline_ms <= call.steady_end:
            return False
        ends = [c for c in (*life.acks, *life.returns) if is_on(c, got)] + life.ends
        return all(c.started > call.ended for c in ends)
