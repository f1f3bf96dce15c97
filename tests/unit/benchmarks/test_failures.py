"""The benchmark of failures, tiny: it reaches every state that it counts, and detects a step that is too long."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks import failures
from benchmarks.rows import Row


def test_storm_and_dead_letters_are_counted_with_their_longest_step(tmp_path: Path) -> None:
    with failures.Steps() as steps:
        rows = asyncio.run(failures.all_figures(tmp_path, 40_000, steps))
    names = [Row.from_yielded(row).name for row in rows]
    assert names[0] == "nack storm, 4,000 messages, 3 retries with backoff"
    assert names[-1] == "replayed from the DLQ, 40,000: longest step"
    assert len(names) == 12
    assert all(row["value"] > 0 for row in rows)


def test_long_step_is_detected_and_the_loop_is_restored() -> None:
    before = asyncio.Handle._run

    async def main() -> None:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass

    with failures.Steps() as steps:
        asyncio.run(main())
    assert steps.longest_ms >= 30
    assert asyncio.Handle._run is before
