"""How long messages would have waited with another number of workers, and how many it takes to keep a goal.

Spark brings the past together: when each message was ready, its priority, and how long the work took. That goes to the
driver as Arrow columns, where queueing.py plays it against crowds of workers. A past too long for that is sampled by
whole stretches of time, so that bursts stay bursts. What the figures look like is decided in forecast_page.py.

A message that was tried again is charged as often as it was tried. Service times are drawn anew from those seen with
the same priority, with a fixed seed: the same past gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from heapline.errors import BadRequest
from heapline.spark.jobs.queueing import F64, I64, Load, fewest, grown, load_of, quantiles, resampled, simulate

MESSAGES_MAX = 1_000_000  # some 3 s for each crowd
WINDOWS = 48  # stretches that a long past is cut into, of which every so-many-th is taken
PRIORITIES_MAX = 12  # the most frequent ones have a row of their own
WORKERS_MAX = 4096
GOAL_RANK = 0.95
_SEED = 20260


@dataclass(frozen=True)
class Wait:
    """Of the messages of one priority, or of all (None); ms."""

    priority: int | None
    messages: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Crowd:
    workers: int
    busy: float  # the share of the workers' time that work takes, 0 to 1; at 1 the line only grows
    waits: tuple[Wait, ...]  # all together first
    meets_goal: bool | None  # None: there is none


@dataclass(frozen=True)
class Forecast:
    topic: str
    messages: int  # simulated, grown ones included
    sampled: float  # the share of the past that this rests on, 0 to 1
    seconds: float
    arrivals_per_second: float
    service_mean_ms: float
    growth: float
    goals_ms: dict[str, float]  # by priority; "" is for all others
    observed: tuple[Wait, ...]  # as it was, by the same messages
    crowds: tuple[Crowd, ...]
    workers_needed: int | None  # to keep the goals; None: no goal, or more than WORKERS_MAX
    floor: int  # with fewer, work would pile up without end


def forecast(
    spark: Any, where: Mapping[str, str] | None, topic: str, *, lake: str | None = None, lifecycles: Any = None,
    workers: Sequence[int] | None = None, goal: float | Mapping[int | None, float] | None = None, growth: float = 1.0,
    since: datetime | None = None, until: datetime | None = None, messages_max: int = MESSAGES_MAX,
    tell: Callable[[str], None] | None = None,
) -> Forecast:  # fmt: skip
    """`goal`: the p95 of waits in seconds, for all priorities or by priority ({0: 1.0, None: 30.0})."""
    tell = tell or (lambda _: None)
    goals = _checked(workers, goal, growth)
    if lifecycles is None:
        from heapline.spark.jobs.report import read_lifecycles

        lifecycles, _ = read_lifecycles(spark, where, lake, topic)
    tell("collecting arrivals …")
    past, sampled = _collected(lifecycles, since, until, max(int(messages_max / max(growth, 1.0)), 1))
    rng = np.random.default_rng(_SEED)
    load = grown(_load(past, rng), growth, rng)
    waits = _ms(past["wait_ms"].to_numpy(zero_copy_only=False))
    crowds = _Crowds(load, goals, tell)
    needed = fewest(lambda n: crowds.of(n).meets_goal is True, WORKERS_MAX, crowds.floor) if goals else None
    for count in workers or _some_crowds(crowds.floor, needed):
        crowds.of(count)
    return Forecast(
        topic=topic, messages=len(load), sampled=sampled, seconds=load.seconds,
        arrivals_per_second=len(load) / max(load.seconds, 1e-3), service_mean_ms=float(load.services.mean()) * 1000,
        growth=growth, goals_ms={"" if p is None else str(p): s * 1000 for p, s in goals.items()},
        observed=_waits(waits[~np.isnan(waits)] / 1000, _column(past, "priority")[~np.isnan(waits)]),
        crowds=tuple(sorted(crowds.shown(workers, needed), key=lambda crowd: crowd.workers)), workers_needed=needed,
        floor=crowds.floor,
    )  # fmt: skip


def _checked(
    workers: Sequence[int] | None, goal: float | Mapping[int | None, float] | None, growth: float
) -> dict[int | None, float]:
    if workers is not None and (not workers or not all(1 <= n <= WORKERS_MAX for n in workers)):
        raise BadRequest(f"workers are numbers from 1 to {WORKERS_MAX}, as [1, 2, 4]")
    if not (math.isfinite(growth) and 0 < growth <= 1000):
        raise BadRequest(f"growth is how many times as much comes, such as 1.5; not {growth}")
    goals: dict[int | None, float] = {}
    if isinstance(goal, int | float):
        goals[None] = float(goal)
    elif goal is not None:
        goals.update(goal)
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in goals.values()):
        raise BadRequest("a goal is a number of seconds from 0 on")
    return goals


class _Crowds:
    """What becomes of the load with so many workers; each number is tried once."""

    def __init__(self, load: Load, goals: dict[int | None, float], tell: Callable[[str], None]) -> None:
        self._load, self._goals, self._tell = load, goals, tell
        self._found: dict[int, Crowd] = {}
        self._work = float(load.services.sum())
        # All could be done by then at the earliest, also where everything came at one moment.
        self._lasts = max(load.seconds + float(load.services.max()), 1e-3)
        self.floor = min(max(math.ceil(self._work / self._lasts), 1), WORKERS_MAX)

    def of(self, workers: int) -> Crowd:
        if workers not in self._found:
            self._tell(f"{workers} workers …")
            waits = simulate(self._load, workers)
            busy = min(self._work / (workers * self._lasts), 1.0)
            told = _waits(waits, self._load.priorities)
            self._found[workers] = Crowd(workers, busy, told, self._meets(waits) if self._goals else None)
        return self._found[workers]

    def _meets(self, waits: F64) -> bool:
        priorities = self._load.priorities
        for priority, seconds in self._goals.items():
            # A goal for all others is kept for each of them, not on the whole: rare and patient ones would hide it.
            meant = [priority] if priority is not None else [p for p in np.unique(priorities) if p not in self._goals]
            for one in meant:
                if quantiles(waits[priorities == one], (GOAL_RANK,))[0] > seconds:
                    return False
        return True

    def shown(self, workers: Sequence[int] | None, needed: int | None) -> list[Crowd]:
        """Those that were asked for, and the answer with its neighbour below; not every step of the search."""
        if workers is None:
            return [self._found[n] for n in _some_crowds(self.floor, needed)]
        answer = () if needed is None else (needed, needed - 1)
        return [self._found[n] for n in {*workers, *answer} if n in self._found]


def _some_crowds(floor: int, needed: int | None) -> list[int]:
    """Where nobody said which to look at: around the point where waits begin to be short.

    >>> _some_crowds(3, None), _some_crowds(3, 5)
    ([2, 3, 4, 6, 12], [2, 3, 4, 5, 6, 12])
    """
    found = {
        max(floor - 1, 1),
        floor,
        floor + 1,
        2 * floor,
        4 * floor,
        *([needed, max(needed - 1, 1)] if needed else []),
    }
    return sorted(n for n in found if n <= WORKERS_MAX)


def _collected(lifecycles: Any, since: datetime | None, until: datetime | None, most: int) -> tuple[Any, float]:
    """(ready_ms, priority, service_ms, tries, wait_ms, run) as an Arrow table; and which share of the past it is."""
    from pyspark.sql import functions as F

    from heapline.spark.jobs.report import within

    rows = lifecycles.where(within(F, "due_at", since, until) & F.col("priority").isNotNull()).select(
        F.unix_millis("due_at").alias("ready_ms"), "priority", "service_ms",
        (F.coalesce("retries", F.lit(0)) + 1).alias("tries"), "wait_ms",
    )  # fmt: skip
    facts = rows.agg(F.count("*").alias("n"), F.min("ready_ms").alias("low"), F.max("ready_ms").alias("high"))
    (all_,) = facts.collect()
    if not all_.n:
        raise BadRequest("no message became ready in that time, so there is nothing to learn from")
    if all_.n <= most:
        return rows.withColumn("run", F.lit(0).cast("bigint")).toArrow(), 1.0
    width = max((all_.high - all_.low) // WINDOWS, 1)
    # Every so-many-th stretch; neighbours are never taken, so that each is a run by itself.
    every = max(math.ceil(all_.n / most), 2)
    window = F.floor((F.col("ready_ms") - all_.low) / width).cast("bigint")
    taken = rows.withColumn("run", window).where(F.col("run") % every == 0).toArrow()
    return taken, taken.num_rows / all_.n


def _column(table: Any, name: str) -> Any:
    return table[name].to_numpy(zero_copy_only=False)


def _ms(values: Any) -> F64:
    """Nulls come as NaN, or not at all."""
    found: F64 = np.asarray(values, dtype=np.float64)
    return found


def _load(past: Any, rng: np.random.Generator) -> Load:
    ready, runs, tries = (_column(past, name) for name in ("ready_ms", "run", "tries"))
    priorities: I64 = _column(past, "priority").astype(np.int64)
    services = _ms(_column(past, "service_ms"))
    seen = ~np.isnan(services)
    drawn = resampled(np.maximum(services[seen], 0.0) / 1000, priorities[seen], priorities, rng)
    return load_of((ready - ready.min()) / 1000, priorities, drawn * tries, runs)


def _waits(waits: F64, priorities: I64) -> tuple[Wait, ...]:
    if not len(waits):
        return ()
    values, counts = np.unique(priorities, return_counts=True)
    frequent = np.sort(values[np.argsort(-counts, kind="stable")[:PRIORITIES_MAX]])
    return (_wait(None, waits), *(_wait(int(p), waits[priorities == p]) for p in frequent))


def _wait(priority: int | None, waits: F64) -> Wait:
    p50, p95, p99 = quantiles(waits, (0.5, GOAL_RANK, 0.99))
    mean, most = float(waits.mean()), float(waits.max())
    return Wait(priority, len(waits), *(round(value * 1000, 3) for value in (mean, p50, p95, p99, most)))
