"""TimingWheel: memory and speed with millions of timers waiting, and the cost of a tick.

Costs of the same call with few timers waiting, or `heapq` on tuples in this process, are the baselines.
A tick is `due`, `take` of what was due, and `next_wake`. Both wheels of the tick comparison have the same rows due
in the measured ticks (five each), so the only difference is the number of rows that wait.
"""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from heapline.core.wheel.timing_wheel import TimingWheel

START = 1_700_000_000_000
TICK_MS = 100
DAY_MS = 86_400_000
SPREAD_MS = 30 * DAY_MS
BATCH = 1000
SLICE = 4096

Figure = dict[str, Any]


def run(quick: bool) -> Iterator[Figure]:
    yield from small_cycles(500 if quick else 5000)
    yield from one_instant(1_000_000)
    rows = 4_000_000 if quick else 10_000_000
    small, _, _ = filled(10_000)
    large, seconds, peak = filled(rows)
    yield from inserts(rows, seconds)
    yield figure(f"wheel: bytes per timer, {rows:,} over 30 days", large.nbytes / rows, "bytes", None, None, "≤ 36", 36)
    yield figure("wheel: bytes per timer, peak while filling and merging", peak, "bytes", None, None, None, None)
    yield from ticks(small, large, rows, 600 if quick else 5000)
    yield from natural_ticks(large, rows)


def figure(
    name: str,
    value: float,
    unit: str,
    baseline: float | None,
    ratio: float | None,
    target: str | None,
    most: float | None,
) -> Figure:
    """A row whose ratio (or value, without a baseline) must be at most `most`."""
    measured = value if ratio is None else ratio
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "baseline": baseline,
        "ratio": ratio,
        "target": target,
        "met": None if most is None else measured <= most,
        "better": "lower",
    }


