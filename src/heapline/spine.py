"""The best of many partitions, as a library: an index of the few best candidates of each, and selection by policies.

    index = SpineIndex(fan_out=3)
    index.add_partition(1)
    index.update_candidates(1, [Candidate(5, id=7, value=message)])  # the best three of partition 1, best first
    index.select_best(10)

What holds: the n-th candidate selected is among the n best of all that the available partitions held when they last
showed their candidates. (The bound K·F that is often quoted for such an index is weaker, and with F = ⌈K/P⌉ candidates
it fails.) So a selection ends early when a partition that may hold more has run out of candidates: `stats().hungry`
names it, and it has to show its next ones. What was added since is unknown to the index.

A candidate is selected once: it is removed from the index. All methods may be called from any thread. The index is a
thin layer over core/spine, which the tests compare with a sorted list; topics of a broker do not use it, because their
partitions are in one process (engine/local_spine.py).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, Literal, NamedTuple

import msgspec

from heapline.contract.errors import BadRequest, RequestError, ResourceExhausted, UnavailableError
from heapline.core.spine import index as core
from heapline.core.spine.strategy import RoundRobin, Strategy, rotation

__all__ = [
    "Candidate",
    "GlobalSelector",
    "InvalidCandidate",
    "NoAvailableCandidates",
    "PartitionNotFound",
    "SelectionPolicy",
    "SpineClosed",
    "SpineFull",
    "SpineIndex",
]

Mode = Literal["min", "max"]
STALE = "its candidates are older than max_age"


class SpineClosed(RequestError):
    """The index was closed."""


class SpineFull(ResourceExhausted):
    """The index has as many partitions as its capacity."""

    def __init__(self, capacity: int) -> None:
        super().__init__("capacity of the spine index", capacity)


class PartitionNotFound(RequestError, LookupError):
    """The index has no such partition."""

    def __init__(self, partition: int) -> None:
        super().__init__(f"partition {partition} is not in the index; add it with add_partition({partition})")
        self.partition = partition


class InvalidCandidate(BadRequest):
    """A candidate cannot be compared, or candidates are not given best first."""


class NoAvailableCandidates(UnavailableError):
    """Nothing can be selected: partitions are throttled, stale or empty, or have to show more candidates."""


class Candidate(msgspec.Struct, frozen=True):
    """A message that its partition offers, by priority and then by id. The index sets the last two fields."""

    priority: int
    id: int
    value: Any = None
    partition: int = 0
    shown_at: float = 0.0  # seconds, of the index's clock


class PartitionStats(NamedTuple):
    candidates: int
    updates: int
    throttled: str | None  # why it is left out; None = it is not
    is_complete: bool  # it has nothing besides its candidates


class IndexStats(NamedTuple):
    available: int  # partitions that are not left out
    candidates: int
    updates: int
    selections: int
    selected: int
    hungry: list[int]  # partitions that have to show their next candidates before more can be selected
    partitions: dict[int, PartitionStats]


class Bounds(NamedTuple):
    top_k: int  # the most that one selection returns
    actual_k: int  # candidates that can be selected now, before a partition has to show more


class SpineIndex:
    """The candidates of many partitions, of which `select_best` takes the best."""

    def __init__(
        self,
        *,
        top_k: int = 100,
        fan_out: int = 4,
        mode: Mode = "min",
        max_age: float = 0.0,
        capacity: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an index of up to `capacity` partitions, each of which shows up to `fan_out` candidates.

        `mode` says which priority is best. A partition that has not been updated for `max_age` seconds is left out
        until it is; 0 = never.
        """
        if top_k < 1 or capacity < 1 or not max_age >= 0:
            raise BadRequest(f"top_k and capacity are at least 1 and max_age 0, not {top_k}, {capacity} and {max_age}")
        self._sign = _sign(mode)
        self._top_k, self._max_age, self._capacity, self._clock = top_k, max_age, capacity, clock
        self._index = core.SpineIndex(fan_out)
        self._candidates: dict[int, dict[int, Candidate]] = {}
        self._updated: dict[int, float] = {}  # partition -> when, the oldest first
        self._throttled: dict[int, str] = {}
        self._updates: Counter[int] = Counter()
        self._selections = self._selected = 0
        self._is_closed = False
        self._lock = Lock()

    def add_partition(self, partition: int) -> None:
        """Add a partition without candidates. It can show some with `update_candidates`."""
        with self._lock:
            self._check()
            if partition in self._candidates:
                raise BadRequest(f"partition {partition} is in the index already")
            if len(self._candidates) >= self._capacity:
                raise SpineFull(self._capacity)
            self._index.add(partition)
            self._candidates[partition] = {}
            self._updated[partition] = self._clock()

    def remove_partition(self, partition: int) -> None:
        """Remove a partition and its candidates."""
        with self._lock:
            self._check(partition)
            self._index.remove(partition)
            del self._candidates[partition], self._updated[partition], self._updates[partition]
            self._throttled.pop(partition, None)

    def update_candidates(self, partition: int, candidates: Sequence[Candidate]) -> None:
        """Replace a partition's candidates by its best ones now, best first. Those beyond `fan_out` are ignored.

        Fewer than `fan_out` mean that the partition has no more.
        """
        places = [_place(candidate, self._sign) for candidate in candidates[: self._index.fan_out]]
        if any(worse <= better for better, worse in pairwise(places)):
            raise InvalidCandidate(
                f"the candidates of partition {partition} are not in order, best first: {candidates}"
            )
        with self._lock:
            self._check(partition)
            now = self._clock()
            self._index.update(partition, places)
            self._candidates[partition] = {
                c.id: msgspec.structs.replace(c, partition=partition, shown_at=now)
                for c in candidates[: self._index.fan_out]
            }
            self._updates[partition] += 1
            del self._updated[partition]
            self._updated[partition] = now
            self._index.set_throttled(partition, self._throttled.get(partition))

    def set_partition_throttled(self, partition: int, throttled: bool, reason: str = "") -> None:
        """Leave a partition out of selections, or include it again with the candidates that it has."""
        with self._lock:
            self._check(partition)
            if throttled:
                self._throttled[partition] = reason or "throttled"
            else:
                self._throttled.pop(partition, None)
            self._index.set_throttled(partition, self._throttled.get(partition))

    def select_best(self, count: int) -> list[Candidate]:
        """Remove the `count` best candidates of the available partitions and return them, best first.

        Returns fewer if a partition has to show more. Raises NoAvailableCandidates instead of returning none.
        """
        with self._lock:
            self._check()
            if not 1 <= count <= self._top_k:
                raise BadRequest(f"count is 1 to top_k, {self._top_k}, not {count}")
            self._leave_out_stale()
            chosen = self._index.select(count)
            if not chosen:
                raise NoAvailableCandidates(self._why_none())
            self._selections += 1
            self._selected += len(chosen)
            return [self._candidates[partition].pop(id) for partition, _, id in chosen]

    def candidates(self) -> list[Candidate]:
        """Return the candidates of the available partitions, best first, for a GlobalSelector. None is removed."""
        with self._lock:
            self._check()
            self._leave_out_stale()
            found = [c for partition in self._index.available for c in self._candidates[partition].values()]
        return sorted(found, key=lambda candidate: _place(candidate, self._sign))

    def bounds(self) -> Bounds:
        """Return how many candidates a selection may return, and how many it could return now."""
        with self._lock:
            self._check()
            self._leave_out_stale()
            if self._index.hungry:
                return Bounds(self._top_k, 0)
            shown = {partition: self._index.shown(partition) for partition in self._index.available}
            # The worst candidate of a partition that may hold more is the last that can be selected.
            ends = [s.entries[0][:2] for s in shown.values() if not s.complete]
            end = min(ends, default=None)
            actual = sum(end is None or entry[:2] <= end for s in shown.values() for entry in s.entries)
            return Bounds(self._top_k, actual)

    def stats(self) -> IndexStats:
        """Return counts of the index and of each partition."""
        with self._lock:
            self._check()
            self._leave_out_stale()
            partitions = {
                number: PartitionStats(len(s.entries), self._updates[number], s.throttled, s.complete)
                for number, s in self._index.partitions.items()
            }
            return IndexStats(
                len(self._index.available),
                self._index.candidate_count,
                self._updates.total(),
                self._selections,
                self._selected,
                sorted(self._index.hungry),
                partitions,
            )

    def close(self) -> None:
        """Close the index. All other calls then raise SpineClosed."""
        with self._lock:
            self._is_closed = True

    def _check(self, partition: int | None = None) -> None:
        if self._is_closed:
            raise SpineClosed("the spine index is closed; create another")
        if partition is not None and partition not in self._candidates:
            raise PartitionNotFound(partition)

    def _leave_out_stale(self) -> None:
        oldest = self._clock() - self._max_age
        for partition, updated in self._updated.items():
            if not self._max_age or updated >= oldest:
                return
            if partition not in self._throttled:
                self._index.set_throttled(partition, STALE)

    def _why_none(self) -> str:
        if self._index.hungry:
            names = ", ".join(map(str, sorted(self._index.hungry)))
            return f"partitions have used up the candidates that they showed; update_candidates of {names}"
        left_out = sum(shown.throttled is not None for shown in self._index.partitions.values())
        return f"no partition has a candidate; {left_out} of {len(self._candidates)} are throttled or stale"


