"""RunHeap compared with `heapq` on tuples, both in this process and on the same rows.

Every figure is yielded as a dict: name, value, unit, baseline (heapq's figure or None), ratio (baseline / value),
target and met. Figures per entry are CPU time and include the merging that `maintain` does; the longest call is wall
time, so a busy machine shows in it.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from time import perf_counter, process_time
from typing import Any

import numpy as np

from heapline.core.heap.run_heap import RunHeap
from heapline.core.heap.runs import Column

BATCH = 1000
MAINTAIN = 65536

Figure = dict[str, Any]
Table = tuple[Column, Column, Column]


def run(quick: bool) -> Iterator[Figure]:
    rows = 2_000_000
    table = random_table(rows)
    tuples = list(zip(*(column.tolist() for column in table), strict=True))
    heapq.heapify(tuples)
    yield from pops_from_many_runs(table, tuples, 200_000 if quick else 1_000_000)
    yield from single_pops(table, tuples, 100_000 if quick else 400_000)
    yield from interleaved(table, tuples, 60 if quick else 400)
    yield from batch_pushes(table)
    del tuples
    yield from small_queue(4 if quick else 40)
    yield from singles_at_depth_ten(20_000 if quick else 200_000)
    yield from growth()


def pops_from_many_runs(table: Table, tuples: list[Any], entries: int) -> Iterator[Figure]:
    heap = unequal_runs(table)
    assert heap.lane_count >= 30
    base = timed(lambda: [heapq.heappop(tuples) for _ in range(20_000)]) / 20_000
    spent = timed(lambda: [heap.pop(100) for _ in range(entries // 100)])
    yield against("pop 100 from 31 runs, 2 M", spent / entries, base, 10)


def single_pops(table: Table, tuples: list[Any], entries: int) -> Iterator[Figure]:
    heap = unequal_runs(table)
    base = timed(lambda: [heapq.heappop(tuples) for _ in range(20_000)]) / 20_000
    spent = timed(lambda: [heap.pop_one() for _ in range(entries)])
    yield against("pop_one, 2 M", spent / entries, base, 3)


def interleaved(table: Table, tuples: list[Any], rounds: int) -> Iterator[Figure]:
    """Push 500, pop 500, at a depth of 2 M that was itself pushed in batches."""
    heap = pushed(table)
    more = random_table(rounds * 500, seed=2)
    batches = list(batches_of(more, 500))
    fresh = list(zip(*(column[: 20 * 500].tolist() for column in more), strict=True))

    def baseline() -> None:
        for start in range(0, len(fresh), 500):
            for row in fresh[start : start + 500]:
                heapq.heappush(tuples, row)
            for _ in range(500):
                heapq.heappop(tuples)

    def ours() -> None:
        for batch in batches:
            heap.push(*batch)
            heap.pop(500)
            heap.maintain(MAINTAIN)

    yield against("push 500 / pop 500 at 2 M", timed(ours) / (rounds * 500), timed(baseline) / len(fresh), 4)


def batch_pushes(table: Table) -> Iterator[Figure]:
    """From nothing to 2 M, merges included; both sides are given columns."""
    held: list[Any] = []

    def baseline() -> None:
        for keys, ids, positions in batches_of(table, BATCH):
            for row in zip(keys.tolist(), ids.tolist(), positions.tolist(), strict=True):
                heapq.heappush(held, row)

    base = timed(baseline) / len(table[0])
    yield against("push 1000 to 2 M", timed(lambda: pushed(table)) / len(table[0]), base, 2)


def small_queue(swings: int) -> Iterator[Figure]:
    """Batches of 100 pushed and popped in turn, while the depth swings from 0 to 2000 and back."""
    batches = list(batches_of(random_table(60 * 100, seed=3), 100))
    swing = ([True, True, False] * 20 + [True, False, False] * 20) * swings
    held: list[Any] = []
    heap = RunHeap()

    def baseline() -> None:
        for turn, is_push in enumerate(swing):
            if is_push:
                for row in zip(*(column.tolist() for column in batches[turn % 60]), strict=True):
                    heapq.heappush(held, row)
            else:
                for _ in range(100):
                    heapq.heappop(held)

    def ours() -> None:
        for turn, is_push in enumerate(swing):
            if is_push:
                heap.push(*batches[turn % 60])
            else:
                heap.pop(100)
            heap.maintain(MAINTAIN)

    entries = len(swing) // 2 * 100
    yield against("push 100 / pop 100 at 0 to 2000", timed(ours) / entries, timed(baseline) / entries, None)


def singles_at_depth_ten(rounds: int) -> Iterator[Figure]:
    heap, held = RunHeap(), []
    keys = random_table(rounds + 10, seed=4)[0].tolist()
    for number, key in enumerate(keys[:10]):
        heap.push_one(key, number, 0)
        held.append((key, number, 0))
    heapq.heapify(held)

    def ours() -> None:
        for number, key in enumerate(keys[10:]):
            heap.push_one(key, number, 0)
            heap.pop_one()

    def baseline() -> None:
        for number, key in enumerate(keys[10:]):
            heapq.heappush(held, (key, number, 0))
            heapq.heappop(held)

    each = timed(ours) / (2 * rounds) * 1e6
    base = timed(baseline) / (2 * rounds) * 1e6
    yield figure("push_one / pop_one at 10, each", each, "µs", base, base / each, "≤ 3 µs", each <= 3)


def growth() -> Iterator[Figure]:
    """Grow to 10 M in batches of 1000 with `maintain` after each; measure the longest call and the bytes per row."""
    heap, longest, worst = RunHeap(), 0.0, 0.0
    generator = np.random.default_rng(5)
    positions = np.zeros(BATCH, np.int64)
    for start in range(0, 10_000_000, BATCH):
        keys = generator.integers(-(2**63), 2**63 - 1, BATCH, dtype=np.int64)
        before = perf_counter()
        heap.push(keys, np.arange(start, start + BATCH), positions)
        between = perf_counter()
        heap.maintain(MAINTAIN)
        longest = max(longest, between - before, perf_counter() - between)
        if len(heap) >= 1_800_000 and start % (50 * BATCH) == 0:
            worst = max(worst, heap.nbytes / len(heap))
        if len(heap) == 2_000_000:
            yield figure("bytes per row at 2 M", worst, "bytes", None, None, "≤ 40 bytes", worst <= 40)
            worst = 0.0
    yield figure("bytes per row from 2 M to 10 M", worst, "bytes", None, None, "≤ 40 bytes", worst <= 40)
    yield figure("longest call, growing to 10 M", longest * 1e3, "ms", None, None, "≤ 20 ms", longest <= 0.02)


def random_table(rows: int, seed: int = 1) -> Table:
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, rows, dtype=np.int64)
    return keys, np.arange(rows), np.arange(rows) * 64


def batches_of(table: Table, rows: int) -> Iterator[Table]:
    for start in range(0, len(table[0]), rows):
        keys, ids, positions = (column[start : start + rows] for column in table)
        yield keys, ids, positions


def unequal_runs(table: Table) -> RunHeap:
    """31 lanes, each a fifth smaller than the one before; nothing merges them."""
    heap = RunHeap()
    weights = 0.8 ** np.arange(31)
    ends = np.cumsum(weights / weights.sum() * len(table[0])).astype(int)
    ends[-1] = len(table[0])
    start = 0
    for end in ends.tolist():
        heap.push(*(column[start:end] for column in table))
        start = end
    return heap


def pushed(table: Table) -> RunHeap:
    heap = RunHeap()
    for batch in batches_of(table, BATCH):
        heap.push(*batch)
        heap.maintain(MAINTAIN)
    return heap


def timed(call: Callable[[], object]) -> float:
    """CPU seconds, because this is one thread that never waits, and the machine may be shared."""
    started = process_time()
    call()
    return process_time() - started


def against(name: str, seconds: float, base: float, ratio_min: float | None) -> Figure:
    ratio = base / seconds
    target = f"≥ {ratio_min}×" if ratio_min else None
    return figure(name, seconds * 1e6, "µs/entry", base * 1e6, ratio, target, ratio >= ratio_min if ratio_min else None)


def figure(
    name: str,
    value: float,
    unit: str,
    baseline: float | None,
    ratio: float | None,
    target: str | None,
    met: bool | None,
) -> Figure:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 3),
        "ratio": None if ratio is None else round(ratio, 1),
        "target": target,
        "met": met,
    }


if __name__ == "__main__":
    import sys

    for each in run(quick="--quick" in sys.argv):
        print(json.dumps(each), flush=True)
