"""Strategies: which partition serves next, and which candidates may be taken at all.

    best_first    the best candidate of the topic; the bound K holds
    round_robin   the partitions in turn; the bound is given up
    weighted      the partitions in turn, each as often as its weight says; the bound is given up

`RoundRobin` and `Weighted` say from which partition each of the next n messages comes, spread as evenly as they can
be, so that a batch is as fair as single pops. Within a partition order is kept. They are deterministic and hold no
more than a cursor or a credit per partition: a restart that loses it begins a new round, which harms nobody.

`Ages` are the limits on a candidate's age. A candidate that was *confirmed* longer ago than `max_staleness_ms` must be
asked for again before it is taken. One that was *first shown* less than `min_freshness_ms` ago is not to be taken yet:
under best_first the pop then waits, since handing out anything worse would break the bound; under the two others the
partition is passed over. These are two clocks on purpose: confirming a candidate makes it no younger.

What this file does not know: messages, heaps, the protocol, the time (it is passed in).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from heapline.core.spine_index import SpineIndex
from heapline.errors import BadRequest

Strategy = Literal["best_first", "round_robin", "weighted"]
STRATEGIES: tuple[Strategy, ...] = ("best_first", "round_robin", "weighted")


# --- whose turn it is -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """From which partition each message comes, in the order in which they are handed out."""

    order: list[int]

    def counts(self) -> dict[int, int]:
        """How many to take from each partition."""
        return dict(Counter(self.order))


class Rotation(Protocol):
    def plan(self, ready: Mapping[int, int], want: int) -> Plan:
        """Turns for `want` messages; `ready` says how many each available partition has. Fewer if there are fewer."""
        ...

    def fork(self) -> Rotation:
        """Another one in the same state: for a plan that may not be carried out to its end."""
        ...


class RoundRobin:
    """Each partition that has messages in turn, by number, after the one that was served last."""

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
    """Smooth weighted round robin: every turn all get credit by their weight, and the richest pays for the turn.

    With weights 3, 1, 1 the order is a b a c a, not a a a b c. Over a round (as many turns as whole weights add up
    to) each partition is served exactly its weight. One that has nothing gets no credit, so it cannot save any up.
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
            richest = max(left, key=credits.__getitem__)  # of equals the lowest number: `left` is sorted
            credits[richest] -= sum(map(self._weight, left))
            order.append(richest)
            left[richest] -= 1
            if not left[richest]:
                del left[richest]
        return Plan(order)

    def _weight(self, partition: int) -> float:
        return self._weights.get(partition, 1.0)


def rotation(strategy: Strategy, weights: Mapping[int, float] | None = None) -> Rotation | None:
    """The state that a strategy needs; None for best_first, which needs none."""
    if strategy not in STRATEGIES:
        raise BadRequest(f"a strategy is one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if strategy == "best_first":
        return None
    return RoundRobin() if strategy == "round_robin" else Weighted(weights)


def bound_in_force(strategy: Strategy, k: int) -> int | None:
    """The K that stats may promise."""
    return k if strategy == "best_first" else None


# --- how old a candidate may be ---------------------------------------------------------------------------------------


class Verdict(Enum):
    TAKE = "take"
    REFRESH = "refresh"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class Ages:
    """Limits on a candidate's age in milliseconds; None is no limit."""

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
        """Staleness comes first: whether an outdated candidate is old enough does not matter."""
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
    """Ask these for their candidates again, update the index, choose again."""

    partitions: Sequence[int]


class Wait(NamedTuple):
    """Nothing may be taken before this time (None: before something is enqueued)."""

    until: int | None


def choose_best(index: SpineIndex, ages: Ages, now: int) -> Take | Refresh | Wait:
    """best_first: the best candidate, or why it cannot be taken yet. Nothing worse is ever taken in its place."""
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
    """What a rotation may choose from: who may serve now, whom to ask again first, and when to look again."""

    partitions: list[int]
    refresh: list[int]
    look_again_at: int | None


def eligible_partitions(index: SpineIndex, ages: Ages, now: int, among: Iterable[int] | None = None) -> Eligible:
    """round_robin and weighted: partitions whose head may be taken; the others are passed over."""
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
