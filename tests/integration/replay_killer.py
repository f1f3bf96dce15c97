"""The process that is killed: a replay into a topic, and one to a reader that notes each row in a file.

    python -m tests.integration.replay_killer DIRECTORY SIDE_FILE

It prints "open" when the directory is open, and exits when both are done. Batches are small, so that there are
many points at which it can be killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import heapline
from heapline.contract import replays
from heapline.engine.replays import job_runner, scan

BATCH_ROWS = 20
KEEP_ROWS = 100
BROKER = {"spare_segment_bytes": 1 << 20, "snapshot_bytes": 1 << 18}


async def read(hl: Any, side: int) -> None:
    async for row in hl.replay("jobs", checkpoint="mine", rate=4000):
        os.write(side, row.payload + b"\n")


async def replay(hl: Any) -> None:
    await hl.start_replay("again", "jobs", into="other")
    while (await hl.get_replay("again")).state == "running":  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def main(directory: str, side_file: str) -> None:
    job_runner.BATCH_ROWS = BATCH_ROWS
    replays.SAVE_ROWS = KEEP_ROWS
    scan.MergedScan.read.__defaults__ = (KEEP_ROWS, 1 << 20)
    side = os.open(side_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    os.write(side, b"open\n")
    async with heapline.open(directory, **BROKER) as hl, asyncio.TaskGroup() as group:
        group.create_task(read(hl, side))
        group.create_task(replay(hl))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