# -- policies ----------------------------------------------------------------------------------------------------------


class SelectionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a GlobalSelector chooses.

    Only `best_first` without fairness keeps the order over all partitions; the others keep it within each.
    """

    strategy: Strategy = "best_first"
    max_staleness: float = 0.0  # seconds; a candidate shown longer ago is left out; 0 = none is
    min_freshness: float = 0.0  # seconds; a candidate shown more recently is left out
    fairness_weight: float = 0.0  # 0 to 1, with best_first: the share that is taken from the partitions in turn
    partition_weights: Mapping[int, float] = {}  # with `weighted`; 1 for those that are not named


class SelectorStats(NamedTuple):
    strategy: Strategy
    selections: int
    selected: int
    staleness_violations: int  # candidates left out because of max_staleness
    freshness_violations: int  # candidates left out because of min_freshness
    by_partition: dict[int, int]  # selected candidates


class GlobalSelector:
    """Choose among candidates by a policy. It removes nothing; a candidate passed again may be chosen again."""

    def __init__(
        self,
        policy: SelectionPolicy = SelectionPolicy(),  # noqa: B008 - it is frozen
        *,
        mode: Mode = "min",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a selector. `clock` must be that of the index which showed the candidates."""
        if not 0 <= policy.fairness_weight <= 1:
            raise BadRequest(f"fairness_weight is 0 to 1, not {policy.fairness_weight}")
        self._policy, self._sign, self._clock = policy, _sign(mode), clock
        self._turns = rotation(policy.strategy, policy.partition_weights) or RoundRobin()
        self._selections = self._stale = self._fresh = 0
        self._selected: Counter[int] = Counter()
        self._lock = Lock()

    def select(self, candidates: Iterable[Candidate], n: int) -> list[Candidate]:
        """Return up to n candidates. Raises NoAvailableCandidates if the policy admits none."""
        with self._lock:
            admitted = self._admitted(candidates)
            if not admitted:
                raise NoAvailableCandidates("no candidate is as fresh as the policy requires")
            by_partition: defaultdict[int, list[Candidate]] = defaultdict(list)
            for candidate in sorted(admitted, key=lambda c: _place(c, self._sign), reverse=True):
                by_partition[candidate.partition].append(candidate)  # the best last
            is_best_first = self._policy.strategy == "best_first"
            in_turn = int(n * self._policy.fairness_weight) if is_best_first else n
            counts = {partition: len(left) for partition, left in by_partition.items()}
            chosen = [by_partition[partition].pop() for partition in self._turns.plan(counts, in_turn).order]
            rest = (candidate for left in by_partition.values() for candidate in left)
            chosen += sorted(rest, key=lambda c: _place(c, self._sign))[: n - len(chosen)]
            self._selections += 1
            self._selected.update(candidate.partition for candidate in chosen)
            return chosen

    def stats(self) -> SelectorStats:
        """Return what was selected so far, and what was left out."""
        with self._lock:
            return SelectorStats(
                self._policy.strategy,
                self._selections,
                self._selected.total(),
                self._stale,
                self._fresh,
                dict(self._selected),
            )

    def _admitted(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        now, policy, admitted = self._clock(), self._policy, []
        for candidate in candidates:
            age = now - candidate.shown_at
            if 0 < policy.max_staleness < age:
                self._stale += 1
            elif age < policy.min_freshness:
                self._fresh += 1
            else:
                admitted.append(candidate)
        return admitted


def _sign(mode: Mode) -> int:
    if mode not in ("min", "max"):
        raise BadRequest(f"mode is 'min' or 'max', not {mode!r}")
    return 1 if mode == "min" else -1


def _place(candidate: Candidate, sign: int) -> core.Place:
    if not isinstance(candidate.priority, int) or not isinstance(candidate.id, int):
        raise InvalidCandidate(f"a candidate's priority and id are integers: {candidate}")
    return sign * candidate.priority, candidate.id
