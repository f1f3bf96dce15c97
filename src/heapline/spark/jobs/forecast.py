"""The job `forecast`: how long messages would have waited with other numbers of workers, and how many a goal needs.

Spark collects the past: when each message was ready, its priority, and how long its work took. The driver receives this
as Arrow columns, and queue_simulation.py plays it against pools of workers. If the past is too long, whole windows of
time are sampled, so that bursts stay bursts. report_page.py decides what is shown.

A message that was retried costs as many service times as it had tries. Service times are drawn from those seen with the
same priority, with a fixed seed, so the same past gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from pyspark.sql import functions as F

from heapline.contract.errors import BadRequest
from heapline.spark.jobs.lifecycles import topic_lifecycles
from heapline.spark.jobs.queue_simulation import F64, I64, Load, fewest, grown, load_of, quantiles, resampled, simulate
from heapline.spark.jobs.report import within

MESSAGES_MAX = 1_000_000  # about 3 s per worker pool
WINDOWS = 48  # a long past is divided into windows, of which every n-th is used
PRIORITIES_MAX = 12  # priorities with their own row, the most frequent ones first
WORKERS_MAX = 4096
GOAL_RANK = 0.95
_SEED = 20260


@dataclass(frozen=True)
class Wait:
    """Waits of the messages of one priority, or of all (None), in ms."""

    priority: int | None
    messages: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class WorkerPool:
    workers: int
    busy: float  # the share of the workers' time that is used, 0 to 1; at 1 the queue only grows
    waits: tuple[Wait, ...]  # the first is for all priorities
    meets_goal: bool | None  # None: there is no goal


@dataclass(frozen=True)
class Forecast:
    topic: str
    messages: int  # simulated, including those added for growth
    sampled: float  # the share of the past that was used, 0 to 1
    seconds: float
    arrivals_per_second: float
    service_mean_ms: float
    growth: float
    goals_ms: dict[str, float]  # by priority; "" is for all others
    observed: tuple[Wait, ...]  # the actual waits of the same messages
    pools: tuple[WorkerPool, ...]
    workers_needed: int | None  # to meet the goals; None: no goal, or more than WORKERS_MAX
    floor: int  # with fewer workers the queue would grow without end


def forecast(
    spark: Any,
    where: Mapping[str, str] | None,
    topic: str,
    *,
    lake: str | None = None,
    lifecycles: Any = None,
    workers: Sequence[int] | None = None,
    goal: float | Mapping[int | None, float] | None = None,
    growth: float = 1.0,
    since: datetime | None = None,
    until: datetime | None = None,
    messages_max: int = MESSAGES_MAX,
    tell: Callable[[str], None] | None = None,
) -> Forecast:
    """Forecast waits.

    `goal` is the p95 of waits in seconds, for all priorities or by priority ({0: 1.0, None: 30.0}).
    """
    tell = tell or (lambda _: None)
    goals = _checked(workers, goal, growth)
    if lifecycles is None:
        lifecycles, _ = topic_lifecycles(spark, where, lake, topic)
    tell("collecting arrivals …")
    past, sampled = _collected(lifecycles, since, until, max(int(messages_max / max(growth, 1.0)), 1))
    rng = np.random.default_rng(_SEED)
    load = grown(_load(past, rng), growth, rng)
    waits = _ms(_column(past, "wait_ms"))
    pools = _Pools(load, goals, tell)
    needed = fewest(lambda n: pools.of(n).meets_goal is True, WORKERS_MAX, pools.floor) if goals else None
    for count in workers or _default_sizes(pools.floor, needed):
        pools.of(count)
    return Forecast(
        topic=topic,
        messages=len(load),
        sampled=sampled,
        seconds=load.seconds,
        arrivals_per_second=len(load) / max(load.seconds, 1e-3),
        service_mean_ms=float(load.services.mean()) * 1000,
        growth=growth,
        goals_ms={"" if p is None else str(p): s * 1000 for p, s in goals.items()},
        observed=_waits(waits[~np.isnan(waits)] / 1000, _column(past, "priority")[~np.isnan(waits)]),
        pools=tuple(sorted(pools.shown(workers, needed), key=lambda p: p.workers)),
        workers_needed=needed,
        floor=pools.floor,
    )


def _checked(
    workers: Sequence[int] | None, goal: float | Mapping[int | None, float] | None, growth: float
) -> dict[int | None, float]:
    if workers is not None and (not workers or not all(1 <= n <= WORKERS_MAX for n in workers)):
        raise BadRequest(f"workers must be numbers from 1 to {WORKERS_MAX}, such as [1, 2, 4]")
    if not (math.isfinite(growth) and 0 < growth <= 1000):
        raise BadRequest(f"growth must be a factor over 0 and up to 1000, such as 1.5, not {growth}")
    goals: dict[int | None, float] = {}
    if isinstance(goal, int | float):
        goals[None] = float(goal)
    elif goal is not None:
        goals.update(goal)
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in goals.values()):
        raise BadRequest("a goal must be a number of seconds from 0 on")
    return goals


class _Pools:
    """Simulated worker pools. Each number of workers is simulated once."""

    def __init__(self, load: Load, goals: dict[int | None, float], tell: Callable[[str], None]) -> None:
        self._load, self._goals, self._tell = load, goals, tell
        self._found: dict[int, WorkerPool] = {}
        self._work = float(load.services.sum())
        # The earliest time at which all could be done, even if everything arrived together.
        self._lasts = max(load.seconds + float(load.services.max()), 1e-3)
        self.floor = min(max(math.ceil(self._work / self._lasts), 1), WORKERS_MAX)

    def of(self, workers: int) -> WorkerPool:
        if workers not in self._found:
            self._tell(f"{workers} workers …")
            waits = simulate(self._load, workers)
            busy = min(self._work / (workers * self._lasts), 1.0)
            summary = _waits(waits, self._load.priorities)
            self._found[workers] = WorkerPool(workers, busy, summary, self._meets(waits) if self._goals else None)
        return self._found[workers]

    def _meets(self, waits: F64) -> bool:
        priorities = self._load.priorities
        for priority, seconds in self._goals.items():
            # A goal for all other priorities must be met by each of them, because an average would hide rare ones.
            meant = [priority] if priority is not None else [p for p in np.unique(priorities) if p not in self._goals]
            for value in meant:
                if quantiles(waits[priorities == value], (GOAL_RANK,))[0] > seconds:
                    return False
        return True

    def shown(self, workers: Sequence[int] | None, needed: int | None) -> list[WorkerPool]:
        """Return the requested pools, and the answer with the next smaller one; not every step of the search."""
        if workers is None:
            return [self._found[n] for n in _default_sizes(self.floor, needed)]
        answer = () if needed is None else (needed, needed - 1)
        return [self._found[n] for n in {*workers, *answer} if n in self._found]


def _default_sizes(floor: int, needed: int | None) -> list[int]:
    """Return the default pool sizes: around the point where waits become short.

    >>> _default_sizes(3, None), _default_sizes(3, 5)
    ([2, 3, 4, 6, 12], [2, 3, 4, 5, 6, 12])
    """
    around = [needed, max(needed - 1, 1)] if needed else []
    found = {max(floor - 1, 1), floor, floor + 1, 2 * floor, 4 * floor, *around}
    return sorted(n for n in found if n <= WORKERS_MAX)


def _collected(lifecycles: Any, since: datetime | None, until: datetime | None, most: int) -> tuple[Any, float]:
    """Return (ready_ms, priority, service_ms, tries, wait_ms, run) as an Arrow table, and its share of the past."""
    rows = lifecycles.where(within("due_at", since, until) & F.col("priority").isNotNull()).select(
        F.unix_millis("due_at").alias("ready_ms"),
        "priority",
        "service_ms",
        (F.coalesce("retries", F.lit(0)) + 1).alias("tries"),
        "wait_ms",
    )
    facts = rows.agg(F.count("*").alias("n"), F.min("ready_ms").alias("low"), F.max("ready_ms").alias("high"))
    (all_,) = facts.collect()
    if not all_.n:
        raise BadRequest("no message became ready in this period, so there is nothing to forecast from")
    if all_.n <= most:
        return rows.withColumn("run", F.lit(0).cast("bigint")).toArrow(), 1.0
    width = max((all_.high - all_.low) // WINDOWS, 1)
    # Every n-th window; n is at least 2, so that no two windows are adjacent and each is a separate run.
    every = max(math.ceil(all_.n / most), 2)
    window = F.floor((F.col("ready_ms") - all_.low) / width).cast("bigint")
    taken = rows.withColumn("run", window).where(F.col("run") % every == 0).toArrow()
    return taken, taken.num_rows / all_.n


def _column(table: Any, name: str) -> Any:
    return table[name].to_numpy(zero_copy_only=False)


def _ms(values: Any) -> F64:
    """Return numbers as floats. Nulls are NaN."""
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
