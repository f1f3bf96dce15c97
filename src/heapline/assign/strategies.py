"""Assignment strategies: which worker should have which partition.

Only the leader runs a strategy. Any object with an `assign` method of two or three parameters will do; `assign_checked`
verifies its result. A strategy does not know which partitions must be dropped before they can move.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np

from heapline.assign.bounded_hash import Ring, assign_holders, hashes_of
from heapline.assign.errors import BadConfig, BadStrategy
from heapline.assign.partitions import Partition, distinct

Shares = Mapping[str, Sequence[Partition]]


@runtime_checkable
class AssignmentStrategy(Protocol):
    """Assigns partitions to workers."""

    def assign(self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None) -> Shares:
        """Assign each partition to exactly one of the workers.

        `previous` is the current assignment; it may name workers and partitions that no longer exist. The result should
        depend on the arguments alone, so that every leader gets the same.
        """
        ...


class StatelessStrategy(Protocol):
    """Assigns partitions to workers without regard to the current assignment. Every AssignmentStrategy is one, too."""

    def assign(self, workers: Sequence[str], partitions: Sequence[Partition]) -> Shares: ...


class WeightedConsistentHashStrategy:
    """A hash ring with bounded load. Partitions stay where they are as far as the bound allows.

    >>> WeightedConsistentHashStrategy().assign(["a"], [Partition("x")])
    {'a': [Partition(keys=('x',), weight=1)]}
    """

    def __init__(self, virtual_nodes: int = 150, *, load_bound: float = 1.15) -> None:
        if type(virtual_nodes) is not int or not 1 <= virtual_nodes <= 10_000:
            raise BadConfig(f"virtual_nodes={virtual_nodes!r} must be a whole number from 1 to 10000")
        if not 1.01 <= load_bound <= 2:
            raise BadConfig(f"load_bound={load_bound!r} must be from 1.01 to 2 (largest load / mean load)")
        self.virtual_nodes, self.load_bound = virtual_nodes, load_bound

    def assign(
        self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None
    ) -> dict[str, list[Partition]]:
        names = sorted_workers(workers)
        partitions = list(partitions)
        ids = [partition.id for partition in partitions]
        if len(set(ids)) < len(ids):
            distinct(partitions)  # raises, naming the duplicate
        hashes = hashes_of(ids)
        weights = np.array([partition.weight for partition in partitions], dtype=np.float64)
        holders = np.array(holders_of(names, ids, previous), dtype=np.int64)
        ring = Ring(names, self.virtual_nodes)
        holders = assign_holders(hashes, weights, holders, ring, len(names), self.load_bound)
        return grouped(names, partitions, holders.tolist())


class RoundRobinStrategy:
    """Deals sorted partitions to sorted workers in turn: simple and even in number, but without affinity."""

    def assign(
        self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None
    ) -> dict[str, list[Partition]]:
        names, partitions = sorted_workers(workers), distinct(partitions)
        return {name: list(partitions[at :: len(names)]) for at, name in enumerate(names)}


def assign_checked(
    strategy: StatelessStrategy,
    workers: Sequence[str],
    partitions: Sequence[Partition],
    previous: Shares | None = None,
) -> dict[str, tuple[Partition, ...]]:
    """Run a strategy and return its result with an entry for every worker.

    Raise BadStrategy if the result is not an assignment.
    """
    wanted = {partition.id: partition for partition in distinct(partitions)}
    name = type(strategy).__name__
    sorted_workers(workers)
    try:
        answer = _assign(strategy, workers, partitions, previous)
        given = {worker: tuple(wanted.get(each.id, each) for each in answer[worker]) for worker in answer}
    except (TypeError, AttributeError, LookupError) as error:
        raise BadStrategy(name, f"failed with {type(error).__name__}") from error
    if unknown := sorted(map(str, given.keys() - set(workers))):
        raise BadStrategy(name, f"gave partitions to {_name_some(unknown)}, which is not a worker")
    ids = [partition.id for share in given.values() for partition in share]
    if unknown := sorted(set(ids) - wanted.keys()):
        raise BadStrategy(name, f"assigned {_name_some(unknown)}, which is not a partition")
    if missing := sorted(wanted.keys() - set(ids)):
        raise BadStrategy(name, f"did not assign {_name_some(missing)}")
    if len(ids) > len(wanted):
        seen: set[str] = set()
        duplicates = sorted({id for id in ids if id in seen or seen.add(id)})  # type: ignore[func-returns-value]
        raise BadStrategy(name, f"assigned {_name_some(duplicates)} more than once")
    return {worker: given.get(worker, ()) for worker in workers}


def _assign(
    strategy: StatelessStrategy, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None
) -> Shares:
    """Call the strategy with the current assignment if it has a parameter for it."""
    parameters = inspect.signature(strategy.assign)
    try:
        parameters.bind(workers, partitions, previous)
    except TypeError:
        return strategy.assign(workers, partitions)
    return cast(AssignmentStrategy, strategy).assign(workers, partitions, previous)


def affinity(before: Shares, after: Shares) -> float:
    """Return the share of partitions in both assignments that stayed with their worker; 1 if there are none."""
    old = {partition.id: worker for worker, share in before.items() for partition in share}
    both = [(worker, old[each.id]) for worker, share in after.items() for each in share if each.id in old]
    return sum(new == previous for new, previous in both) / len(both) if both else 1.0


def moved_share(before: Shares, after: Shares) -> float:
    """Return the share of the total weight that changed holder (of the number of partitions if all weights are 0)."""
    old = {partition.id: worker for worker, share in before.items() for partition in share}
    weights = [(each.weight, old.get(each.id) != worker) for worker, share in after.items() for each in share]
    total = sum(weight for weight, _ in weights)
    if not total:
        return sum(moved for _, moved in weights) / len(weights) if weights else 0.0
    return sum(weight for weight, moved in weights if moved) / total


def sorted_workers(workers: Iterable[str]) -> list[str]:
    """Return the workers sorted. Raise BadConfig if there are none or one is listed twice."""
    names = sorted(workers)
    if not names:
        raise BadConfig("there are no workers to assign partitions to")
    if len(set(names)) < len(names):
        raise BadConfig("a worker is listed twice; list each worker once")
    return names


def holders_of(names: Sequence[str], ids: Sequence[str], previous: Shares | None) -> list[int]:
    """Return the index of each partition's worker, or -1 if it has none or its worker is gone."""
    if not previous:
        return [-1] * len(ids)
    held: dict[str, int] = {}
    for at, name in enumerate(names):
        for partition in previous.get(name, ()):
            held.setdefault(partition.id, at)
    return [held.get(id, -1) for id in ids]


def grouped(
    names: Sequence[str], partitions: Sequence[Partition], holders: Sequence[int]
) -> dict[str, list[Partition]]:
    shares: list[list[Partition]] = [[] for _ in names]
    for partition, holder in zip(partitions, holders, strict=True):
        shares[holder].append(partition)
    return dict(zip(names, shares, strict=True))


def _name_some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
