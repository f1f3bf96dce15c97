"""Failures in bulk: a storm of nacks with backoff; a million messages moved to, listed in and replayed from the DLQ.

The broker and its callers share one process and one event loop. Each rate has the CPU time per message and the
longest step of the event loop, for which every other call had to wait. A step is measured in CPU time of its
thread, so that other processes of the machine do not count. The garbage collector is set as `heapline serve` sets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import heapline
from benchmarks.engine import PAYLOAD, Figure, figure
from heapline.cli.serve import tune_garbage_collection
from heapline.contract.dead_letters import ListDeadLetters

BATCH, CALLERS = 1000, 4
STEP_MS_MAX = 20.0
RETRIES = 3
LISTED_MAX = 50_000


class Steps:
    """Times every step of asyncio's event loop; `longest_ms` is the longest since it was last reset."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._run = asyncio.Handle._run

    def __enter__(self) -> Steps:
        run = self._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time_ns()
            run(handle)
            self.longest_ms = max(self.longest_ms, (time.thread_time_ns() - began) / 1e6)

        asyncio.Handle._run = timed  # type: ignore
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]


def run(quick: bool, directory: Path) -> Iterator[Figure]:
    count = 100_000 if quick else 1_000_000
    tune_garbage_collection()
    with Steps() as steps:
        yield from asyncio.run(all_figures(directory, count, steps))


async def all_figures(directory: Path, count: int, steps: Steps) -> list[Figure]:
    rows: list[Figure] = []

    async def measure(what: str, messages: int, work: Awaitable[Any]) -> None:
        steps.longest_ms = 0.0
        began, cpu = time.perf_counter(), time.process_time()
        await work
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        longest = steps.longest_ms
        rows.append(figure(what, messages / seconds, "messages/s", None, None, None, None))
        rows.append(figure(f"{what}: CPU", cpu / messages * 1e6, "µs/message", None, None, None, None, "lower"))
        met = longest <= STEP_MS_MAX
        target = f"≤ {STEP_MS_MAX:g} ms"
        rows.append(figure(f"{what}: longest step", longest, "ms", None, None, target, met, "lower"))

    async with heapline.open(str(directory / "broker")) as hl:
        backoff = heapline.Backoff(base=0.05, factor=2.0, max=0.2)
        await hl.create_topic("storm", backoff=backoff, max_retries_default=RETRIES)
        nacked = count // 10
        await fill(hl, "storm", nacked)
        what = f"nack storm, {nacked:,} messages, {RETRIES} retries with backoff"
        await measure(what, nacked * (RETRIES + 1), until_dead(hl, "storm", nacked, hl.nack))
        await hl.create_topic("dead")
        await fill(hl, "dead", count)
        await measure(f"driven into the DLQ, {count:,}", count, until_dead(hl, "dead", count, hl.bury))
        listed = min(count, LISTED_MAX)
        await measure(f"{listed:,} listed in the DLQ of {count:,}", listed, list_some(hl, "dead", listed))
        await measure(f"replayed from the DLQ, {count:,}", count, replay_all(hl, "dead", count))
    return rows


async def fill(hl: Any, topic: str, count: int) -> None:
    batch = [heapline.Outgoing(PAYLOAD, priority) for priority in range(BATCH)]
    for _ in range(0, count, BATCH * CALLERS):
        await asyncio.gather(*(hl.enqueue_batch(topic, batch) for _ in range(CALLERS)))


async def until_dead(hl: Any, topic: str, count: int, settle: Callable[[Any], Awaitable[None]]) -> None:
    """Pop and settle from several callers until all messages are dead letters."""

    async def caller() -> None:
        while True:
            if messages := await hl.pop(topic, BATCH, wait=0.05):
                await settle(messages)
            elif (await hl.stats(topic)).dead >= count:
                return

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def list_some(hl: Any, topic: str, count: int) -> None:
    cursor, seen = None, 0
    while seen < count:
        page = await hl.do(ListDeadLetters(topic, BATCH, cursor))
        seen, cursor = seen + len(page.items), page.cursor
        assert seen >= count or cursor is not None, f"only {seen} dead letters were listed"


async def replay_all(hl: Any, topic: str, count: int) -> None:
    replayed = await hl.dlq_replay(topic, where=heapline.DlqFilter())
    assert replayed == count, f"{replayed} dead letters were replayed, not {count}"
