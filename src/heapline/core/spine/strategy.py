"""Strategies: choose the partition that serves next and the candidates that may be taken.

    best_first    the best candidate of the topic; the bound K holds
    round_robin   the partitions in turn; the bound is given up
    weighted      the partitions in turn, each in proportion to its weight; the bound is given up

`RoundRobin` and `Weighted` choose the partition of each of the next n messages, spread as evenly as possible, so that a
batch is as fair as single pops. Within a partition, order is kept. They are deterministic and hold only a cursor or a
credit per partition. A restart that loses it begins a new round, which is harmless.

`Ages` are the limits on a candidate's age. A candidate that was *confirmed* longer ago than `max_staleness_ms` must be
refreshed before it is taken. One that was *first shown* less than `min_freshness_ms` ago must not be taken yet: under
best_first the pop waits, because a worse message would break the bound; under the other two the partition is skipped.
The two times are separate on purpose: confirming a candidate does not reset its age.

This module does not know messages, heaps or the protocol. Time is passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from heapline.contract.errors import BadRequest
from heapline.core.spine.index import SpineIndex

Strategy = Literal["best_first", "round_robin", "weighted"]
STRATEGIES: tuple[Strategy, ...] = ("best_first", "round_robin", "weighted")


# --- rotations --------------------------------------------------------------------------------------------------------


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


def bound_in_force(strategy: Strategy, k: int) -> int | None:
    """Return the K that stats may promise."""
    return k if strategy == "best_first" else None


# --- age limits -------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    TAKE = "take"
    REFRESH = "refresh"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class Ages:
    """Limits on a candidate's age in milliseconds; None means no limit."""

    max_staleness_ms: int | None = None
    min_freshness_ms: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_staleness_ms", "min_freshness_ms"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadRequest(f"{name} is at least 0, or None for no limit, not {value}")

    @property
    def are_off(self) -> bool:
        return self.max_staleness_ms is None and not self.min_freshness_ms

    def judge(self, *, since: int, confirmed_at: int, now: int) -> Verdict:
        """Check a candidate's age. Staleness comes first: the age of an outdated candidate does not matter."""
        if self.max_staleness_ms is not None and now - confirmed_at > self.max_staleness_ms:
            return Verdict.REFRESH
        if now < self.takeable_at(since):
            return Verdict.WAIT
        return Verdict.TAKE

    def takeable_at(self, since: int) -> int:
        return since + (self.min_freshness_ms or 0)


class Take(NamedTuple):
    partition: int
    key: int
    id: int


class Refresh(NamedTuple):
    """Refresh the candidates of these partitions, update the index, and choose again."""

    partitions: Sequence[int]


class Wait(NamedTuple):
    """Nothing may be taken before this time (None: until something is enqueued)."""

    until: int | None


def choose_best(index: SpineIndex, ages: Ages, now: int) -> Take | Refresh | Wait:
    """Choose under best_first: the best candidate, or why it cannot be taken yet. Never choose a worse one."""
    if index.hungry:
        return Refresh(sorted(index.hungry))
    best = index.best()
    if best is None:
        return Wait(None)
    if not ages.are_off:
        shown = index.shown(best[0])
        since, confirmed_at = shown.since[best[2]], shown.confirmed_at or 0
        verdict = ages.judge(since=since, confirmed_at=confirmed_at, now=now)
        if verdict is Verdict.REFRESH:
            return Refresh([best[0]])
        if verdict is Verdict.WAIT:
            return Wait(ages.takeable_at(since))
    return Take(*best)


class Eligible(NamedTuple):
    """Choices of a rotation: partitions that may serve now, those to refresh first, and when to check again."""

    partitions: list[int]
    refresh: list[int]
    look_again_at: int | None


def eligible_partitions(index: SpineIndex, ages: Ages, now: int, among: Iterable[int] | None = None) -> Eligible:
    """Return the partitions whose head may be taken under round_robin and weighted; the others are skipped."""
    serve: list[int] = []
    refresh: list[int] = []
    later: list[int] = []
    for partition in index.available if among is None else among:
        shown = index.shown(partition)
        if partition in index.hungry:
            refresh.append(partition)
        elif shown.entries:
            since = shown.since[shown.entries[-1][1]]
            verdict = ages.judge(since=since, confirmed_at=shown.confirmed_at or 0, now=now)
            if verdict is Verdict.TAKE:
                serve.append(partition)
            elif verdict is Verdict.REFRESH:
                refresh.append(partition)
            else:
                later.append(ages.takeable_at(since))
    return Eligible(serve, refresh, min(later, default=None))
