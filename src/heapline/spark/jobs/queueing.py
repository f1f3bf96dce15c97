"""A queue in a few lines: what waits there are when messages with priorities meet a number of workers.

A discrete simulation, exact for what it is given: no interruption of work that has begun, smaller priorities first,
first come first served among equals, every worker takes the next message the moment that it is free. Times are seconds.
Pure Python over a heap of integers (a microsecond or two a message); where the arrivals come from is not known here.

What a real queue adds is left out: the time to fetch and to ack, waits before a retry, and that a pop over many
partitions may hand out a message that is among the best few and not the very best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.errors import BadRequest

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """What comes in, by the time at which it is ready. Where `runs` differ the queue begins anew, empty and idle."""

    arrivals: F64
    priorities: I64
    services: F64
    runs: I64

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[slice]:
        """Each run by itself."""
        bounds = [0, *(np.flatnonzero(np.diff(self.runs)) + 1).tolist(), len(self.runs)]
        return (slice(low, high) for low, high in pairwise(bounds) if low < high)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last, without the time between runs."""
        return float(sum(self.arrivals[run][-1] - self.arrivals[run][0] for run in self))


def load_of(arrivals: F64, priorities: I64, services: F64, runs: I64 | None = None) -> Load:
    """In order of arrival within their runs."""
    runs = np.zeros(len(arrivals), dtype=np.int64) if runs is None else runs
    order = np.lexsort((arrivals, runs))
    return Load(arrivals[order], priorities[order], services[order], runs[order])


def simulate(load: Load, workers: int) -> F64:
    """How long each message waits until a worker takes it."""
    if workers < 1:
        raise BadRequest(f"{workers} workers would never do anything: take 1 or more")
    waits = np.empty(len(load), dtype=np.float64)
    ranks = np.unique(load.priorities, return_inverse=True)[1].reshape(-1)
    for run in load:
        waits[run] = _simulate(load.arrivals[run], ranks[run], load.services[run], workers)
    return waits


def _simulate(arrivals: F64, ranks: npt.NDArray[np.intp], services: F64, workers: int) -> F64:
    count = len(arrivals)
    # The heap orders integers that hold both, the priority and the place in the line.
    keys: list[int] = (ranks.astype(np.int64) * count + np.arange(count)).tolist()
    ready, takes = arrivals.tolist(), services.tolist()
    starts = [0.0] * count
    free = [ready[0]] * min(workers, count)  # when each worker is free: a heap
    line: list[int] = []
    following, now = 0, ready[0]
    for _ in range(count):
        # A worker that has been idle for long is free since before the message came that it takes.
        now = max(free[0], now if line else ready[following])
        while following < count and ready[following] <= now:
            heappush(line, keys[following])
            following += 1
        taken = heappop(line) % count
        starts[taken] = now
        heapreplace(free, now + takes[taken])
    return np.asarray(starts) - arrivals


def grown(load: Load, growth: float, rng: np.random.Generator) -> Load:
    """The same course of the day with `growth` times as many messages. New ones come between their model and the one
    after it, since copies at the same moment would be bursts that nobody has seen."""
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
    """For each wanted priority a service time that was seen with it; with any, where none was seen with that one."""
    if not len(services):
        raise BadRequest("no message has been done yet, so nothing is known of how long one takes")
    drawn = rng.choice(services, size=len(wanted))
    for priority in np.intersect1d(priorities, wanted):
        here = wanted == priority
        drawn[here] = rng.choice(services[priorities == priority], size=int(here.sum()))
    return drawn


def fewest(is_enough: Callable[[int], bool], most: int, guess: int = 1) -> int | None:
    """The smallest number that is enough, by doubling and halving; None if not even `most` is. What is returned was
    tried, and so was one less.

    >>> fewest(lambda n: n >= 37, 1000), fewest(lambda n: n >= 1, 8), fewest(lambda n: False, 8)
    (37, 1, None)
    """
    low, high = 0, max(min(guess, most), 1)  # low is not enough
    while not is_enough(high):
        if high == most:
            return None
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def quantiles(waits: F64, ranks: tuple[float, ...]) -> tuple[float, ...]:
    """Each of them is a wait that occurred: the smallest that so many were not over."""
    found: Any = np.quantile(waits, ranks, method="inverted_cdf") if len(waits) else [0.0] * len(ranks)
    return tuple(float(value) for value in found)
