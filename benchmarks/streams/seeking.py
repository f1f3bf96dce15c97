"""Seeking to a time in a large journal: by journal time and wall time, by a new reader.

The journal has real segments, units and indexes, and holes for payloads (holes.py). Its segments are dropped from the
page cache before each cold seek. Compared with a second seek by the same reader; the specified target is for the
first one. One partition is in every unit, another in every thousandth: it is silent for hundreds of megabytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.engine import Figure, figure
from benchmarks.streams.holes import holed_journal
from heapline.journal import LogReader, RealDisk

JOURNAL_BYTES = 10_000_000_000
SEGMENT_BYTES = 64 << 20
UNIT_BYTES = 512 << 10
ROWS = 16  # of a unit
START_MS, STEP_MS = 1_700_000_000_000, 10
QUIET_EVERY = 1000


def run(quick: bool, directory: Path, scale: float) -> Iterator[Figure]:
    nbytes, path = round(JOURNAL_BYTES * scale * (0.1 if quick else 1)), str(directory / "large")
    units = holed_journal(
        path, nbytes, unit_bytes=UNIT_BYTES, rows=ROWS, segment_bytes=SEGMENT_BYTES, start_ms=START_MS, step_ms=STEP_MS,
        quiet_every=QUIET_EVERY,
    )  # fmt: skip
    for kind in ("time", "wall"):
        for partition, which in ((0, "a busy"), (1, "a quiet")):
            first, again = seeks(path, units, kind, partition, 10 if quick else 25)
            by = "journal time" if kind == "time" else "wall time"
            yield figure(
                f"first seek by {by} in {nbytes / 1e9:g} GB, {which} partition, longest of {len(first)}", max(first),
                "ms", median(again), max(first) / median(again), "≤ 50 ms", max(first) <= 50, better="lower",
            )  # fmt: skip


def seeks(path: str, units: int, kind: str, partition: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of first seeks, on cold files, and of second ones elsewhere by the same readers."""
    rng, first, again = random.Random(partition), [], []
    for _ in range(rounds):
        forget(path)
        reader = LogReader(RealDisk(), path)
        for spent in (first, again):
            unit = rng.randrange(units)
            start = perf_counter()
            offset = reader.offset_at(partition, **{kind: START_MS + unit * STEP_MS})
            spent.append((perf_counter() - start) * 1000)
            right = unit * ROWS if partition == 0 else unit // QUIET_EVERY
            assert offset == right, f"unit {unit} of partition {partition}: {offset} instead of {right}"
    return first, again


def forget(path: str) -> None:
    """Drop the files from the page cache (they are already written out)."""
    for entry in os.scandir(path):
        if entry.is_file():
            fd = os.open(entry.path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
