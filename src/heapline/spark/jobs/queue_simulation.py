"""Simulate a priority queue: the waits of messages that arrive at a pool of workers.

A discrete simulation, exact for its input: work that has started is not interrupted, smaller priorities go first, equal
priorities are served in order of arrival, and every worker takes the next message as soon as it is free. Times are in
seconds. Pure Python over a heap of integers, 1 to 2 µs per message.

Left out: the time to fetch and to ack, waits before a retry, and that a pop over many partitions may return a message
that is among the best few and not the very best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """Arriving messages, by the time at which they are ready.

    Each value of `runs` starts with an empty queue and idle workers.
    """

    arrivals: F64
    priorities: I64
    services: F64
    runs: I64

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[slice]:
        """Yield each run as a slice."""
        bounds = [0, *(np.flatnonzero(np.diff(self.runs)) + 1).tolist(), len(self.runs)]
        return (slice(low, high) for low, high in pairwise(bounds) if low < high)

    @property
    def seconds(self) -> float:
        """The time from the first arrival to the last, without the time between runs."""
        return float(sum(self.arrivals[run][-1] - self.arrivals[run][0] for run in self))


def load_of(arrivals: F64, priorities: I64, services: F64, runs: I64 | None = None) -> Load:
    """Return a load sorted by arrival within runs."""
    runs = np.zeros(len(arrivals), dtype=np.int64) if runs is None else runs
    order = np.lexsort((arrivals, runs))
    return Load(arrivals[order], priorities[order], services[order], runs[order])


def simulate(load: Load, workers: int) -> F64:
    """Return how long each message waits until a worker takes it."""
    if workers < 1:
        raise BadRequest(f"workers must be 1 or more, not {workers}")
    waits = np.empty(len(load), dtype=np.float64)
    ranks = np.unique(load.priorities, return_inverse=True)[1].reshape(-1)
    for run in load:
        waits[run] = _simulate(load.arrivals[run], ranks[run], load.services[run], workers)
    return waits


def _simulate(arrivals: F64, ranks: npt.NDArray[np.intp], services: F64, workers: int) -> F64:
    count = len(arrivals)
    # The heap orders integers that combine the priority and the order of arrival.
    keys: list[int] = (ranks.astype(np.int64) * count + np.arange(count)).tolist()
    ready, takes = arrivals.tolist(), services.tolist()
    starts = [0.0] * count
    free = [ready[0]] * min(workers, count)  # when each worker is free: a heap
    queue: list[int] = []
    following, now = 0, ready[0]
    for _ in range(count):
        # An idle worker may have been free since before its next message arrived.
        now = max(free[0], now if queue else ready[following])
        while following < count and ready[following] <= now:
            heappush(queue, keys[following])
            following += 1
        taken = heappop(queue) % count
        starts[taken] = now
        heapreplace(free, now + takes[taken])
    return np.asarray(starts) - arrivals


def grown(load: Load, growth: float, rng: np.random.Generator) -> Load:
    """Return `growth` times as many messages with the same distribution over time.

    A copy arrives between its original and the next message, because copies at the same time would be artificial
    bursts.
    """
    if growth == 1.0:
        return load
    whole, part = divmod(growth, 1.0)
    copies = int(whole) + (rng.random(len(load)) < part)
    chosen = np.repeat(np.arange(len(load)), copies)
    is_copy = np.ones(len(chosen), dtype=np.bool_)
    is_copy[(np.cumsum(copies) - copies)[copies > 0]] = False
    after = np.minimum(chosen + 1, len(load) - 1)
    gap = np.where(load.runs[after] == load.runs[chosen], load.arrivals[after] - load.arrivals[chosen], 0.0)
    arrivals = load.arrivals[chosen] + is_copy * gap * rng.random(len(chosen))
    return load_of(arrivals, load.priorities[chosen], load.services[chosen], load.runs[chosen])


def resampled(services: F64, priorities: I64, wanted: I64, rng: np.random.Generator) -> F64:
    """Draw, for each wanted priority, a service time seen with that priority, or with any if there is none."""
    if not len(services):
        raise BadRequest("no message has ended yet, so service times are unknown")
    drawn = rng.choice(services, size=len(wanted))
    for priority in np.intersect1d(priorities, wanted):
        here = wanted == priority
        drawn[here] = rng.choice(services[priorities == priority], size=int(here.sum()))
    return drawn


def fewest(is_sufficient: Callable[[int], bool], most: int, guess: int = 1) -> int | None:
    """Return the smallest sufficient number, or None if `most` is not sufficient. The result and one less were tried.

    >>> fewest(lambda n: n >= 37, 1000), fewest(lambda n: n >= 1, 8), fewest(lambda n: False, 8)
    (37, 1, None)
    """
    low, high = 0, max(min(guess, most), 1)  # low is not sufficient
    while not is_sufficient(high):
        if high == most:
            return None
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        if is_sufficient(middle):
            high = middle
        else:
            low = middle
    return high


def quantiles(waits: F64, ranks: tuple[float, ...]) -> tuple[float, ...]:
    """Return quantiles that are observed values: the smallest wait that the given share does not exceed."""
    found: Any = np.quantile(waits, ranks, method="inverted_cdf") if len(waits) else [0.0] * len(ranks)
    return tuple(float(value) for value in found)