def filled(rows: int) -> tuple[TimingWheel, float, float]:
    """Return a wheel of rows spread over 30 days, the seconds it took with all merging, and the peak bytes per row."""
    wheel, random, seconds, peak = TimingWheel(START, TICK_MS), np.random.default_rng(1), 0.0, 0.0
    # At least an hour ahead, so that the later measured ticks have the same rows due in every wheel.
    for number in range(rows // BATCH):
        dues = START + random.integers(DAY_MS // 24, SPREAD_MS, BATCH)
        ids = np.arange(number * BATCH, (number + 1) * BATCH)
        begin = perf_counter()
        wheel.insert(dues, ids, ids, ids)
        if number % 16 == 15:
            wheel.maintain()
        seconds += perf_counter() - begin
        if number % 200 == 199:
            peak = max(peak, wheel.nbytes / len(wheel))
    begin, more = perf_counter(), True
    while more:
        more = wheel.maintain()
        peak = max(peak, wheel.nbytes / len(wheel))
    return wheel, seconds + perf_counter() - begin, peak


def inserts(rows: int, seconds: float) -> Iterator[Figure]:
    random, pushes = np.random.default_rng(1), 200_000
    dues, ids = random.integers(0, SPREAD_MS, pushes), np.arange(pushes)
    heap: list[tuple[int, int, int, int]] = []
    begin = perf_counter()
    for row in zip(dues.tolist(), ids.tolist(), ids.tolist(), ids.tolist(), strict=True):
        heapq.heappush(heap, row)
    base = pushes / (perf_counter() - begin)
    rate = rows / seconds
    yield {
        "name": f"wheel: inserts in batches of {BATCH}, merging included (baseline: heappush, 200 k)",
        "value": rate,
        "unit": "1/s",
        "baseline": base,
        "ratio": rate / base,
        "target": "≥ 1 M/s",
        "met": rate >= 1e6,
        "better": "higher",
    }


def ticks(small: TimingWheel, large: TimingWheel, rows: int, count: int) -> Iterator[Figure]:
    for wheel in (small, large):
        dues = START + 20_000 + np.arange(5 * count) * TICK_MS // 5
        wheel.insert(dues, dues, dues, dues)
    # Alternating, so that a busy machine disturbs both alike; the median, because it disturbs only some ticks.
    spent: tuple[list[float], list[float]] = ([], [])
    for number in range(count):
        now = START + 20_000 + (number + 1) * TICK_MS
        for wheel, times in zip((small, large), spent, strict=True):
            begin = perf_counter()
            wheel.take(len(wheel.due(now, SLICE).ids))
            wheel.next_wake()
            times.append((perf_counter() - begin) * 1e6)
    name = f"wheel: tick with {rows:,} waiting, 5 due (baseline: 10,000 waiting)"
    for what, of in (("median", statistics.median), ("mean", statistics.fmean)):
        base, value = of(spent[0]), of(spent[1])
        target = "≤ 1.5×" if what == "median" else None
        yield figure(f"{name}, {what}", value, "µs", base, value / base, target, 1.5 if target else None)
    worst = max(spent[1])
    yield figure("wheel: longest such tick", worst, "µs", max(spent[0]), worst / max(spent[0]), None, None)


def natural_ticks(wheel: TimingWheel, rows: int) -> Iterator[Figure]:
    """Run ticks at the natural rate of due rows, across the ends of slots of every level."""
    now, times, fired = START + 8 * 3_600_000, [], 0
    while len(due := wheel.due(now, 65_536).ids):
        wheel.take(len(due))
    for number in range(1, 3_800):
        begin = perf_counter()
        fired += len(wheel.take(len(wheel.due(now + number * TICK_MS, SLICE).ids)).ids)
        wheel.next_wake()
        times.append((perf_counter() - begin) * 1e6)
    name = f"wheel: tick at the natural rate of {rows:,} over 30 days ({fired / len(times):.2f} due a tick)"
    yield figure(f"{name}, mean", statistics.fmean(times), "µs", None, None, None, None)
    yield figure(f"{name}, 99th percentile", statistics.quantiles(times, n=100)[98], "µs", None, None, None, None)
    yield figure(f"{name}, longest", max(times), "µs", None, None, None, None)


def one_instant(rows: int) -> Iterator[Figure]:
    wheel, ids = TimingWheel(START, TICK_MS), np.random.default_rng(2).permutation(rows)
    for number in range(rows // BATCH):
        batch = ids[number * BATCH : (number + 1) * BATCH]
        wheel.insert(np.full(BATCH, START + 5_000), batch, batch, batch)
    times = []
    while len(wheel):
        begin = perf_counter()
        wheel.take(len(wheel.due(START + 5_000, SLICE).ids))
        times.append((perf_counter() - begin) * 1e3)
    name = f"wheel: slice of {SLICE} when {rows:,} fall due at once"
    yield figure(f"{name}, mean", statistics.fmean(times), "ms", None, None, None, None)
    yield figure(f"{name}, first (brings up the slot)", times[0], "ms", None, None, None, None)
    yield figure(f"{name}, longest", max(times), "ms", None, None, None, None)


def small_cycles(count: int) -> Iterator[Figure]:
    """Insert 100 rows 50 ms ahead and fire them; compared with the same in heapq."""
    wheel, heap, ids = TimingWheel(START, TICK_MS), list[tuple[int, int, int, int]](), np.arange(100)
    spent: tuple[list[float], list[float]] = ([], [])
    now = START
    for _ in range(count):
        dues = np.full(100, now + 50)
        now += 50
        begin = perf_counter()
        wheel.insert(dues, ids, ids, ids)
        wheel.next_wake()
        wheel.take(len(wheel.due(now, SLICE).ids))
        middle = perf_counter()
        for row in zip(dues.tolist(), ids.tolist(), ids.tolist(), ids.tolist(), strict=True):
            heapq.heappush(heap, row)
        while heap and heap[0][0] <= now:
            heapq.heappop(heap)
        spent[0].append((middle - begin) * 1e6)
        spent[1].append((perf_counter() - middle) * 1e6)
    value, base = statistics.median(spent[0]), statistics.median(spent[1])
    yield figure(
        "wheel: insert 100 rows 50 ms ahead and fire them (baseline: heapq)", value, "µs", base, value / base, "≤ 1×", 1
    )


if __name__ == "__main__":
    for row in run(quick=True):
        print(json.dumps(row, ensure_ascii=False))
