"""Strategies: choose the partition that serves next.

    best_first    the best candidate of the topic; the bound K holds
    round_robin   the partitions in turn; the bound is given up
    weighted      the partitions in turn, each in proportion to its weight; the bound is given up

`RoundRobin` and `Weighted` choose the partition of each of the next n messages, spread as evenly as possible, so that a
batch is as fair as single pops. Within a partition, order is kept. They are deterministic and hold only a cursor or a
credit per partition. A restart that loses it begins a new round, which is harmless.

This module does not know messages, heaps, the protocol or the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from heapline.contract.errors import BadRequest

Strategy = Literal["best_first", "round_robin", "weighted"]
STRATEGIES: tuple[Strategy, ...] = ("best_first", "round_robin", "weighted")


class Plan(NamedTuple):
    """The partition of each message, in delivery order."""

    order: list[int]

    def counts(self) -> dict[int, int]:
        """Return how many messages to take from each partition."""
        return dict(Counter(self.order))


class Rotation(Protocol):
    def plan(self, ready: Mapping[int, int], want: int) -> Plan:
        """Plan up to `want` messages; `ready` is the message count of each available partition."""
        ...

    def fork(self) -> Rotation:
        """Return a copy in the same state, for a plan that may not be executed to its end."""
        ...


class RoundRobin:
    """Rotation that serves each partition with messages in turn, by number, after the one served last."""

    def __init__(self, last: int = -1) -> None:
        self._last = last

    def fork(self) -> RoundRobin:
        return RoundRobin(self._last)

    def plan(self, ready: Mapping[int, int], want: int) -> Plan:
        left = {partition: count for partition, count in sorted(ready.items()) if count > 0}
        turns = list(left)
        cut = bisect_right(turns, self._last)
        turns = turns[cut:] + turns[:cut]
        order: list[int] = []
        while turns and len(order) < want:
            turn = turns[: want - len(order)]
            order += turn
            for partition in turn:
                left[partition] -= 1
            turns = [partition for partition in turns if left[partition]]
        if order:
            self._last = order[-1]
        return Plan(order)


class Weighted:
    """Smooth weighted round robin: each turn every partition earns its weight, and the richest pays for the turn.

    With weights 3, 1, 1 the order is a b a c a, not a a a b c. Over a round (as many turns as the integer weights add
    up to) each partition is served exactly its weight. A partition with no messages earns no credit, so it cannot save
    any.
    """

    def __init__(self, weights: Mapping[int, float] | None = None) -> None:
        self._weights: dict[int, float] = {}
        self._credits: dict[int, float] = {}
        for partition, weight in (weights or {}).items():
            self.set_weight(partition, weight)

    def fork(self) -> Weighted:
        other = Weighted()
        other._weights, other._credits = self._weights, self._credits.copy()
        return other

    def set_weight(self, partition: int, weight: float) -> None:
        if not 0 < weight < float("inf"):
            raise BadRequest(f"a partition's weight is a number above 0, not {weight!r}")
        self._weights[partition] = weight

    def forget(self, partition: int) -> None:
        self._weights.pop(partition, None)
        self._credits.pop(partition, None)

    def plan(self, ready: Mapping[int, int], want: int) -> Plan:
        left = {partition: count for partition, count in sorted(ready.items()) if count > 0}
        credits, order = self._credits, list[int]()
        while left and len(order) < want:
            for partition in left:
                credits[partition] = credits.get(partition, 0) + self._weight(partition)
            richest = max(left, key=credits.__getitem__)  # on a tie, the lowest number: `left` is sorted
            credits[richest] -= sum(map(self._weight, left))
            order.append(richest)
            left[richest] -= 1
            if not left[richest]:
                del left[richest]
        return Plan(order)

    def _weight(self, partition: int) -> float:
        return self._weights.get(partition, 1.0)


def rotation(strategy: Strategy, weights: Mapping[int, float] | None = None) -> Rotation | None:
    """Return the state that a strategy needs; None for best_first, which needs none."""
    if strategy not in STRATEGIES:
        raise BadRequest(f"a strategy is one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if strategy == "best_first":
        return None
    return RoundRobin() if strategy == "round_robin" else Weighted(weights)
