"""Cost, evenness and moves of strategies: Heapline's compared with a plain ring and round robin.

Times are CPU time, the best of several runs, because a strategy never waits and the machine may be shared. The minimum
that must move: its share (the mean load) when a worker joins, and what it held when one leaves. Moves are in weight.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

from benchmarks.assign.plain_ring import PlainRing
from heapline.assign.partitions import Partition
from heapline.assign.strategies import (
    AssignmentStrategy,
    RoundRobinStrategy,
    Shares,
    WeightedConsistentHashStrategy,
    affinity,
    moved_share,
)

Figure = dict[str, Any]
OURS, PLAIN, IN_TURN = WeightedConsistentHashStrategy(150), PlainRing(150), RoundRobinStrategy()


def run(quick: bool) -> Iterator[Figure]:
    repeats, steps = (7, 8) if quick else (25, 40)
    yield from times(64, 5_000, 10.0, repeats)
    yield from times(500, 100_000, 500.0, max(2, repeats // 5))
    for weights in ("alike", "weighted"):
        yield from changes(weights, steps)
        yield from spread(weights, steps)
    yield memory()


def times(worker_count: int, count: int, target_ms: float, repeats: int) -> Iterator[Figure]:
    workers, parts = workers_named(worker_count), partitions(count, "weighted")
    base = best(lambda: PLAIN.assign(workers, parts), repeats)
    before = OURS.assign(workers, parts)
    size = f"{worker_count} × 150 × {count:,}".replace(",", " ")
    asked: dict[str, Callable[[], object]] = {
        "from nothing": lambda: OURS.assign(workers, parts),
        "one joins": lambda: OURS.assign([*workers, "newcomer"], parts, before),
        "one leaves": lambda: OURS.assign(workers[1:], parts, before),
    }
    for what, call in asked.items():
        spent = best(call, repeats)
        yield row(f"{size}, {what}", spent, "ms", base, base / spent, f"≤ {target_ms:g} ms", spent <= target_ms)


def changes(weights: str, steps: int) -> Iterator[Figure]:
    """Let workers join and leave a pool of about 64 one after the other, each time from the previous assignment."""
    ours, plain, in_turn = (walk(strategy, weights, steps) for strategy in (OURS, PLAIN, IN_TURN))
    for what in ("joins", "leaves"):
        value, base = (max(x.ratio for x in each if x.what == what) for each in (ours, plain))
        yield row(
            f"moved when one {what}, of the least possible, {weights}",
            value,
            "×",
            base,
            base / value,
            "≤ 1.2",
            value <= 1.2,
        )
    kept, base = (min(x.stays for x in each) * 100 for each in (ours, in_turn))
    yield row(f"partitions that stay, {weights}; round robin", kept, "%", base, kept / base, "≥ 85 %", kept >= 85)


def spread(weights: str, steps: int) -> Iterator[Figure]:
    workers, parts = workers_named(64), partitions(5_000, weights)
    value, base = (highest(strategy.assign(workers, parts)) for strategy in (OURS, PLAIN))
    yield row(f"highest load, of the mean, {weights}", value, "×", base, base / value, "≤ 1.15", value <= 1.15)
    value, base = (max(x.highest for x in walk(strategy, weights, steps)) for strategy in (OURS, PLAIN))
    yield row(f"the same after joins and leaves, {weights}", value, "×", base, base / value, "≤ 1.15", value <= 1.15)


def memory() -> Figure:
    """Measure a leader's peak memory: partitions, the previous and the next assignment, and the calculation."""
    ours, base = (peak_mb(strategy) for strategy in (OURS, PLAIN))
    return row("memory at 64 × 150 × 5 000, at its highest", ours, "MB", base, base / ours, "≤ 10 MB", ours <= 10)


class Change:
    def __init__(self, what: str, before: Shares, after: Shares, least: float) -> None:
        total = sum(loads(after))
        self.what = what
        self.ratio = moved_share(before, after) * total / least
        self.stays = affinity(before, after)
        self.highest = highest(after)


def walk(strategy: AssignmentStrategy, weights: str, steps: int) -> list[Change]:
    chance = random.Random(64)
    present, parts = workers_named(64), partitions(5_000, weights)
    shares = strategy.assign(present, parts)
    found = []
    for step in range(steps):
        before = shares
        if step % 2:
            present = [*present, f"late-{step}"]
            shares = strategy.assign(present, parts, before)
            least = sum(loads(shares)) / len(present)
        else:
            leaver = chance.choice(present)
            present = [worker for worker in present if worker != leaver]
            shares = strategy.assign(present, parts, before)
            least = sum(partition.weight for partition in before[leaver])
        found.append(Change("joins" if step % 2 else "leaves", before, shares, least))
    return found


def workers_named(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


def partitions(count: int, weights: str) -> list[Partition]:
    chance = random.Random(5)
    each = {"alike": lambda: 1, "weighted": lambda: chance.choice((50, 100, 150, 400))}[weights]
    return [Partition((f"tool{n // 8:05}", f"chamber{n % 8}"), each()) for n in range(count)]


def loads(shares: Shares) -> list[int]:
    return [sum(partition.weight for partition in share) for share in shares.values()]


def highest(shares: Shares) -> float:
    found = loads(shares)
    return max(found) * len(found) / sum(found)


def best(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest CPU time in milliseconds."""
    found = []
    for _ in range(repeats):
        started = process_time()
        call()
        found.append(process_time() - started)
    return min(found) * 1e3


def peak_mb(strategy: AssignmentStrategy) -> float:
    tracemalloc.start()
    parts = partitions(5_000, "weighted")
    before = strategy.assign(workers_named(64), parts)
    after = strategy.assign(workers_named(65), parts, before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(after) == 65
    return peak / 1e6


def row(
    name: str, value: float, unit: str, baseline: float, ratio: float, target: str | None, met: bool | None
) -> Figure:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": round(baseline, 3),
        "ratio": round(ratio, 2),
        "target": target,
        "met": met,
        "better": "higher",
    }
