"""`kill -9` of a process that replays: each message is in the target exactly once, and a reader with a checkpoint
misses none and sees again only rows since the last save."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import heapline
from tests.integration.replay_killer import BROKER, KEEP_ROWS

ROOT = Path(__file__).parents[2]
ROWS = 2000
KILLS = 6
TOPIC = {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}


async def fill(data: Path) -> None:
    async with heapline.open(data, **BROKER) as hl:
        await hl.create_topic("jobs", partitions=3, **TOPIC)
        await hl.create_topic("other", partitions=2, **TOPIC)
        for first in range(0, ROWS, 50):
            await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % n, key=str(n)) for n in range(first, first + 50)])


def run_children(data: Path, side: Path, draw: random.Random) -> int:
    """Run processes one after the other, killed at random times, the last to its end; return how many were killed."""
    killed = 0
    while True:
        before = side.stat().st_size if side.exists() else 0
        command = [sys.executable, "-m", "tests.integration.replay_killer", str(data), str(side)]
        with subprocess.Popen(command, cwd=ROOT) as child:
            try:
                deadline = time.monotonic() + 60
                wanted = before + draw.randrange(6, 2000)  # bytes in its record when it is killed
                while killed < KILLS and child.poll() is None and side_size(side) < wanted:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
                if killed == KILLS or child.poll() is not None:
                    assert child.wait(120) == 0
                    return killed
                killed += 1
            finally:
                child.kill()  # leaving the block waits for the child, which may be stuck


def side_size(side: Path) -> int:
    return side.stat().st_size if side.exists() else 0


async def test_replay_killed_repeatedly_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    data, side = tmp_path / "data", tmp_path / "side"
    await fill(data)
    killed = run_children(data, side, random.Random(11))
    assert killed >= 3, "the test proves nothing without kills"
    async with heapline.open(data, **BROKER) as hl:
        info = await hl.get_replay("again")
        assert (info.state, info.replayed, info.skipped) == ("done", ROWS, 0)
        got: Counter[bytes] = Counter()
        while messages := await hl.pop("other", 500):
            got.update(message.payload for message in messages)
            await hl.ack(messages)
    assert got == Counter(b"%d" % n for n in range(ROWS))
    runs = [run.split() for run in side.read_bytes().split(b"open\n")]
    seen = Counter(row for run in runs for row in run)
    assert set(seen) == {b"%d" % n for n in range(ROWS)}
    for run in runs:
        assert len(set(run)) == len(run)
    again = seen.total() - ROWS
    assert again <= killed * 4 * KEEP_ROWS, f"{again} rows were repeated after {killed} kills"
