"""Strategies: which worker should have which partition. What is held now and must be given up first is not theirs.

A strategy is asked by the leader alone, and may be anything with an `assign`; `checked` holds each one to its word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from heapline.assign.errors import BadConfig, BadStrategy
from heapline.assign.model import Partition, distinct
from heapline.assign.ring import Ring, hashes_of
from heapline.assign.spreading import spread

Shares = Mapping[str, Sequence[Partition]]


@runtime_checkable
class AssignmentStrategy(Protocol):
    def assign(self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None) -> Shares:
        """Each partition to exactly one of the workers. `previous` is what stood before; it may name workers and
        partitions that are gone. The same question should have the same answer, whoever leads."""
        ...


class WeightedConsistentHashStrategy:
    """A hash ring with bounded load, which leaves partitions where they are as far as the bound allows.

    >>> WeightedConsistentHashStrategy().assign(["a"], [Partition("x")])
    {'a': [Partition(keys=('x',), weight=1)]}
    """

    def __init__(self, virtual_nodes: int = 150, *, load_bound: float = 1.15) -> None:
        if type(virtual_nodes) is not int or not 1 <= virtual_nodes <= 10_000:
            raise BadConfig(f"virtual_nodes={virtual_nodes!r} must be a whole number from 1 to 10000")
        if not 1.01 <= load_bound <= 2:
            raise BadConfig(f"load_bound={load_bound!r} must be from 1.01 to 2: the largest load next to the mean")
        self.virtual_nodes, self.load_bound = virtual_nodes, load_bound

    def assign(
        self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None
    ) -> dict[str, list[Partition]]:
        names = in_order(workers)
        partitions = list(partitions)
        ids = [partition.id for partition in partitions]
        if len(set(ids)) < len(ids):
            distinct(partitions)  # says which
        hashes = hashes_of(ids)
        weights = np.array([partition.weight for partition in partitions], dtype=np.float64)
        holders = np.array(holders_of(names, ids, previous), dtype=np.int64)
        ring = Ring(names, self.virtual_nodes)
        holders = spread(hashes, weights, holders, ring, len(names), self.load_bound)
        return grouped(names, partitions, holders.tolist())


class RoundRobinStrategy:
    """Sorted partitions to sorted workers in turn: simple, even in number, and without any affinity."""

    def assign(
        self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None
    ) -> dict[str, list[Partition]]:
        names, partitions = in_order(workers), distinct(partitions)
        return {name: list(partitions[at :: len(names)]) for at, name in enumerate(names)}


def checked(
    strategy: AssignmentStrategy,
    workers: Sequence[str],
    partitions: Sequence[Partition],
    previous: Shares | None = None,
) -> dict[str, tuple[Partition, ...]]:
    """What the strategy answers, if that is an assignment; BadStrategy if not. Every worker has an entry."""
    wanted = {partition.id: partition for partition in distinct(partitions)}
    name = type(strategy).__name__
    in_order(workers)
    try:
        answer = strategy.assign(workers, partitions, previous)
        given = {worker: tuple(wanted.get(each.id, each) for each in answer[worker]) for worker in answer}
    except (TypeError, AttributeError, LookupError) as error:
        raise BadStrategy(name, f"failed with {type(error).__name__}") from error
    if strangers := sorted(map(str, given.keys() - set(workers))):
        raise BadStrategy(name, f"gave partitions to {_some(strangers)}, who is no worker")
    ids = [partition.id for share in given.values() for partition in share]
    if strangers := sorted(set(ids) - wanted.keys()):
        raise BadStrategy(name, f"gave away {_some(strangers)}, which is no partition")
    if missing := sorted(wanted.keys() - set(ids)):
        raise BadStrategy(name, f"left out {_some(missing)}")
    if len(ids) > len(wanted):
        seen: set[str] = set()
        twice = sorted({id for id in ids if id in seen or seen.add(id)})  # type: ignore[func-returns-value]
        raise BadStrategy(name, f"gave {_some(twice)} to more than one, or twice")
    return {worker: given.get(worker, ()) for worker in workers}


def affinity(before: Shares, after: Shares) -> float:
    """Of the partitions that are there before and after, the share that stayed with its worker; 1 if there are none."""
    old = {partition.id: worker for worker, share in before.items() for partition in share}
    both = [(worker, old[each.id]) for worker, share in after.items() for each in share if each.id in old]
    return sum(new == previous for new, previous in both) / len(both) if both else 1.0


def moved_share(before: Shares, after: Shares) -> float:
    """Of the weight of all partitions (of their number, if none has a weight), the share that has another holder."""
    old = {partition.id: worker for worker, share in before.items() for partition in share}
    weights = [(each.weight, old.get(each.id) != worker) for worker, share in after.items() for each in share]
    total = sum(weight for weight, _ in weights)
    if not total:
        return sum(moved for _, moved in weights) / len(weights) if weights else 0.0
    return sum(weight for weight, moved in weights if moved) / total


def in_order(workers: Iterable[str]) -> list[str]:
    names = sorted(workers)
    if not names:
        raise BadConfig("there are no workers to give partitions to")
    if len(set(names)) < len(names):
        raise BadConfig("a worker is named twice: name each one once")
    return names


def holders_of(names: Sequence[str], ids: Sequence[str], previous: Shares | None) -> list[int]:
    """The number of the worker that has each partition; -1 if it has none, or one that is gone."""
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


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
