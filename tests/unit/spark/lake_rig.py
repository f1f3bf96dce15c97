"""Archive without Spark: runs tasks one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from heapline.contract.message import Outgoing


class TasksAtOnce:
    """The part of a SparkSession that an archive uses. `after` is called when files are written, before they are
    committed."""

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        self._after = after

    def range(self, start: int, end: int, step: int, partitions: int) -> _Numbers:
        return _Numbers(range(start, end, step), self._after)


class _Numbers:
    def __init__(self, numbers: range, after: Callable[[], None]) -> None:
        self._numbers, self._after = numbers, after

    def mapInArrow(self, task: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> _Numbers:
        self._task = task
        return self

    def collect(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for number in self._numbers:
            batch = pa.RecordBatch.from_arrays([pa.array([number])], ["id"])
            for result in self._task(iter([batch])):
                found += [tuple(row.values()) for row in result.to_pylist()]
        self._after()
        return found


def fill(hl: Any, count: int, topic: str = "jobs", first: int = 0) -> None:
    hl.enqueue_batch(topic, [Outgoing(b"%06d" % i, i % 7, key=f"k{i % 31}") for i in range(first, first + count)])


def reclaim(hl: Any) -> None:
    """Write and finish enough messages for several segments of 1 MiB, and reclaim the unneeded ones."""
    for _ in range(3):
        for _ in range(4):
            hl.enqueue_batch("jobs", [Outgoing(bytes(100_000))] * 5)
            while got := hl.pop("jobs", 1000):
                hl.ack(got)
        hl.snapshot("jobs")
    hl._run(hl._broker.topics.runner("jobs").maintenance.reclaim())


def rows_in(lake: Path, view: str) -> list[tuple[int, int]]:
    """(partition, offset) of all rows, in order."""
    from deltalake import DeltaTable

    table = DeltaTable(str(lake / view)).to_pyarrow_table(columns=["partition", "offset"])
    return sorted(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
