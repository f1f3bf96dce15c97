"""One group reading a backlog over the native protocol: `heapline.connect` here, `heapline serve` in another process.

Compared with the same group, on the same data, in one process with the broker: the cost of the wire. Each row is
delivered, accessed and acked; the clock stops when the group is at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import uvloop

import heapline
from benchmarks.engine import Figure, figure
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.streams.groups import Spent, in_batches, one_by_one, timed
from benchmarks.streams.publishing import publish, sized


def run(quick: bool, directory: Path, scale: float) -> Iterator[Figure]:
    path, count = directory / "served", sized(1_000_000, quick, scale)
    embedded = asyncio.run(alone(path, count))
    with heapline_server(path) as server:
        batches, messages = uvloop.run(connected(server, count))
    for what, spent, target in (("batches=True", batches, 100_000), ("as messages", messages, None)):
        name, rate = f"a group reads {count:,} over native, {what}", spent.rate
        yield figure(
            f"{name}, next to embedded", rate, "messages/s", embedded.rate, rate / embedded.rate,
            "≥ 100 k/s" if target else None, rate >= target if target else None,
        )  # fmt: skip
        cpu = spent.cpu_us
        yield figure(
            f"{name}: CPU of the client, next to embedded", cpu, "µs/message", embedded.cpu_us, cpu / embedded.cpu_us,
            None, None, better="lower",
        )  # fmt: skip


async def alone(path: Path, count: int) -> Spent:
    async with heapline.open(str(path), spare_segment_bytes=1 << 26) as hl:
        await hl.create_topic("events")
        await publish(hl, "events", count)
        return max([await timed(hl, in_batches, f"embedded{turn}", count) for turn in range(2)])


async def connected(server: Serving, count: int) -> tuple[Spent, Spent]:
    async with heapline.connect(server.target, api_key=server.credential()) as hl:
        batches = max([await timed(hl, in_batches, f"batches{turn}", count) for turn in range(2)])
        messages = max([await timed(hl, one_by_one, f"messages{turn}", count) for turn in range(2)])
    return batches, messages
