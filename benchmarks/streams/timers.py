"""Ten million scheduled messages: published, recovered after a restart, and on time while others are enqueued.

They are spread so that 5000 per second become due, beginning an hour ahead. One process publishes them, writes a
snapshot and is killed with -9; another opens its directory (from the snapshot, then from the journal alone). Then the
broker's clock is set ahead to the first due time. For some seconds 20 000 messages per second are enqueued in batches,
while a group waits for fired messages.

*Fired*: from a message's due time to the journal time of the unit that records it as due, by the
log. *Delivered*: until the group's member has it, by the clock. A tick is 100 ms. The baseline of publishing is
messages without a schedule, in the same process right after; that of opening is reading and checksumming the files.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import heapline
from benchmarks.engine import Figure, figure, read_and_checksum
from benchmarks.herd import ShiftedClock
from benchmarks.rows import Step
from benchmarks.streams.groups import Acks
from benchmarks.streams.publishing import sized
from heapline.contract.config import BrokerConfig
from heapline.contract.message import Outgoing
from heapline.engine import EmbeddedBroker

PAYLOAD = b"x" * 64
BATCH = 1000
AHEAD_MS = 3_600_000
DUE_PER_S = 5000
ENQUEUED_PER_S = 20_000
CALL_ROWS = 100  # of an enqueue while timers fire
TICK_MS = 100


def run(quick: bool, directory: Path, scale: float) -> Iterator[Figure | Step]:
    count = sized(10_000_000, quick, scale, least=20_000)
    seconds = min(15.0, 0.6 * count / DUE_PER_S)
    path = directory / "timers"
    yield Step(f"publishing {count:,}", 0, 3)
    began, scheduled, plain = publish_and_die(path, count)
    yield figure(
        f"publish {count:,} scheduled, batches of {BATCH}, next to unscheduled", scheduled, "messages/s", plain,
        scheduled / plain, None, None,
    )  # fmt: skip
    yield Step("opening again", 1, 3)
    yield from opening(path, count)
    yield Step("falling due", 2, 3)
    fired, delivered, enqueued = asyncio.run(falling_due(path, began, seconds))
    most = TICK_MS + 50
    load = f"{DUE_PER_S:,}/s fall due, {ENQUEUED_PER_S:,}/s enqueued, {count:,} wait"
    p99 = float(np.percentile(fired, 99))
    yield figure(
        f"due to fired, p99: {load}", p99, "ms", float(TICK_MS), p99 / TICK_MS, f"≤ 1 tick + 50 ms = {most} ms",
        p99 <= most, better="lower",
    )  # fmt: skip
    yield figure(f"due to fired, p50: {load}", float(np.median(fired)), "ms", None, None, None, None)
    late = float(np.percentile(delivered, 99))
    yield figure(
        f"due to delivered to a group, p99: {load}", late, "ms", p99, late / p99, None, None, better="lower"
    )  # fmt: skip
    yield figure("enqueued meanwhile", enqueued, "messages/s", None, None, f"≥ {ENQUEUED_PER_S}/s", enqueued >= 19_500)


# -- publishing, and the end of it -------------------------------------------------------------------------------------


def publish_and_die(path: Path, count: int) -> tuple[int, float, float]:
    """The time of the first due message, and the rates of scheduled and other messages."""
    command = [sys.executable, "-m", "benchmarks.streams.timers", str(path), str(count)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    reported = child.stdout.readline().split()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(reported) == 3, "the publishing process failed"
    return int(reported[0]), float(reported[1]), float(reported[2])


async def fill(path: str, count: int) -> None:
    """In the child: publish, report, and wait to be killed."""
    began = time.time_ns() // 1_000_000 + AHEAD_MS
    first = datetime.fromtimestamp(began / 1000, UTC)
    async with heapline.open(path, spare_segment_bytes=1 << 26) as hl:
        await hl.create_topic("jobs")
        await hl.create_topic("plain")
        scheduled = await rate(hl, "jobs", count, first)
        await hl.snapshot("jobs")
        plain = await rate(hl, "plain", min(count, 500_000), None)
        await hl.delete_topic("plain")
        await hl.enqueue("jobs", PAYLOAD)
        print(began, scheduled, plain, flush=True)
        await asyncio.sleep(600)


async def rate(hl: heapline.Broker, topic: str, count: int, first: datetime | None) -> float:
    """Spread each batch over the whole time; a message's priority is its number in due order."""
    batches = iter(range(count // BATCH))
    step = timedelta(milliseconds=1000 / DUE_PER_S)

    async def publisher() -> None:
        for batch in batches:
            rows = range(batch, count, count // BATCH)
            if first is None:
                messages = [Outgoing(PAYLOAD, row) for row in rows]
            else:
                messages = [Outgoing(PAYLOAD, row, deliver_at=first + row * step) for row in rows]
            await hl.enqueue_batch(topic, messages)

    start = perf_counter()
    await asyncio.gather(*(publisher() for _ in range(4)))
    return count / (perf_counter() - start)


# -- opening -----------------------------------------------------------------------------------------------------------


def opening(path: Path, count: int) -> Iterator[Figure]:
    (topic,) = (path / "topics" / "default").iterdir()
    snapshot = asyncio.run(open_time(path, count))
    checksummed = min(read_and_checksum(sorted(topic.glob("*.seg"))) for _ in range(2))
    for file in (topic / "snapshots").iterdir():
        file.unlink()
    replayed = asyncio.run(open_time(path, count))
    for spent, how in ((snapshot, "from snapshot"), (replayed, "journal alone")):
        yield figure(
            f"open after kill -9, {count:,} scheduled, {how}", spent, "s", checksummed, spent / checksummed, None, None,
            better="lower",
        )  # fmt: skip


async def open_time(path: Path, count: int) -> float:
    """Return the seconds until everything is loaded. It writes no snapshot, so the next opening has the same work."""
    broker = heapline.open(str(path))
    start = perf_counter()
    await broker.__aenter__()
    spent = perf_counter() - start
    stats = await broker.stats("jobs")
    assert stats.delayed == count, f"{stats.delayed} messages were recovered, {count} were enqueued"
    broker.topics._runners["jobs"].loaded.snapshot_unit = 1 << 60
    await broker.close()
    return spent


# -- falling due -------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The columns that a member of the group received, and when."""

    offsets: Any
    numbers: Any  # in due order; negative: never scheduled
    at_ms: int


async def falling_due(path: Path, began: int, seconds: float) -> tuple[Any, Any, float]:
    """Return delays in ms from due to fired and to delivered, and the rate of enqueues meanwhile."""
    clock = ShiftedClock()
    async with EmbeddedBroker(str(path), config=BrokerConfig(), clock=clock) as hl:
        end = (await hl.offsets("jobs"))[0][1]
        await hl.create_group("jobs", "waiting", start="latest")
        seen: list[Seen] = []
        reader = asyncio.create_task(follow(hl, clock, seen))
        await asyncio.sleep(0.2)
        clock.ahead_ms = began - clock.wall_ms() - 300
        enqueued = await enqueue_for(hl, 0.3 + seconds)
        await until_delivered(seen, seconds)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        fired = {
            event.offset: (frame.wall_ms, event.row_count)
            async for frame in hl.read_log("jobs", 0, end)
            for event in frame.events
            if event.kind == "fired"
        }
    return *delays(seen, fired, began, seconds), enqueued


async def until_delivered(seen: list[Seen], seconds: float) -> None:
    """Wait until the group has everything that became due within these seconds, with a limit."""
    deadline = perf_counter() + 30
    while perf_counter() < deadline:
        numbers = np.concatenate([s.numbers for s in seen]) if seen else np.array([])
        if np.count_nonzero((numbers >= 0) & (numbers < seconds * DUE_PER_S)) >= round(seconds * DUE_PER_S):
            return
        await asyncio.sleep(0.1)


async def follow(hl: EmbeddedBroker, clock: ShiftedClock, seen: list[Seen]) -> None:
    acks = Acks()
    async with hl.subscribe("jobs", group="waiting", credits=100_000, batches=True) as rows:
        async for batch in rows:
            seen.append(Seen(batch.offsets, batch.priorities, clock.wall_ms()))
            await acks.add(batch.ack)


async def enqueue_for(hl: EmbeddedBroker, seconds: float) -> float:
    """Send batches at an even pace, however slow the answers; return messages per second."""
    batch, pace = [Outgoing(PAYLOAD, -1)] * CALL_ROWS, CALL_ROWS / ENQUEUED_PER_S
    start, calls = perf_counter(), set[asyncio.Task[Any]]()
    for number in range(round(seconds / pace)):
        await asyncio.sleep(max(0.0, start + number * pace - perf_counter()))
        calls.add(task := asyncio.create_task(hl.enqueue_batch("jobs", batch)))
        task.add_done_callback(calls.discard)
    await asyncio.gather(*calls)
    return round(seconds / pace) * CALL_ROWS / (perf_counter() - start)


def delays(seen: list[Seen], fired: dict[int, tuple[int, int]], began: int, seconds: float) -> tuple[Any, Any]:
    """For messages due within these seconds, return the ms until they fired, by the log, and until delivery."""
    offsets, numbers = (np.concatenate([getattr(s, name) for s in seen]) for name in ("offsets", "numbers"))
    at = np.concatenate([np.full(len(s.offsets), s.at_ms) for s in seen])
    counted = (numbers >= 0) & (numbers < seconds * DUE_PER_S)
    assert counted.sum() >= 0.99 * seconds * DUE_PER_S, f"only {counted.sum()} were delivered"
    starts = np.array(sorted(fired))
    walls = np.array([fired[start][0] for start in starts.tolist()])
    due = began + numbers[counted] * 1000 / DUE_PER_S
    recorded = walls[np.searchsorted(starts, offsets[counted], side="right") - 1]
    return recorded - due, at[counted] - due


if __name__ == "__main__":
    asyncio.run(fill(sys.argv[1], int(sys.argv[2])))
